"""Loads trained models from Keras files and checkpoints, and exports models as standard Keras files."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import keras

from kerasdp.checkpoint import files, state
from kerasdp.checkpoint.storage import is_url
from kerasdp.config.config import CHECKPOINTS
from kerasdp.errors import CheckpointError, UserError
from kerasdp.keras_compat.layers import saved_merged
from kerasdp.keras_compat.saving import (
    compiled_as_any_backend_does,
    safe_deserialization,
    save_optimizers_by_public_names,
)
from kerasdp.keras_compat.settings import without_tensorflow
from kerasdp.reporting.report import warn
from kerasdp.same.portable import portable

_GIVE_MODEL = "build the model, and pass it: load_model(path, model)"


def load_model(path: str, model: keras.Model | None = None) -> keras.Model:
    """Loads a trained model from a Keras file, a checkpoint, or the workdir of a run.

    Any backend, on any number of devices, may have written the file. A file contains data, never code. The model may
    contain layers of Keras, and classes that are registered in this program.

    Args:
        path: path of a `.keras` or `.weights.h5` file, a checkpoint (`.safetensors`), the workdir of a run, or a folder
            or URL with checkpoints. From a folder, the newest valid checkpoint is loaded.
        model: a built model, into which the weights are loaded. None: the model is built from the layers in the file. A
            checkpoint contains the layers if the model is functional or Sequential.

    Returns:
        `model` if it was passed; otherwise a new model that is not compiled.

    Raises:
        UserError: if the file or checkpoint does not exist; if no model can be built from it; if it contains the
            weights of another model.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        x, y = np.random.rand(64, 8), np.random.rand(64, 1)

        def train(runner):
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(x, y)

        kerasdp.launch(train, workdir="runs/first")
        model = kerasdp.load_model("runs/first")
        ```
    """
    path = os.fspath(path)
    if model is not None and not model.built:
        raise UserError(f"load_model: expected a built model; call {model.name} on data first")
    if not is_url(path) and not os.path.exists(path):
        raise UserError(f"load_model: there is no file or folder {path!r}; check the path")
    if not path.endswith((".keras", ".weights.h5")) or is_url(path):
        return _restored(*_find(path), model)
    if model is not None:
        _tried(lambda: model.load_weights(path), path, "pass the model that was saved")
        return model
    if path.endswith(".weights.h5"):
        raise UserError(f"load_model: {path} has only weights; {_GIVE_MODEL}")
    return _tried(lambda: state.load_keras_file(path), path, f"if it has custom layers, {_GIVE_MODEL}")


def _find(place: str) -> tuple[str, files.Checkpoint]:
    """Returns the path and the content of a checkpoint, or of the newest checkpoint in a folder."""
    inner = os.path.join(place, CHECKPOINTS)
    try:
        if place.endswith(".safetensors"):
            return place, files.load(place)
        found = files.load_newest(inner if os.path.isdir(inner) else place, warn)
    except (CheckpointError, UserError, NotADirectoryError) as error:
        older = "; load an older checkpoint" if isinstance(error, CheckpointError) else ""
        raise UserError(f"load_model: {str(error).removeprefix('--resume: ')}{older}") from error
    if found is None:
        raise UserError(f"load_model: there are no checkpoints in {place!r}; pass a workdir with checkpoints")
    return found


def _restored(path: str, saved: files.Checkpoint, model: keras.Model | None) -> keras.Model:
    if saved.state.get("config", {}).get("checkpoint_weights", "all") != "all":
        raise UserError(
            f"load_model: {path} has no frozen weights, because its run used --checkpoint_weights=trained; resume that "
            "run, call kerasdp.export(model, FILE.keras) in it, and load that file"
        )
    if model is None:
        layers = saved.state.get("architecture")
        if not layers:
            raise UserError(f"load_model: {path} contains weights, but no layers; {_GIVE_MODEL}")
        model = _tried(lambda: state.build_architecture(layers), path, _GIVE_MODEL)
    portable(model)  # random layers then have the seeds that the checkpoint holds
    try:
        state.restore(model, saved.arrays, ("model",))
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"load_model: {path}: {error}; {_GIVE_MODEL}") from error
    return model


def _tried(action: Callable[[], Any], path: str, instead: str) -> Any:
    """Calls `action`, and turns any error into a one-line `UserError`. `instead` is the advice in the message."""
    try:
        with safe_deserialization():
            return action()
    except Exception as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        reason = line.partition(". ")[0]
        raise UserError(f"load_model: the model in {path} cannot be loaded ({reason:.300}); {instead}") from error


def export(model: keras.Model, path: str) -> None:
    """Saves a model as a Keras file, which loads on every backend, without kerasdp.

    Several processes may call this function with the same path. Each process writes the same complete file.

    Args:
        model: a Keras model. A layer of `kerasdp.layers` is saved as the corresponding layer of Keras. LoRA adapters
            are merged into the kernels; in this case the optimizer is not saved.
        path: path of the file. A `.keras` file contains the architecture, the weights, the optimizer and its state. A
            `.weights.h5` file contains only the weights. Missing folders are created.

    Raises:
        UserError: if the path does not end in `.keras` or `.weights.h5`, or the file cannot be written.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        def train(runner):
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(np.random.rand(64, 8), np.random.rand(64, 1))
            kerasdp.export(model, "trained/model.keras")

        kerasdp.launch(train)
        model = keras.saving.load_model("trained/model.keras")
        ```
    """
    if not path.endswith((".keras", ".weights.h5")):
        raise UserError(f"export: expected a path that ends in .keras or .weights.h5. Received: {path!r}")
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{os.getpid()}.{name}")
    try:
        os.makedirs(folder, exist_ok=True)
        save_optimizers_by_public_names()
        with without_tensorflow(), compiled_as_any_backend_does(model), saved_merged(model):
            (model.save if path.endswith(".keras") else model.save_weights)(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"export: cannot write {path!r} ({error.strerror or error}); choose another path") from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)
