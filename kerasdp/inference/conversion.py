"""Writes a trained model as a plain Keras file, or for other programs, and checks the file by loading it there."""

import contextlib
import functools
import importlib
import importlib.util
import io
import os
import shutil
import tempfile
import warnings
from typing import Any

import keras
import numpy as np

from kerasdp.config.validation import BACKENDS
from kerasdp.errors import RunError, UserError
from kerasdp.keras_compat.layers import saved_merged
from kerasdp.keras_compat.numerics import same_on_all_backends
from kerasdp.keras_compat.saving import plain_compile_arguments, save_optimizers_by_public_names
from kerasdp.keras_compat.settings import without_tensorflow
from kerasdp.launch import launch
from kerasdp.runtime.devices import is_installed

# What Keras (3.15) converts with, on each backend.
_PACKAGES = {"torch": ("onnx", "onnxscript"), "tensorflow": ("tf2onnx",), "jax": ("jax2onnx",)}
TOLERANCE = 1e-5


def export(model: keras.Model, path: str) -> None:
    """Saves a model as Keras does, so that it loads on every backend, without kerasdp.

    Each of several processes may call it: they write the same, and replace one another's whole files.

    Args:
        model: a Keras model; the layers of `kerasdp.layers` are saved as Keras' own, crossentropy with smoothed labels
            as Keras' without, a warm-up as that of `CosineDecay`, which a step-wise or linear schedule goes without;
            adapters (LoRA) are added to the kernels beside them, and the optimizer is left out then.
        path: ends in `.keras` (architecture, weights, optimizer and its state) or in `.weights.h5` (weights alone).

    Raises:
        UserError: if the path ends in something else, or cannot be written to.
    """
    if not path.endswith((".keras", ".weights.h5")):
        raise UserError(f"export: expected a path that ends in .keras or .weights.h5. Received: {path!r}")
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{os.getpid()}.{name}")
    try:
        os.makedirs(folder, exist_ok=True)
        save_optimizers_by_public_names()
        with without_tensorflow(), plain_compile_arguments(model), saved_merged(model):
            (model.save if path.endswith(".keras") else model.save_weights)(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"export: cannot write {path!r} ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


_ROWS, _FREE_LENGTH = 3, 16  # of the samples that are compared, and their axes of any length


def check_target(path: str, backend: str) -> str:
    """Returns the format of a file to be written by a backend: `"keras"`, `"onnx"` or `"tf_saved_model"`.

    Raises:
        UserError: if that cannot be written, or checked, here.
    """
    name, ending = os.path.splitext(path.rstrip("/"))
    if ending not in (".keras", ".onnx", "") or not name:
        raise UserError(f"--to: expected NAME.keras, NAME.onnx, or a folder, for a SavedModel. Received: {path!r}")
    if os.path.exists(path):
        raise UserError(f"--to: {path!r} is there already: remove it, or choose another name")
    if ending == ".keras":
        return "keras"
    if ending == ".onnx":
        for package in (*_PACKAGES[backend], "onnxruntime"):
            if importlib.util.find_spec(package) is None:
                alone = f"pip install {package}, or --backend=torch"
                way = alone if package == "jax2onnx" else "pip install 'kerasdp[onnx]'"
                raise UserError(f"--to: .onnx with --backend={backend} needs {package}, which is not installed: {way}")
        return "onnx"
    if backend == "torch" or not is_installed("tensorflow"):
        raise UserError(
            "--to: a SavedModel is written by TensorFlow, or by jax beside it: use --backend=tensorflow or jax, on "
            "which every model file loads, with pip install 'kerasdp[tensorflow]'"
        )
    return "tf_saved_model"


def convert(model: keras.Model, path: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Writes a model; returns random inputs, and its outputs for them.

    Args:
        model: with one input and one output.
        path: of the file or folder.
        kind: of `check_target`.

    Raises:
        UserError: if Keras cannot write it, with Keras' reason.
    """
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        raise UserError(
            f"{model.name}: expected one input and one output. Received: {len(model.inputs)} and {len(model.outputs)}"
        )
    inputs = _random_inputs(model.inputs[0])
    with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
        file = os.path.join(folder, "model.keras")
        export(model, file)
        plain = keras.saving.load_model(file, compile=False)  # with Keras' layers instead of the kit's
        with same_on_all_backends():  # as it was trained, which on torch is not as Keras has it
            outputs = keras.ops.convert_to_numpy(plain(inputs, training=False))
        if folder_of := os.path.dirname(path.rstrip("/")):
            os.makedirs(folder_of, exist_ok=True)
        if kind == "keras":
            shutil.copyfile(file, path)
        else:
            try:
                with (
                    contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"),
                    same_on_all_backends(),
                ):  # fmt: skip
                    plain.export(path, format=kind, verbose=False)
            except Exception as error:  # converters raise anything
                line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
                raise UserError(f"--to: Keras cannot write {path!r} ({type(error).__name__}: {line[:200]})") from error
    return inputs, outputs


def check_elsewhere(path: str, kind: str, inputs: np.ndarray, outputs: np.ndarray, backend: str) -> list[str]:
    """Loads what was written in other programs, and compares their outputs; returns a line for each.

    Args:
        path: that `convert` wrote.
        kind: of `check_target`.
        inputs: shape `(samples, ...)`.
        outputs: for these inputs.
        backend: that wrote it.

    Raises:
        RunError: if an output differs by more than 1e-5 of the largest one.
    """
    found: dict[str, np.ndarray] = {}
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        found["onnxruntime"] = session.run(None, {session.get_inputs()[0].name: inputs})[0]
    here: dict[str, Any] = {"num_devices": 1, "device": "cpu", "verbose": 0}
    if kind == "tf_saved_model":
        found["tf.saved_model"] = launch(functools.partial(_of_saved_model, path, inputs), backend="tensorflow", **here)
    if kind == "keras":
        look = functools.partial(_of_keras_file, path, inputs)
        others = [other for other in BACKENDS if other != backend and is_installed(other)]
        found |= {f"Keras on {other}": launch(look, backend=other, **here) for other in others}
    lines = []
    scale = max(1.0, float(np.abs(outputs).max()))
    for name, received in found.items():
        apart = float(np.abs(np.asarray(received) - outputs).max()) / scale
        if not apart <= TOLERANCE:
            raise RunError(
                f"{path}: outputs of {name} differ by {apart:.1e} of the largest: expected at most {TOLERANCE}"
            )
        lines.append(f"{name}: outputs differ by at most {apart:.1e} of the largest")
    return lines or ["not checked: no other backend is installed"]


def _random_inputs(symbol: Any) -> np.ndarray:
    """Returns a few samples of an input: floats from 0 to 255, as of images; whole numbers 0 and 1."""
    shape = (_ROWS, *(_FREE_LENGTH if length is None else length for length in symbol.shape[1:]))
    random = np.random.RandomState(0)
    values = random.randint(0, 2, shape) if "int" in symbol.dtype else random.uniform(0, 255, shape)
    return values.astype(symbol.dtype)


def _of_keras_file(path: str, inputs: np.ndarray, runner: Any) -> np.ndarray:
    model = keras.saving.load_model(path, compile=False)
    return keras.ops.convert_to_numpy(model(inputs, training=False))


def _of_saved_model(path: str, inputs: np.ndarray, runner: Any) -> np.ndarray:
    outputs: np.ndarray = importlib.import_module("kerasdp.backends.tensorflow.saved_model").outputs_of(path, inputs)
    return outputs
