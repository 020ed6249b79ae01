"""Models with a `train_step` of their own, in the form of each backend's guide, train on several devices as on one."""

import functools
import itertools

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run

ALIKE = ("custom_step", "steps_of_keras", "as_in_the_guide", "gan", "gradient_penalty", "vae")
# On jax the whole batch is one program: nothing has to be refused there.
REFUSED = {
    "queue": "train_step of Queue does something else with a batch that is split over the devices than with all of it, "
    "first in the value of queue/seen",
    "sum_of_losses": "train_step of Sum does something else with a batch that is split over the devices than with all "
    "of it, first in the gradient of",
    "not_built": "has no weights yet, and not_built has no call() to make them",
}
NOT_ON_JAX = ("as_in_the_guide", "gradient_penalty")  # in the form of torch and tensorflow alone
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
    assert len(expected["steps"]) == 12
    np.testing.assert_allclose(numbers(received), numbers(expected), rtol=1e-9, atol=1e-12)


@each_way(REFUSED)
def test_refused(backend, count, case):
    """What would train something else says so before the first step; one device and jax train it."""
    received, words = outcomes(backend, count)[case], REFUSED[case]
    if count > 1 and backend != "jax" or case == "not_built":
        assert words in received
    else:
        assert not isinstance(received, str), received
