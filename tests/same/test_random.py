"""The counter-based generator: published test vectors, statistics, and the place of a sample."""

import importlib
import importlib.util
import sys

import keras
import numpy as np
import pytest
from keras import ops

import kerasdp
from kerasdp.keras_compat import settings
from kerasdp.launch import _QuietTensorFlow
from kerasdp.same import initial_weights, replica_context
from kerasdp.same import random as random_numbers
from kerasdp.same.random import threefry
from kerasdp.step import check


def words(*values):
    return tuple(ops.convert_to_tensor(np.array([value], "uint32").view("int32")) for value in values)


def numbers(tensor):
    return ops.convert_to_numpy(tensor)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # of the authors' library Random123, file kat_vectors, "threefry2x32 20"
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_published_vectors(counter, key, expected):
    received = threefry(words(*key), words(*counter))
    assert tuple(int(numbers(word).view("uint32")[0]) for word in received) == expected


@pytest.mark.proof
def test_bits_are_fair_and_independent():
    drawn = numbers(random_numbers.bits((4096, 64), 7)).view("uint32")
    ones = np.unpackbits(drawn.view("uint8").reshape(4096, -1), axis=1, bitorder="little").reshape(-1, 32)
    count = len(ones)
    assert np.abs(ones.mean(0) - 0.5).max() < 5 * 0.5 / count**0.5  # five standard deviations
    correlation = np.corrcoef(ones, rowvar=False) - np.eye(32)
    assert np.abs(correlation).max() < 5 / count**0.5
    uniform = numbers(random_numbers.uniform((4096, 64), seed=7))
    for one, other in ((uniform[:, 1:], uniform[:, :-1]), (uniform[1:], uniform[:-1])):  # neighbours of both kinds
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / one.size**0.5


def test_distributions():
    count = 200_000
    shape = (1000, 200)
    uniform = numbers(random_numbers.uniform(shape, seed=1)).ravel()
    buckets = np.bincount((uniform * 100).astype(int), minlength=100)
    assert ((buckets - count / 100) ** 2 / (count / 100)).sum() < 99 + 5 * (2 * 99) ** 0.5  # chi squared
    normal = numbers(random_numbers.normal(shape, 2.0, 3.0, seed=2)).ravel()
    assert abs(normal.mean() - 2) < 5 * 3 / count**0.5
    assert abs(normal.std() - 3) < 5 * 3 / (2 * count) ** 0.5
    assert abs((np.abs(normal - 2) < 3).mean() - 0.6827) < 0.005
    truncated = numbers(random_numbers.truncated_normal(shape, seed=3)).ravel()
    assert np.abs(truncated).max() <= 2
    assert abs(truncated.std() - 0.8796) < 0.005
    integers = numbers(random_numbers.randint(shape, 3, 9, seed=4)).ravel()
    assert np.abs(np.bincount(integers, minlength=9)[3:] / count - 1 / 6).max() < 0.005
    dropped = numbers(random_numbers.dropout(ops.ones(shape), 0.3, seed=5)).ravel()
    assert abs((dropped == 0).mean() - 0.3) < 5 * (0.3 * 0.7 / count) ** 0.5
    np.testing.assert_allclose(dropped[dropped != 0], 1 / 0.7, rtol=1e-6)


def test_a_generator_advances_and_seeds_differ():
    generator = keras.random.SeedGenerator(5)
    first, second = (numbers(random_numbers.bits((8, 8), generator)) for _ in range(2))
    again = numbers(random_numbers.bits((8, 8), keras.random.SeedGenerator(5)))
    np.testing.assert_array_equal(first, again)
    assert not (first == second).any()
    assert not (numbers(random_numbers.bits((8, 8), 6)) == first).any()


def test_each_replica_draws_its_own_rows():
    whole = numbers(random_numbers.bits((6, 3, 5), 1))
    with replica_context.use(replica_context.ReplicaContext(num_replicas=2, num_rows=3, rows=3, first_row=3)):
        np.testing.assert_array_equal(numbers(random_numbers.bits((3, 3, 5), 1)), whole[3:])
        # Not a batch: the same on all replicas.
        np.testing.assert_array_equal(numbers(random_numbers.bits((2, 3, 5), 1)), whole[:2])


@pytest.mark.proof  # TensorFlow takes seconds to import
def test_augmentations_in_tf_data_draw_as_in_keras():
    """In a graph of TensorFlow's, on each backend: by the seed that the layer has, or was given by the run."""
    tf = pytest.importorskip("tensorflow")
    images = np.random.RandomState(0).rand(8, 4, 4, 1).astype("float32")

    def mapped(layer):
        return next(iter(tf.data.Dataset.from_tensors(images).map(lambda x: layer(x, training=True)))).numpy()

    expected = mapped(keras.layers.RandomFlip(seed=1))
    with initial_weights.portable(0):
        received, crop = mapped(keras.layers.RandomFlip(seed=1)), keras.layers.RandomCrop(2, 2)
        mapped(crop)
    np.testing.assert_array_equal(received, expected)
    for generator in getattr(crop, "_backend_generators", {}).values():
        assert generator.state.numpy()[0] == numbers(crop.generator.state)[0]


def test_odd_shapes():
    assert random_numbers.bits((), 1).shape == ()
    assert tuple(random_numbers.normal((3,), seed=1).shape) == (3,)
    assert tuple(random_numbers.uniform((0, 4), seed=1).shape) == (0, 4)
    ones = ops.ones((4, 6))
    np.testing.assert_array_equal(numbers(random_numbers.dropout(ones, 0.0, seed=1)), numbers(ones))
    np.testing.assert_array_equal(numbers(random_numbers.dropout(ones, 1.0, seed=1)), 0)


def test_what_is_not_portable_is_named():
    original = keras.random.uniform((2,), seed=1)
    warned = pytest.warns(UserWarning, match=r"layer mixer draws from .*\.shuffle")
    with random_numbers.portable_draws("layer mixer"), warned:
        keras.random.shuffle(ops.arange(4), seed=1)
    with random_numbers.portable_draws("layer mixer"):
        np.testing.assert_array_equal(
            numbers(keras.random.uniform((2,), seed=1)), numbers(random_numbers.uniform((2,), seed=1))
        )
    np.testing.assert_array_equal(numbers(keras.random.uniform((2,), seed=1)), numbers(original))  # and back


def test_shapes_are_found_where_a_layer_looks_at_its_numbers():
    """Keras on torch looks for shapes on the device "meta", which has no numbers, and then again on the CPU."""

    class Mixer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(3)

        def call(self, x):
            order = keras.random.shuffle(ops.arange(4), seed=self.seed)
            noise = keras.random.uniform((4,), seed=self.seed)
            return x + noise if keras.config.backend() != "torch" or int(order[0]) < 4 else x

    with random_numbers.portable_draws("layer mixer"), pytest.warns(UserWarning, match="shuffle"):
        assert keras.Sequential([keras.Input((4,)), Mixer()]).output_shape == (None, 4)


def test_tensorflow_is_seeded_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "tensorflow").mkdir()
    fake = "from unittest.mock import Mock\nconfig, random = Mock(), Mock()\n"
    (tmp_path / "tensorflow" / "__init__.py").write_text(fake)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [_QuietTensorFlow(7), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    assert importlib.util.find_spec("tensorflow") is not None  # which others ask, and do not import it
    monkeypatch.setitem(sys.modules, "tensorflow", found := importlib.import_module("tensorflow"))
    found.config.set_visible_devices.assert_called_once_with([], "GPU")
    settings.set_seed(8)
    assert [call.args for call in found.random.set_seed.call_args_list] == [(7,), (8,)]


def test_layers_of_keras_and_of_the_kit_are_not_asked_for_draws():
    model = kerasdp.portable(keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)]))
    check._warn_of_other_draws(model, strategy=None, reader=None)  # reads no data, calls no layer
