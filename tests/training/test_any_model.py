"""Subclasses of `keras.Model` of many kinds train alike on every backend and device count, or are refused in a line."""

import numpy as np

from tests.helpers import BACKENDS, each_way, results

# With torch cases are quick; with the others, whose compilers need seconds, most are proofs.
USUAL = {"torch": 2, "jax": 1, "tensorflow": 2}

QUICKLY_ALIKE = (
    "never_called", "called_in_training", "mask_and_unused_weights", "frozen_between_fits", "own_fit",
    "methods_of_the_model", "task", "assigned_in_call",
)  # fmt: skip
ALIKE = (
    *QUICKLY_ALIKE,
    "equal_paths", "lora", "loss_that_draws", "data_that_draws",
    "session_cleared", "only_predicts", "all_frozen", "weight_of_the_loss",
    "used_from_the_second_epoch_on", "layers_of_their_own_kind", "fit_by_fit", "data_of_its_own_kind",
    "loss_whose_generator_the_model_does_not_hold", "own_batch_norm",
)  # fmt: skip
REFUSED = {
    "lora_without_compile": "lora_kernel_a of sequential",
    "unfrozen_without_compile": "was frozen or did not exist when the optimizer was built; call model.compile again",
    "stateful": " has stateful=True. Keras loses the state ",
    "train_on_batch": "model.train_on_batch would use only one device; use runner.fit or runner.evaluate",
    "own_loop": "Model overrides fit without a call of super().fit; add this call",
    "method_of_task": "expected runner.fit(model, ...). Received: model.fit of a Task",
    "raw_texts": "Task preprocesses its data in fit; preprocess before fit",
    "several_optimizers": "expected one optimizer. Received: MultiOptimizer",
    "made_before_launch": "was made before kerasdp.launch: make (or load) the model, the optimizer and the metrics in",
    "optimizer_made_before_launch": "/iteration of sequential",
}
QUICK = {
    "torch": (*QUICKLY_ALIKE, *REFUSED),
    "jax": ("optimizer_made_before_launch", "assigned_in_call"),
    "tensorflow": (),
}


def is_there(backend, count, case):
    """What was made before is not sent to other processes (`test_sending.py`)."""
    return count == 1 or "before" not in case


def is_quick(backend, count, case):
    return count == USUAL[backend] and case in QUICK[backend]


def outcome(backend, count, case):
    quick = QUICK[backend]
    return results("any_model.py", backend, count, *(quick if case in quick else ()))[case]


@each_way(ALIKE, is_quick, (1, 2), is_there)
def test_trains_alike(backend, count, case):
    received, expected = outcome(backend, count, case), outcome(BACKENDS[0], USUAL[BACKENDS[0]], case)
    assert not isinstance(received, str), received
    np.testing.assert_allclose(received, expected, rtol=0, atol=1e-5)


@each_way(REFUSED, is_quick, (1, 2), is_there)
def test_refused(backend, count, case):
    received = outcome(backend, count, case)
    assert isinstance(received, str) and "\n" not in received
    assert REFUSED[case] in received
