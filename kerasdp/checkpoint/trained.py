"""Loads trained models, from Keras' files and the checkpoints of runs, and writes them as plain Keras files."""

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

_GIVE_MODEL = "build the model yourself, and give it: load_model(path, model)"


def load_model(path: str, model: keras.Model | None = None) -> keras.Model:
    """Loads a trained model, which any backend may have written, on any number of devices.

    A file brings data, never code: its layers are Keras' layers and the classes that are registered here.

    Args:
        path: a `.keras` or `.weights.h5` file, one checkpoint (`.safetensors`), or the workdir of a run, or a folder or
            URL of checkpoints, of which the newest is loaded that can be used.
        model: built; the weights are loaded into it. None: the layers come from the file, which has those of a
            functional or Sequential model.

    Returns:
        The model, not compiled.

    Raises:
        UserError: if there is no such file, or the model in it cannot be built, or is another one.
    """
    path = os.fspath(path)
    if model is not None and not model.built:
        raise UserError(f"load_model: expected a model with weights: call {model.name} on data before")
    if not is_url(path) and not os.path.exists(path):
        raise UserError(f"load_model: there is no file or folder {path!r}")
    if not path.endswith((".keras", ".weights.h5")) or is_url(path):
        return _restored(*_find(path), model)
    if model is not None:
        _tried(lambda: model.load_weights(path), path, "give the model that was saved")
        return model
    if path.endswith(".weights.h5"):
        raise UserError(f"load_model: {path} has weights alone; {_GIVE_MODEL}")
    return _tried(lambda: state.load_keras_file(path), path, f"if its layers are yours, {_GIVE_MODEL}")


def _find(place: str) -> tuple[str, files.Checkpoint]:
    """Returns path and content of a checkpoint, or of the newest of a folder."""
    inner = os.path.join(place, CHECKPOINTS)
    try:
        if place.endswith(".safetensors"):
            return place, files.load(place)
        found = files.load_newest(inner if os.path.isdir(inner) else place, warn)
    except (CheckpointError, UserError, NotADirectoryError) as error:
        raise UserError(f"load_model: {str(error).removeprefix('--resume: ')}") from error
    if found is None:
        raise UserError(f"load_model: there are no checkpoints in {place!r}, nor in its folder {CHECKPOINTS}")
    return found


def _restored(path: str, saved: files.Checkpoint, model: keras.Model | None) -> keras.Model:
    if saved.state.get("config", {}).get("checkpoint_weights", "all") != "all":
        raise UserError(
            f"load_model: {path} holds the weights that trained, and not the others (--checkpoint_weights=trained); "
            "resume its run, let it call kerasdp.export(model, FILE.keras), and use that file"
        )
    if model is None:
        layers = saved.state.get("architecture")
        if not layers:
            raise UserError(f"load_model: {path} has weights, and no layers; {_GIVE_MODEL}")
        model = _tried(lambda: state.build_architecture(layers), path, _GIVE_MODEL)
    portable(model)  # random layers then have the seeds that the checkpoint holds
    try:
        state.restore(model, saved.arrays, ("model",))
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"load_model: {path}: {error}; {_GIVE_MODEL}") from error
    return model


def _tried(action: Callable[[], Any], path: str, instead: str) -> Any:
    """Returns what Keras returns; it may raise anything of a file, most of it in many lines."""
    try:
        with safe_deserialization():
            return action()
    except Exception as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        reason = line.partition(". ")[0]
        raise UserError(f"load_model: the model of {path} cannot be loaded ({reason:.300}); {instead}") from error


def export(model: keras.Model, path: str) -> None:
    """Saves a model as Keras does, so that it loads on every backend, without kerasdp.

    Each of several processes may call it: they write the same, and replace one another's whole files.

    Args:
        model: a Keras model; the layers of `kerasdp.layers` are saved as Keras' own;
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
        with without_tensorflow(), compiled_as_any_backend_does(model), saved_merged(model):
            (model.save if path.endswith(".keras") else model.save_weights)(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"export: cannot write {path!r} ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)
