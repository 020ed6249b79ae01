"""What the kit reads of Keras by private names: a new Keras says here what is gone, or has another meaning."""

import keras
import numpy as np
import pytest

from kerasdp.keras_compat.optimizers import slots_by_weight
from kerasdp.keras_compat.random import is_in_layer_call
from kerasdp.keras_compat.settings import kept_by_clear_session


@pytest.fixture(scope="module")
def model():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(3, kernel_regularizer="l2")(inputs))
    model = keras.Model({"x": inputs}, [keras.layers.Dense(2)(hidden)])
    model.compile("adamw", loss="mse", metrics=["mae"])
    model.fit({"x": np.zeros((4, 4), "float32")}, np.zeros((4, 2), "float32"), verbose=0)
    return model


def test_slots_and_their_weights(model):
    """Also those that a user-defined optimizer keeps elsewhere than in a list."""

    class Own(keras.optimizers.Adam):
        def build(self, variables):
            super().build(variables)
            self.own = {variable.path: self.add_variable_from_reference(variable, "own") for variable in variables}

    optimizer = Own()
    optimizer.build(model.trainable_variables)
    found = slots_by_weight(optimizer)
    assert {kind for kind, _ in found.values()} == {"momentums", "velocities", "own"}
    for weight in model.trainable_variables:
        assert found[id(optimizer.own[weight.path])] == ("own", weight)
        assert sum(of is weight for _, of in found.values()) == 3


def test_calls_of_layers_are_seen():
    seen = []
    assert not is_in_layer_call()
    keras.layers.Lambda(lambda x: seen.append(is_in_layer_call()) or x)(np.zeros(2, "float32"))
    assert seen == [True]
    assert not is_in_layer_call()


def test_clear_session_keeps_what_a_run_has_chosen():
    devices = keras.distribution.DataParallel(devices=["cpu:0"])
    try:
        with kept_by_clear_session():
            keras.config.set_dtype_policy("mixed_bfloat16")
            keras.distribution.set_distribution(devices)
            keras.utils.clear_session()
            assert keras.config.dtype_policy().name == "mixed_bfloat16"
            assert keras.distribution.distribution() is devices
        keras.utils.clear_session()
        assert keras.config.dtype_policy().name == "float32"
        assert keras.distribution.distribution() is None
    finally:
        keras.distribution.set_distribution(None)
        keras.config.set_dtype_policy("float32")
