"""An exported model is Keras' own: it loads, and trains on, where there is no kerasdp."""

import subprocess
import sys

import keras
import numpy as np
import pytest

import kerasdp

PLAIN_KERAS = """
import sys
sys.modules["kerasdp"] = None  # an import of it fails
import keras, numpy
model = keras.saving.load_model(sys.argv[1])
model.fit(numpy.ones((4, 3)), numpy.arange(4), verbose=0)
print(type(model.optimizer).__name__, float(model.optimizer.iterations), model.loss.name)
"""


@pytest.mark.proof
@pytest.mark.parametrize("scaled", [False, True])
def test_it_trains_on_in_plain_keras(tmp_path, scaled):
    """With dropout, which is a layer of the kit while the model trains here."""
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 5, alpha=0.2))
    if scaled:  # as Keras does for float16
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model = kerasdp.portable(keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(4)]))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(np.ones((4, 3)), np.arange(4), verbose=0)
    compiled = model.get_compile_config()["jit_compile"]
    path = str(tmp_path / "model.keras")
    kerasdp.export(model, path)
    assert model.get_compile_config()["jit_compile"] == compiled  # the model itself is as it was
    found = subprocess.run([sys.executable, "-c", PLAIN_KERAS, path], capture_output=True, text=True)
    name = "LossScaleOptimizer" if scaled else "Adam"
    assert found.stdout.split() == [name, "2.0", "sparse_categorical_crossentropy"], found.stderr
