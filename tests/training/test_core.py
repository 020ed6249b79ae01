"""The core works without what is around it: the folders scale/ and parity/ deleted."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers import ROOT

PROGRAM = """
import sys
import keras
import numpy as np
import kerasdp

def train(runner):
    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
    x = np.random.RandomState(0).uniform(size=(40, 4)).astype("float32")
    losses = model.fit(x, x.sum(1, keepdims=True), epochs=5, verbose=0).history["loss"]
    return losses, model.evaluate(x, x.sum(1, keepdims=True), verbose=0), model.predict(x, verbose=0).shape

if __name__ == "__main__":
    settings = {"num_devices": 2, "device": "cpu", "batch_size": 10, "workdir": "run", "verbose": 0}
    losses, loss, shape = kerasdp.launch(train, **settings)
    assert loss < losses[-1] < losses[0] / 2 and shape == (40, 1), (losses, loss, shape)
    assert not [name for name in sys.modules if name.startswith(("kerasdp.scale", "kerasdp.parity"))]
    print(kerasdp.__file__)
"""


@pytest.mark.proof
def test_it_trains_without_scale_and_parity(backend, tmp_path):
    shutil.copytree(ROOT / "kerasdp", tmp_path / "kerasdp", ignore=shutil.ignore_patterns("scale", "parity"))
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "KERAS_BACKEND": backend}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "kerasdp" / "__init__.py")
