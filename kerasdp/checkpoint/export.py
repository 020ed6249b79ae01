"""A finished model as a plain Keras file."""

import contextlib
import os
from collections.abc import Iterator

import keras
from keras.src import api_export

from kerasdp.errors import UserError
from kerasdp.keras_compat import without_tensorflow


def export(model: keras.Model, path: str) -> None:
    """Saves a model as Keras does, so that it loads on every backend, without kerasdp.

    Of several processes each may call it: they write the same, and whole files take one another's place.

    Args:
        model: a Keras model; the kit's layers are saved as Keras' own.
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
        with without_tensorflow(), _public_optimizers(model), _compiler_left_open(model):
            (model.save if path.endswith(".keras") else model.save_weights)(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"export: cannot write {path!r} ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


@contextlib.contextmanager
def _public_optimizers(model: keras.Model) -> Iterator[None]:
    """On torch, Keras (3.15) makes optimizers of classes of its backend's, and saves their names: such a file loads
    nowhere else. This names the classes from which they derive.
    """
    optimizer = getattr(model, "optimizer", None)
    kinds = {type(part) for part in (optimizer, getattr(optimizer, "inner_optimizer", None)) if part is not None}
    names = api_export.REGISTERED_OBJS_TO_NAMES
    added = {}
    for kind in kinds:
        public = next((names[base] for base in kind.__mro__ if base in names), None)
        if public is not None and kind.__module__.startswith("keras.src.backend."):
            added[kind] = public
    names.update(added)
    try:
        yield
    finally:
        for kind in added:
            del names[kind]


@contextlib.contextmanager
def _compiler_left_open(model: keras.Model) -> Iterator[None]:
    """Saves `jit_compile="auto"`: Keras (3.15) saves what that means on the backend that saves. So a file from jax has
    the next backend compile, which takes torch half a minute, and one from torch keeps jax from it.
    """
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    kept = config.get("jit_compile")
    if kept is None:
        yield
        return
    config["jit_compile"] = "auto"
    try:
        yield
    finally:
        config["jit_compile"] = kept
