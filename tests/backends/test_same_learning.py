"""The promise: one device or many, on any backend, a model learns the same."""

import functools

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, assert_same, result_of, run

DEVICE_COUNTS = (1, 2, 4)
# Each backend on two devices beside the first on one; the others are a part of the slow proofs.
IN_SHORT = [(BACKENDS[0], 1), *((backend, 2) for backend in BACKENDS)]
COMBINATIONS = [
    pytest.param(
        (backend, count), marks=[] if (backend, count) in IN_SHORT else pytest.mark.proof, id=f"{backend}-{count}"
    )
    for backend in BACKENDS
    for count in DEVICE_COUNTS
]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """What each combination gave; each runs once, when it is first asked for."""

    @functools.cache
    def get(backend, count):
        folder = tmp_path_factory.mktemp(f"{backend}-{count}")
        return result_of(run(PROGRAMS / "learn.py", backend, count, folder, backend=backend))

    return get


@pytest.fixture(params=COMBINATIONS)
def pair(request, learned):
    """Each combination beside the first one on one device."""
    return learned(BACKENDS[0], 1), learned(*request.param)


def test_initial_weights_are_bit_equal(pair):
    expected, received = pair
    assert received["lenet"]["initial"] == expected["lenet"]["initial"]


def test_loss_of_each_step(pair):
    expected, received = (part["lenet"]["losses"] for part in pair)
    assert len(expected) == 40
    assert_same(expected, received, 1e-5)


@pytest.mark.parametrize("part", ["history", "evaluate", "predictions", "alone"])
def test_lenet(pair, part):
    expected, received = (result["lenet"][part] for result in pair)
    assert_same(expected, received, 1e-5)


def test_final_weights_of_lenet(pair):
    """Each one, after 46 updates."""
    expected, received = (result["lenet"]["final"] for result in pair)
    assert len(expected) == 8
    for one, other in zip(expected, received, strict=True):
        assert_same(one, other, 1e-5)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_predictions_are_those_of_the_plain_model(learned, combination):
    part = learned(*combination)["lenet"]
    assert len(part["predictions"]) == 360
    assert_same(part["alone"], part["predictions"], 1e-5)


@pytest.mark.parametrize("part", ["binary", "two_heads", "unused_weights", "contrastive", "masked_tokens"])
def test_other_losses_and_metrics(pair, part):
    expected, received = (result[part] for result in pair)
    assert_same(expected, received, 1e-5)


def test_synchronized_batch_norm(pair):
    expected, received = (result["batch_norm"]["sync"] for result in pair)
    # 12 steps with momentum: each division by a small variance lets round-off grow.
    assert_same(expected, received, 2e-5)


def test_batch_norm_of_many_numbers(learned):
    """TensorFlow's own sums would be wrong by 3e-4."""
    for backend in BACKENDS:
        assert learned(backend, 2)["batch_norm"]["round_off"] < 1e-5


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.proof), 2, pytest.param(4, marks=pytest.mark.proof)]
)
def test_replica_batch_norm_is_the_same_on_all_backends(learned, count):
    expected, *others = (learned(backend, count)["batch_norm"]["replica"] for backend in BACKENDS)
    for received in others:
        assert_same(expected, received, 2e-5)


def test_replica_batch_norm_differs_from_synchronized(learned):
    parts = learned(BACKENDS[0], 2)["batch_norm"]
    assert np.abs(np.subtract(parts["sync"]["losses"], parts["replica"]["losses"])).max() > 1e-3


def test_dropout_masks_are_bit_equal(pair):
    expected, received = (result["random_layers"]["masks"] for result in pair)
    assert received == expected
    for (_, dropped), rate in zip(expected.values(), (1 - 0.7 * 0.7, 0.5, 1 - 0.7 * 0.6), strict=True):
        assert abs(dropped - rate) < 0.2  # of only 72 independent numbers, or fewer


def test_learning_through_random_layers(pair):
    expected, received = (result["random_layers"]["losses"] for result in pair)
    assert_same(expected, received, 1e-5)


def test_callbacks_decide_the_same_and_write_once(pair):
    expected, received = (result["callbacks"] for result in pair)
    assert received["files"] == expected["files"] == ["best.keras", "log.csv"]
    assert received["rows"] == expected["rows"]
    assert_same(expected["history"], received["history"], 1e-5)
    assert received["rate"] == expected["rate"]
