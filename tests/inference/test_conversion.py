"""Models that are written for other programs are loaded there."""

import importlib.util
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kerasdp.errors import RunError, UserError
from kerasdp.inference.conversion import check_elsewhere, check_target
from tests.helpers import BACKENDS, ROOT, run

# With what the caller has put there beside.
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
# What the extra `onnx` installs for each backend.
CONVERTERS = {"torch": "onnxscript", "tensorflow": "tf2onnx", "jax": "jax2onnx"}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of a model with batch norm, in the kit's layer."""
    folder = tmp_path_factory.mktemp("run")
    flags = ("--model=convnet", "--epochs=1", "--max_steps=3", "--device=cpu", f"--workdir={folder}/run")
    done = run("recipes/train.py", *flags, f"--backend={BACKENDS[0]}", backend=BACKENDS[0])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["model.keras", "saved_model", "model.onnx"])
def test_each_format_on_each_backend(backend, name, run_folder, tmp_path):
    """By a copy of the recipe in an empty folder; what cannot be written is one line."""
    shutil.copy(ROOT / "recipes" / "export.py", tmp_path)
    flags = (f"--checkpoint={run_folder}/run", f"--to={name}", f"--backend={backend}")
    done = run("export.py", *flags, cwd=tmp_path, PYTHONPATH=PATH)
    package = CONVERTERS[backend]
    if name.endswith(".onnx") and not all(map(importlib.util.find_spec, (package, "onnxruntime"))):
        assert done.returncode == 2 and "which is not installed: pip install" in done.stderr
        pytest.skip(f"{package} or onnxruntime is not installed: pip install 'kerasdp[onnx]'")
    if (backend, name) == ("torch", "saved_model"):
        assert done.returncode == 2 and "a SavedModel is written by TensorFlow, or by jax beside it" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert f"written with {backend}" in done.stdout and "outputs differ by at most" in done.stdout
    assert (tmp_path / name).exists()
    again = run("export.py", *flags, cwd=tmp_path, PYTHONPATH=PATH)
    assert again.returncode == 2 and "is there already" in again.stderr


def test_what_cannot_be_written(tmp_path, monkeypatch):
    assert check_target("a.keras", "jax") == "keras"
    for path, backend, words in (
        ("a.h5", "jax", r"--to: expected NAME.keras, NAME.onnx, or a folder, for a SavedModel. Received: 'a.h5'"),
        (str(tmp_path), "jax", "is there already: remove it, or choose another name"),
        ("saved", "torch", "use --backend=tensorflow or jax"),
    ):
        with pytest.raises(UserError, match=words):
            check_target(path, backend)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs onnx, which is not installed: pip install 'kerasdp\[onnx\]'"):
        check_target("a.onnx", "torch")


def test_outputs_that_differ_are_an_error(monkeypatch):
    """The program that loads the file gives 1.001 where 1 is expected."""
    received = [np.array([[1.001]], "float32")]
    session = SimpleNamespace(run=lambda names, given: received, get_inputs=lambda: [SimpleNamespace(name="x")])
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(InferenceSession=lambda path: session))
    inputs, outputs = np.zeros((1, 1), "float32"), np.ones((1, 1), "float32")
    with pytest.raises(RunError, match="outputs of onnxruntime differ by 1.0e-03 of the largest"):
        check_elsewhere("a.onnx", "onnx", inputs, outputs, "torch")
    received[0] = outputs + np.float32(1e-6)
    assert len(check_elsewhere("a.onnx", "onnx", inputs, outputs, "torch")) == 1
