"""Models with a `train_step` of their own, in the form of each backend's guide, train on several devices as on one."""

import functools
import itertools

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run

ALIKE = ("custom_step", "steps_of_keras", "several_steps_a_call", "as_in_the_guide", "gan", "gradient_penalty", "vae")
# On jax the whole batch is one program: nothing has to be refused there.
REFUSED = {
    "queue": "train_step of Queue does something else with a batch that is split over the devices than with all of it, "
    "first in the value of queue/seen",
    "sum_of_losses": "train_step of Sum does something else with a batch that is split over the devices than with all "
    "of it, first in the gradient of",
    "contrastive": "than with all of it, first in the gradient of",
    "foreign_numbers": "each time for the same batch: random numbers that are not from keras.random would be the same",
    "largest_output": "than with all of it, first in the change of metric largest/value",
    "not_built": "has no weights yet, and not_built has no call() to make them",
}
NOT_ON_JAX = ("as_in_the_guide", "gradient_penalty", "foreign_numbers", "largest_output")  # in another form there
USUAL = (("torch", 1), ("torch", 2), ("jax", 2), ("tensorflow", 2))
OTHERS = (("torch", 4), ("jax", 1), ("jax", 4), ("tensorflow", 1), ("tensorflow", 4))


def each_way(cases):
    """Backends, device counts and cases; with the uncommon numbers of devices a proof."""
    found = [
        pytest.param(backend, count, case, marks=() if (backend, count) in USUAL else pytest.mark.proof)
        for backend, count in (*USUAL, *OTHERS)
        for case in cases
        if backend in BACKENDS and not (backend == "jax" and case in NOT_ON_JAX)
    ]
    return pytest.mark.parametrize(("backend", "count", "case"), found)


@functools.cache
def outcomes(backend, count):
    return result_of(run(PROGRAMS / "own_steps.py", backend, count, backend=backend))


def numbers(result):
    """All numbers of a result, in order."""
    if isinstance(result, dict):
        return list(itertools.chain(*(numbers(result[name]) for name in sorted(result))))
    return list(itertools.chain(*map(numbers, result))) if isinstance(result, list) else [result]


@each_way(ALIKE)
def test_trains_as_on_one_device(backend, count, case):
    """In float64: losses and metrics of each step, the last batch uneven, evaluation, predictions and weights."""
    expected, received = outcomes(BACKENDS[0], 1)[case], outcomes(backend, count)[case]
    if isinstance(received, str):
        pytest.fail(received)
    if backend == "jax" and case == "gan":  # where the model holds the optimizers' variables, too
        expected, received = ({**result, "weights": []} for result in (expected, received))
    assert len(expected["steps"]) == (6 if case == "several_steps_a_call" else 12)
    np.testing.assert_allclose(numbers(received), numbers(expected), rtol=1e-9, atol=1e-12)


@each_way(REFUSED)
def test_refused(backend, count, case):
    """What would train something else says so before the first step; one device and jax train it."""
    received, words = outcomes(backend, count)[case], REFUSED[case]
    if count > 1 and backend != "jax" or case == "not_built":
        assert words in received
    else:
        assert not isinstance(received, str), received


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "jax"])
def test_an_optimizer_that_no_checkpoint_holds(backend, tmp_path):
    """On jax the model itself holds the variables of its optimizers."""
    code = f"import sys; sys.path.insert(0, {str(PROGRAMS)!r})\nimport kerasdp, own_steps\n"
    code += f"settings = dict(backend={backend!r}, num_devices=1, device='cpu', verbose=0, workdir={str(tmp_path)!r})\n"
    code += "try: kerasdp.launch(own_steps.gan, **settings)\nexcept kerasdp.UserError as error: print(error)\n"
    code += "kerasdp.launch(own_steps.gan, checkpoint_every='never', **settings | {'resume': False})\n"
    done = run("-c", code)
    assert "for_judge of gan is an optimizer whose state is in no checkpoint, so that a resumed run" in done.stdout
    assert done.returncode == 0, done.stderr
