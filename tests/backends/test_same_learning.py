"""The promise: one device or many, on any backend, a model learns the same."""

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, assert_same, each_way, result_of, results, run

PARTS = ("lenet", "binary", "masked_tokens", "batch_norm", "round_off", "random_layers", "callbacks",
         "two_heads", "float8")  # fmt: skip
# Each backend on two devices beside the first on one; jax and tensorflow, whose compilers need seconds for each model,
# with a few parts. All else is a part of the slow proofs.
OF_OTHERS = {"torch": PARTS[:-2], "jax": ("lenet", "batch_norm", "round_off"), "tensorflow": ("lenet", "round_off")}
IN_SHORT = {(BACKENDS[0], 1): PARTS[:-2]} | {(backend, 2): OF_OTHERS[backend] for backend in BACKENDS}


def in_each_way(*parts):
    return each_way(parts, lambda backend, count, part: part in IN_SHORT.get((backend, count), ()))


def learned(backend, count, part):
    """What a part gave in a way. The parts that are tested in short run in one process, the others in another."""
    usual = IN_SHORT.get((backend, count), PARTS)
    parts = usual if part in usual else [other for other in PARTS if other not in usual]
    return results("learn.py", backend, count, *parts)[part]


@pytest.fixture
def pair(backend, count, case):
    """A part in each way beside the first backend on one device."""
    return learned(BACKENDS[0], 1, case), learned(backend, count, case)


@in_each_way("lenet")
def test_initial_weights_are_bit_equal(pair):
    expected, received = (result["initial"] for result in pair)
    assert received == expected


@pytest.mark.parametrize("result", ["losses", "history", "evaluate", "predictions", "alone", "final"])
@in_each_way("lenet")
def test_lenet(pair, result):
    """The losses of 40 steps, each weight after 46 updates, and what the model says then, within a run and without."""
    expected, received = (found[result] for found in pair)
    assert len(expected) == {"losses": 40, "final": 8}.get(result, len(expected))
    assert_same(expected, received, 1e-5)


@in_each_way("lenet")
def test_predictions_are_those_of_the_plain_model(pair):
    _, result = pair
    assert len(result["predictions"]) == 360
    assert_same(result["alone"], result["predictions"], 1e-5)


@in_each_way("binary", "two_heads", "masked_tokens")
def test_other_losses_and_metrics(pair):
    assert_same(*pair, 1e-5)


@in_each_way("batch_norm")
def test_synchronized_batch_norm(pair):
    expected, received = (result["sync"] for result in pair)
    # 12 steps with momentum: each division by a small variance lets round-off grow.
    assert_same(expected, received, 2e-5)


def test_batch_norm_of_many_numbers():
    """TensorFlow's own sums would be wrong by 3e-4."""
    for backend in BACKENDS:
        assert learned(backend, 2, "round_off") < 1e-5


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (2, [name for name in BACKENDS if name != "tensorflow"]),
        *(pytest.param(count, BACKENDS, marks=pytest.mark.proof) for count in (1, 2, 4)),
    ],
)
def test_replica_batch_norm_is_the_same_on_all_backends(count, names):
    expected, *others = (learned(backend, count, "batch_norm")["replica"] for backend in names)
    for received in others:
        assert_same(expected, received, 2e-5)


def test_replica_batch_norm_differs_from_synchronized():
    parts = learned(BACKENDS[0], 2, "batch_norm")
    assert np.abs(np.subtract(parts["sync"]["losses"], parts["replica"]["losses"])).max() > 1e-3


@in_each_way("float8")
def test_float8(pair):
    """The gradients of scales, and of the largest numbers seen, are their next values: of the global batch."""
    for expected, received in zip(*pair, strict=True):
        assert len(expected["largest"]) == 12 and max(expected["largest"]) > 6
        assert_same(expected["losses"], received["losses"], 1e-6)
        assert_same(expected["largest"], received["largest"], 1e-6)


@in_each_way("random_layers")
def test_dropout_masks_are_bit_equal(pair):
    expected, received = pair
    assert received == expected
    for (_, dropped), rate in zip(expected.values(), (1 - 0.7 * 0.7, 0.5, 1 - 0.7 * 0.6), strict=True):
        assert abs(dropped - rate) < 0.2  # of only 72 independent numbers, or fewer


@in_each_way("callbacks")
def test_callbacks_decide_the_same_and_write_once(pair):
    expected, received = pair
    assert received["files"] == expected["files"] == ["best.weights.h5", "log.csv"]
    assert received["rows"] == expected["rows"]
    assert_same(expected["history"], received["history"], 1e-5)
    assert received["rate"] == expected["rate"]


# What a run warns of on each backend, since it draws or mixes rows otherwise there; jax refuses the last one.
OTHERWISE_ELSEWHERE = {"AugMix", "CutMix", "MixUp", "RandAugment", "RandomElasticTransform"}
# By way: what is refused there, in a line. RandomCrop is no first layer of a model that Keras builds by its shapes.
REFUSED = {
    "torch": {2: {"AugMix", "RandomElasticTransform"}},
    "tensorflow": {2: {"AugMix"}},
    "jax": dict.fromkeys((1, 2), {"RandomElasticTransform", "SpectralNormalization"}),
}


@pytest.mark.proof
@pytest.mark.timeout(5400)
def test_each_layer():
    """Around each layer of Keras that has weights or draws a model learns the same, or is refused."""
    ways = [(name, count) for name in BACKENDS for count in (1, 2)]
    found = {way: result_of(run(PROGRAMS / "each_layer.py", *way, cwd=PROGRAMS, timeout=1800)) for way in ways}
    for (backend, count), learned in found.items():
        errors = {name: words for name, words in learned.items() if isinstance(words, str) and name != "RandomCrop"}
        assert errors.keys() == REFUSED[backend].get(count, set()), (backend, count, errors)
        assert all(words.startswith("UserError") for words in errors.values()), errors
        for name in learned.keys() - errors.keys() - {"RandomCrop"}:
            known = found[backend, 1] if name in OTHERWISE_ELSEWHERE else found[ways[0]]
            np.testing.assert_allclose(learned[name], known[name], rtol=1e-11, err_msg=f"{backend} {count} {name}")
