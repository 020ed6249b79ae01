"""An exported model is Keras' own: it loads, and trains on, where there is no kerasdp."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from keras.optimizers.schedules import CosineDecay, PolynomialDecay

import kerasdp
from kerasdp.training.optimizers import SmoothedCrossentropy, WarmUp

PLAIN_KERAS = """
import sys
sys.modules["kerasdp"] = None  # an import of it fails
import keras, numpy
model = keras.saving.load_model(sys.argv[1])
model.fit(numpy.ones((4, 3)), numpy.arange(4), verbose=0)
print(type(model.optimizer).__name__, float(model.optimizer.iterations), model.loss.name)
"""


def exported(tmp_path, **arguments):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile(**arguments)
    model.fit(np.ones((4, 3)), np.arange(4), verbose=0)
    path = str(tmp_path / "model.keras")
    kerasdp.export(model, path)
    return model, path


RATES = [0.1, CosineDecay(0.1, 5, alpha=0.2), PolynomialDecay(0.1, 5)]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_warm_up_of_keras_has_the_same_rates(rate, steps):
    schedule = WarmUp(rate, steps)
    found = [float(schedule.as_keras()(step)) for step in range(12)]
    expected = [float((rate if rate is RATES[2] else schedule)(step)) for step in range(12)]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.proof
@pytest.mark.parametrize(("rate", "scaled"), [(RATES[0], False), (RATES[1], True)])
def test_warm_up_and_smoothed_labels_become_what_keras_has(tmp_path, rate, scaled):
    optimizer = keras.optimizers.Adam(WarmUp(rate, 3))
    if scaled:  # as Keras does for float16
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model, path = exported(tmp_path, optimizer=optimizer, loss=SmoothedCrossentropy(0.1))
    found = subprocess.run([sys.executable, "-c", PLAIN_KERAS, path], capture_output=True, text=True)
    name = "LossScaleOptimizer" if scaled else "Adam"
    assert found.stdout.split() == [name, "2.0", "sparse_categorical_crossentropy"], found.stderr
    assert isinstance(model.loss, SmoothedCrossentropy)  # the model itself is as it was
    assert model.get_compile_config()["loss"]["class_name"] == "SmoothedCrossentropy"


def test_losses_of_several_outputs(tmp_path):
    x = keras.Input((3,))
    model = keras.Model(x, {"a": keras.layers.Dense(2, name="a")(x), "b": keras.layers.Dense(2, name="b")(x)})
    model.compile("sgd", {"a": SmoothedCrossentropy(0.1), "b": "mse"})
    path = str(tmp_path / "model.keras")
    kerasdp.export(model, path)
    loaded = keras.saving.load_model(path)
    assert (loaded.loss["a"].name, loaded.loss["b"]) == ("sparse_categorical_crossentropy", "mse")
