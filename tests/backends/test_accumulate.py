"""The promise: a batch that is worked on in parts teaches what it teaches whole."""

import json
import re

import numpy as np
import pytest

from tests.helpers import PROGRAMS, all_but, result_of, run

PARTS_OF_16 = [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("forward", 2), ("backward", 2)]
PART_OF_4 = [("forward", 0), ("backward", 0)]


@all_but("jax", "tensorflow")
def test_it_learns_as_with_the_whole_batch(backend):
    """Parts of 6, 6 and 4 samples, and 4 at an epoch's end; with two devices, parts of 3 on each."""
    cases = [{"net": "random", "accumulate": 3, "loss": "squares"}, {"net": "random"}]
    cases += [{"net": "random", "accumulate": 3, "loss": loss} for loss in ("dice", "against_mean")]
    if backend == "tensorflow":  # the others' engines are those of test_pipeline_training.py
        cases += [{"net": "norms", "accumulate": 4}, {"net": "by_hand"}]
    else:
        cases.insert(0, {"net": "random", "accumulate": 3, "num_devices": 2})  # first: jax makes its devices once
    done = run(PROGRAMS / "accumulate.py", json.dumps([{"backend": backend} | case for case in cases]),
               backend=backend, OMP_NUM_THREADS="1")  # fmt: skip
    results = result_of(done)
    if backend == "tensorflow":
        *results, norms, by_hand = results
        np.testing.assert_allclose(norms["losses"], by_hand["losses"], rtol=1e-6)
        for own, expected in zip(norms["weights"], by_hand["weights"], strict=True):
            np.testing.assert_allclose(own, expected, atol=1e-6)
    *results, whole, refused, also_refused = results
    for received, case in zip(results, cases, strict=False):
        np.testing.assert_allclose(received["losses"], whole["losses"], rtol=2e-6, err_msg=str(case))
        np.testing.assert_allclose(received["outputs"], whole["outputs"], atol=2e-6, err_msg=str(case))
        for own, expected in zip(received["weights"], whole["weights"], strict=True):
            np.testing.assert_allclose(own, expected, atol=2e-6, err_msg=str(case))
        assert received["evaluate"] == pytest.approx(whole["evaluate"], rel=2e-6)
        for name, values in whole["history"].items():
            assert received["history"][name] == pytest.approx(values, rel=2e-6), (name, case)
        if backend == "torch":  # no more than one part's activations are there at a time
            assert [tuple(work) for work in received["order"]] == (2 * PARTS_OF_16 + PART_OF_4) * 2
        elif backend == "jax":  # forward and backward in one program
            assert received["order"] == [["accumulate", number] for number in 2 * [*2 * [0, 1, 2], 0]]
    for loss, error in (("dice", refused), ("against_mean", also_refused)):
        assert re.fullmatch(
            rf"the loss {loss} of functional_?\d* needs the whole batch at once; leave out accumulate, or, where .*",
            error,
        )
