"""Keras' `steps_per_execution`: several steps a call, each with its own line, and nothing learned otherwise."""

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run

CASES = [(name, count) for name in BACKENDS if name != "torch" for count in (1, 2)]


@pytest.mark.proof
@pytest.mark.parametrize(("name", "count"), CASES)
def test_several_steps_a_call_learn_the_same(name, count, tmp_path):
    """24 steps in 3 epochs, the last batch of each smaller; also 10 of them, and the rest resumed."""

    def train(steps, end, folder):
        return result_of(run(PROGRAMS / "several_steps.py", name, count, steps, end, tmp_path / folder, backend=name))

    single, several = train(1, 0, "single"), train(3, 0, "several")
    stopped = train(3, 10, "resumed")  # ends within what would be a call
    assert stopped["steps"] == list(range(1, 11))
    for other in (several, train(3, 0, "resumed")):
        assert other["steps"] == single["steps"] == list(range(1, 25))
        assert min(other["speeds"] + single["speeds"]) > 0
        np.testing.assert_allclose(other["losses"], single["losses"], rtol=2e-5)
        np.testing.assert_allclose(other["rates"], single["rates"], rtol=1e-6)
        np.testing.assert_allclose(other["history"], single["history"], rtol=2e-5)
        np.testing.assert_allclose(other["outputs"], single["outputs"], atol=2e-5)
    # Between calls: behind 3, 6 and 8 steps of each epoch. Which is due while one is being written is left out.
    numbers = {int(entry[5:13]) for entry in several["checkpoints"] if entry.startswith("step-")}
    assert {8, 16, 24} <= numbers <= {3, 6, 8, 11, 14, 16, 19, 22, 24}
