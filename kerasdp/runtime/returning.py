"""Sends back what `train` returned in a worker process; saves what cannot be sent, so that no training is lost."""

import copy
import io
import json
import os
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from kerasdp.errors import UserError
from kerasdp.runtime.sending import without_tensorflow_for


class SentResult:
    """What a function returned, on its way back from a worker process.

    Args:
        result: the value.
        folder: where the models and histories in it are saved if it cannot be sent. None: the current one.

    Raises:
        UserError: if it cannot be sent; the text names the files.
    """

    def __init__(self, result: Any, folder: str | None = None):
        self._folder, file = folder or os.getcwd(), io.BytesIO()
        try:
            with without_tensorflow_for():
                _Pickler(file).dump(result)
        except Exception as error:
            raise _unsent(result, error, "which cannot be sent from a worker process", self._folder) from error
        self._pickled = file.getvalue()

    def received(self) -> Any:
        """Returns the value, in the process that started the workers. Raises `UserError` if it cannot be made there."""
        try:
            with without_tensorflow_for(self._pickled):
                return pickle.loads(self._pickled)
        except Exception as error:
            raise self.saved(error, "which cannot be made anew in this process") from error

    def saved(self, error: Exception, words: str) -> UserError:
        """Saves the models and histories in it, and returns what says so; `words`: what went wrong."""
        return _unsent(_WithoutModels(io.BytesIO(self._pickled)).load(), error, words, self._folder)


class _Pickler(cloudpickle.Pickler):
    """Pickles a model with the classes that it is made of, and a `History` without its model."""

    def reducer_override(self, obj: Any) -> Any:
        """Returns how an object is pickled; see the standard library."""
        keras: Any = sys.modules.get("keras")
        if keras is not None and isinstance(obj, keras.callbacks.History):
            alone = copy.copy(obj)
            alone.set_model(None)
            return alone.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if keras is not None and isinstance(obj, keras.Layer):
            from kerasdp.keras_compat.saving import classes_saved

            with classes_saved() as classes:
                make, (file,) = obj.__reduce__()
            return _make_anew, (classes, make, file)
        return super().reducer_override(obj)


def _make_anew(classes: dict[str, Any], make: Callable[[io.BytesIO], Any], file: io.BytesIO) -> Any:
    """Makes a layer or a model of a `.keras` file; `classes`: those that are not Keras', by name."""
    with sys.modules["keras"].saving.custom_object_scope(classes):
        return make(file)


class _WithoutModels(pickle.Unpickler):
    """Reads a result with files in the place of its models."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns what makes an object; see the standard library."""
        if (module, name) == (__name__, _make_anew.__name__):
            return lambda classes, make, file: file
        return super().find_class(module, name)


def _unsent(result: Any, error: Exception, words: str, folder: str) -> UserError:
    """Saves the models and histories in a result, and returns what says so, and why it does not arrive."""
    files = ", ".join(_save(list(_parts_of(result, set())), folder))
    reason = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
    return UserError(
        f"train returned a {type(result).__name__}, {words} ({reason:.300}): "
        f"{files and f'what was trained is in {files}; '}return numbers, arrays or a History"
    )


def _parts_of(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the models, files of models and histories in a value, each once."""
    if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return
    seen.add(id(value))
    keras: Any = sys.modules.get("keras")
    if isinstance(value, io.BytesIO) or (keras and isinstance(value, (keras.Model, keras.callbacks.History))):
        yield value
    else:
        known = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for part in value if isinstance(value, (list, tuple)) else known.values():
            yield from _parts_of(part, seen)


def _save(parts: list[Any], folder: str) -> list[str]:
    """Saves parts of a result in a new folder; in the temporary one, if this one cannot be written. Returns the paths.

    Raises:
        OSError: if neither can be written.
    """
    for place in (folder, tempfile.gettempdir()) if parts else ():
        try:
            new = tempfile.mkdtemp(prefix="returned-", dir=place)
            return [_save_part(part, os.path.join(new, str(number))) for number, part in enumerate(parts, 1)]
        except OSError:
            if place == tempfile.gettempdir():
                raise
    return []


def _save_part(part: Any, stem: str) -> str:
    """Saves the weights of a model (its class may not say how it is made), its file, or a history; returns the path."""
    if hasattr(part, "save_weights"):
        with without_tensorflow_for():
            part.save_weights(path := f"{stem}.weights.h5")
    elif isinstance(part, io.BytesIO):
        with open(path := f"{stem}.keras", "wb") as model_file:
            model_file.write(part.getbuffer())
    else:
        with open(path := f"{stem}.history.json", "w") as history_file:
            json.dump(part.history, history_file, default=lambda value: value.tolist())
    return path
