"""`portable` on models of every kind, and what a saved model says of it."""

import copy

import keras
import numpy as np
import pytest
from keras import layers

import kerasdp
from kerasdp import UserError, portable
from kerasdp.same.layer_calls import hook_layers


def convnet():
    inner = keras.Sequential([keras.Input((6, 6, 4)), layers.BatchNormalization(), layers.SpatialDropout2D(0.3)])
    inputs = keras.Input((6, 6, 3))
    x = inner(layers.Conv2D(4, 3, padding="same")(inputs))
    x = layers.GaussianNoise(0.1)(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(2)(layers.Dropout(0.5)(x)))


def test_layers_are_changed_in_place():
    model = convnet()
    x = np.random.RandomState(0).rand(5, 6, 6, 3).astype("float32")
    before = model.predict(x, verbose=0)
    assert portable(model, batch_norm="replica") is model
    kinds = [type(layer) for layer in model._flatten_layers()]
    assert kerasdp.layers.BatchNormalization in kinds and layers.BatchNormalization not in kinds
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)
    assert portable(portable(model)) is model  # once more changes nothing
    (norm,) = [layer for layer in model._flatten_layers() if isinstance(layer, layers.BatchNormalization)]
    assert norm.statistics == "sync"


def test_draws_do_not_depend_on_the_backend():
    model = keras.Sequential([keras.Input((40,)), layers.GaussianNoise(1.0, seed=3)])
    expected = kerasdp.same.random.normal((2, 40), seed=3)
    received = portable(model)(np.zeros((2, 40), "float32"), training=True)
    np.testing.assert_array_equal(*(keras.ops.convert_to_numpy(value) for value in (received, expected)))
    again = copy.deepcopy(model)(np.zeros((2, 40), "float32"), training=True)  # a copy draws by itself
    assert np.abs(keras.ops.convert_to_numpy(again) - keras.ops.convert_to_numpy(received)).max() > 0.1


class Plain(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.drop = layers.Dense(3), layers.Dropout(0.5, seed=3)

    def call(self, x, training=False):
        return self.drop(self.dense(x), training=training)


def test_subclassed_models():
    model = Plain()
    with pytest.raises(UserError, match="has no weights yet"):
        portable(model)
    model(np.zeros((1, 4), "float32"))
    portable(model)
    x = keras.ops.ones((2, 3))
    received, expected = model.drop(x, training=True), kerasdp.same.random.dropout(x, 0.5, seed=3)
    np.testing.assert_array_equal(*(keras.ops.convert_to_numpy(value) for value in (received, expected)))


def test_statistics_of_another_name_are_refused():
    with pytest.raises(UserError, match="expected one of sync, replica"):
        portable(convnet(), batch_norm="half")


def test_what_stays_different_is_named():
    model = keras.Sequential([keras.Input((6, 6, 3)), layers.RandomElasticTransform(name="wobble")])
    with pytest.warns(UserWarning, match="layer wobble: RandomElasticTransform differs"):
        portable(model)


def test_classes_of_the_kit_are_saved_as_those_of_keras(tmp_path):
    model = keras.Sequential([keras.Input((4,)), kerasdp.layers.BatchNormalization()])
    model.save(tmp_path / "own.keras")
    loaded = keras.models.load_model(tmp_path / "own.keras")
    assert [type(layer) for layer in loaded.layers] == [layers.BatchNormalization]


def test_a_layer_of_another_framework_is_named():
    """Whatever that framework says of it; what fails otherwise says so itself."""
    hook_layers()
    jax = pytest.importorskip("jax")

    class Squared(keras.layers.Layer):
        def call(self, x):
            return jax.numpy.square(x)

    class Broken(keras.layers.Layer):
        def call(self, x):
            return keras.ops.matmul(x, keras.ops.ones((7, 7)))

    with pytest.raises(
        UserError,
        match=rf"layer it failed \(.*\). The layer uses JAX, .* is {keras.backend.backend()}; use keras.ops",
    ):
        keras.Sequential([keras.Input((3,)), Squared(name="it")])
    with pytest.raises((RuntimeError, ValueError, TypeError), match="shape") as failed:
        keras.Sequential([keras.Input((3,)), Broken()])
    assert not isinstance(failed.value, UserError)
