"""The pytest fixture, in a project of somebody's own: a process that knows nothing of these tests."""

import re
import sys

import pytest

from tests.helpers import BACKENDS, run

TESTS = """
import os
import numpy as np

x = np.random.RandomState(0).randn(64, 8).astype("float32")
y = x.sum(axis=1, keepdims=True)

def build_model(shift=0.0):
    import keras
    class Shift(keras.layers.Layer):
        def call(self, inputs):
            return inputs + shift * (keras.backend.backend() == "%s")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), Shift(name="shift"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

def build_shifted_model():
    return build_model(1e-3)

def test_portable(training_parity):
    outcome = training_parity(build_model, (x, y), steps=4, batch_size=15)
    assert outcome.differences.max() < 1e-5

def test_shifted(training_parity):
    training_parity(build_shifted_model, (x, y), steps=2, batch_size=16)
"""


@pytest.mark.proof  # the README's code runs it, too
@pytest.mark.skipif(len(BACKENDS) < 2, reason="needs two backends")
def test_the_fixture(tmp_path):
    first, last = BACKENDS[0], BACKENDS[-1]
    (tmp_path / "test_mine.py").write_text(TESTS % last)
    options = (f"--parity-backends={first},{last}", "--parity-devices=1", "-v", "-rs")
    done = run("-m", "pytest", "-p", "no:cacheprovider", "test_mine.py", *options, cwd=tmp_path)
    for backend, word in ((first, "PASSED"), (last, "FAILED")):
        assert f"test_portable[{backend}-1] PASSED" in done.stdout, done.stdout[-3000:]
        assert f"test_shifted[{backend}-1] {word}" in done.stdout, done.stdout[-3000:]
    assert re.search(rf"{last} x 1 diverges from {first} x 1: step 0: loss.*the output of shift differs", done.stdout)


@pytest.mark.proof
def test_a_missing_backend_is_skipped_by_name(tmp_path):
    """A framework hidden from this process stands for one that is not installed."""
    (tmp_path / "test_mine.py").write_text(TESTS % "none")
    hide = (
        "import importlib.util, sys, pytest\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {BACKENDS[-1]!r} else find(name, *rest)\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    names = f"{BACKENDS[0]},{BACKENDS[-1]}" if len(BACKENDS) > 1 else BACKENDS[0]
    options = (f"--parity-backends={names}", "--parity-devices=1", "-rs", "-k", "portable")
    done = run("-c", hide, "-p", "no:cacheprovider", "test_mine.py", *options, cwd=tmp_path)
    assert f"{BACKENDS[-1]} is not installed" in done.stdout, done.stdout + done.stderr
    assert sys.executable and "1 skipped" in done.stdout


@pytest.mark.short("--parity-devices=two")
@pytest.mark.parametrize("option", ["--parity-backends=theano", "--parity-devices=two"])
def test_wrong_options(option, tmp_path):
    (tmp_path / "test_mine.py").write_text(TESTS % "none")
    done = run("-m", "pytest", "test_mine.py", option, cwd=tmp_path)
    assert f"argument {option.partition('=')[0]}: " in done.stdout + done.stderr
