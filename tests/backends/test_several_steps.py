"""Keras' `steps_per_execution`: several steps a call, each with its own line, and nothing learned otherwise."""

import pytest

from tests.helpers import BACKENDS, assert_alike, files_of_run, result_of, steps_in, train_resumable

CASES = [(name, count) for name in BACKENDS for count in (1, 2)]


@pytest.mark.proof
@pytest.mark.parametrize(("name", "count"), CASES)
def test_several_steps_a_call_learn_the_same(name, count, tmp_path):
    """40 steps in 4 epochs, the last batch of each smaller; also 15 of them, and the rest resumed."""

    def train(steps, folder, **more):
        choices = {"precision": "float64", "checkpoint_every": "3", "keep": 100, "resume": True} | more
        result = result_of(train_resumable(tmp_path / folder, name, count, steps_per_execution=steps, **choices))
        lines = steps_in(tmp_path / folder)
        assert min(line["images_per_second"] for line in lines) > 0
        return result | {"weights": 0, "rates": [line["learning_rate"] for line in lines]}

    single, several = train(1, "single"), train(3, "several")
    assert len(train(3, "resumed", max_steps=15)["rates"]) == 15  # ends within what would be a call
    resumed = train(3, "resumed")
    for folder, other in (("several", several), ("resumed", resumed)):
        assert_alike(other, single, rtol=1e-9, atol=1e-12)
        for received, expected in zip(files_of_run(tmp_path / folder), files_of_run(tmp_path / "single"), strict=True):
            assert_alike(received, expected, rtol=1e-9, atol=1e-12)
    # Between calls: after 3, 6, 9 and 10 steps of each epoch. Which is due while one is being written is left out.
    names = [path.name for path in (tmp_path / "several" / "checkpoints").iterdir()]
    numbers = {int(entry[5:13]) for entry in names if entry.startswith("step-")}
    ends = {10 * epoch + step for epoch in range(4) for step in (3, 6, 9, 10)}
    assert {10, 20, 30, 40} <= numbers <= ends
