"""Subclasses of `keras.Model` of many kinds train alike on every backend and device count, or are refused in a line."""

import functools

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run

# A pair of a backend and a device count; the others are proofs.
USUAL = [pair for pair in (("torch", 2), ("jax", 1), ("tensorflow", 2)) if pair[0] in BACKENDS]
OTHERS = [(backend, 3 - count) for backend, count in USUAL]
WAYS = [*USUAL, *(pytest.param(*pair, marks=pytest.mark.proof) for pair in OTHERS)]

ALIKE = (
    "never_called", "compiled_loss_not_used", "called_in_training",
    "equal_paths", "all_frozen", "nothing_to_train", "lora",
    "frozen_between_fits", "frozen_by_callback", "quantized", "no_scope", "twice", "methods_of_the_model", "own_fit",
    "task",
)  # fmt: skip
REFUSED = {
    "lora_without_compile": "lora_kernel_a of sequential_",
    "unfrozen_without_compile": "was frozen or not there yet when the optimizer was built: call model.compile again",
    "train_on_batch": "expected runner.fit or runner.evaluate. Received: model.train_on_batch",
    "own_loop": "Model has a fit of its own, which does not call super().fit",
    "method_of_task": "expected runner.fit(model, ...). Received: model.fit of a Task",
    "made_before_launch": "was made before kerasdp.launch: make (or load) the model, the optimizer and the metrics in",
    "optimizer_made_before_launch": "sgd/iteration of sequential_",
}


@functools.cache
def outcomes(backend, count):
    return result_of(run(PROGRAMS / "any_model.py", backend, count, backend=backend))


@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.parametrize(("backend", "count"), WAYS)
def test_trains_alike(backend, count, case):
    received, expected = outcomes(backend, count)[case], outcomes(*USUAL[0])[case]
    assert not isinstance(received, str), received
    np.testing.assert_allclose(received, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("case", "words"), REFUSED.items())
@pytest.mark.parametrize(("backend", "count"), WAYS)
def test_refused(backend, count, case, words):
    if "before" in case and backend != "torch" and count == 2:
        pytest.skip("launch refuses a framework that was started before, with too few devices")
    received = outcomes(backend, count)[case]
    assert isinstance(received, str) and "\n" not in received
    assert words in received
