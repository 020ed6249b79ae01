"""Writes a trained model as a plain Keras file."""

import contextlib
import os

import keras

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import saved_merged
from kerasdp.keras_compat.saving import compiled_as_any_backend_does, save_optimizers_by_public_names
from kerasdp.keras_compat.settings import without_tensorflow


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
