"""The promise: losses and gradients that Keras computes otherwise on each backend are one in a run."""

import json

import pytest

from tests.helpers import BACKENDS, results


def assert_same_numbers(backend, ways, *cases, relative=1e-5, absolute=1e-6):
    one = {"precision": ways["precision"]} if "precision" in ways else {}
    expected = results("same_numbers.py", BACKENDS[0], json.dumps(one), *cases)
    received = results("same_numbers.py", backend, json.dumps(ways), *cases)
    assert received and received.keys() <= expected.keys()
    for name, each in received.items():
        (whole,) = expected[name]
        for own in each:
            for kind, values in whole.items():
                assert own[kind] == pytest.approx(values, rel=relative, abs=absolute), (name, kind)


@pytest.mark.skipif("jax" not in BACKENDS or len(BACKENDS) < 2, reason="XLA's programs, beside others'")
def test_the_largest_number_keeps_its_gradient():
    assert_same_numbers("jax", {}, "largest")


@pytest.mark.proof
@pytest.mark.parametrize(
    "ways", [{}, {"num_devices": 2}, {"accumulate": 3}, {"num_devices": 2, "accumulate": 3}], ids=str
)
def test_all_in_each_way(backend, ways):
    """Also attention whose keys are all masked."""
    assert_same_numbers(backend, ways)


@pytest.mark.proof
@pytest.mark.skipif("torch" not in BACKENDS, reason="compiled steps are torch's")
def test_compiled_steps():
    assert_same_numbers("torch", {"compile": "on"})


@pytest.mark.proof
@pytest.mark.parametrize("case", ["attention", "constants"])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_in_float64(backend, case):
    """Keras' fused attention has its softmax on jax, its scale on TensorFlow, in float32; so are constants there."""
    assert_same_numbers(backend, {"precision": "float64"}, case, relative=1e-10, absolute=1e-12)


@pytest.mark.proof  # in short: unit/test_keras_patches.py
@pytest.mark.parametrize(
    ("backend", "count"), [(name, count) for name in BACKENDS for count in (1, 2) if (name, count) != (BACKENDS[0], 1)]
)
def test_images_in_float64(backend, count):
    """What layers that move, cut or resize images give is learned from: 30 losses, and updates by layer."""
    ways = {"precision": "float64", "num_devices": count}
    assert_same_numbers(backend, ways, "moved", relative=1e-11, absolute=1e-12)
