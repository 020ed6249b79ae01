"""Sends functions to worker processes, and sends return values back to the process that started the workers.

A function is sent by its name if workers can import its module. cloudpickle sends any other function as code, with the
values of the variables that the function refers to. So workers do not run the user's script or notebook. If a return
value cannot be sent, the models in it are saved to files, so that no trained weights are lost.
"""

import contextlib
import copy
import dis
import functools
import importlib.machinery
import io
import linecache
import mmap
import os
import pickle
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from kerasdp.errors import UserError
from kerasdp.processes.error_text import first_line

# In the file of arrays each begins at a multiple of so many bytes.
_ALIGNMENT = 64
# In what was pickled, the modules of Keras' classes and functions begin so.
_OF_KERAS = b"keras.src"
# Keras' settings that change numbers. Precision and seed are choices of the run.
_SETTINGS = ("image_data_format", "epsilon")


class SentFunction:
    """A pickled function that worker processes can call.

    The pickle contains copies of the objects that the function refers to. So later changes of these objects have no
    effect.

    Args:
        pickled: the pickled function, without the values of its arrays.
        path: path of a file with the values of the arrays. All workers map this file into memory.
        places: start and end of each array in the file, in bytes.
    """

    def __init__(self, pickled: bytes, path: str, places: list[tuple[int, int]]):
        self._pickled, self._path, self._places = pickled, path, places

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Unpickles the function in a worker, and calls it."""
        return self.received()(*args, **kwargs)

    def received(self) -> Callable[..., Any]:
        """Unpickles the function in a worker. Imports the modules that the function refers to, such as Keras."""
        with open(self._path, "rb") as file:  # a page becomes the process's own where it is written to
            arrays = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        buffers = [arrays[begin:end] for begin, end in self._places]
        unpickler = pickle.Unpickler(io.BytesIO(self._pickled), buffers=buffers)
        with _without_tensorflow_for(self._pickled):
            function: Callable[..., Any] = unpickler.load()
            of_main, texts, settings, registered, flag_values = unpickler.load()
        vars(sys.modules["__main__"]).update(of_main)
        linecache.cache.update(texts)
        _set_flags(flag_values)
        if (keras := sys.modules.get("keras")) is not None:
            for name, value in settings.items():
                getattr(keras.config, f"set_{name}")(value)
            for name, kind in registered.items():
                package, _, short = name.rpartition(">")
                keras.saving.register_keras_serializable(package, short)(kind)
        return function


@contextlib.contextmanager
def sent(function: Callable[..., Any]) -> Iterator[SentFunction]:
    """Pickles a function for processes that start within the `with` block.

    Args:
        function: any function, including a nested function or a lambda.

    Raises:
        UserError: if the function refers to an object that cannot be pickled. The message names the object.
    """
    content, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = _FunctionPickler(content, buffer_callback=buffers.append)
    try:
        with _without_tensorflow_for():
            pickler.dump(function)
            pickler.dump(_surroundings(pickler.by_code))
    except Exception as error:
        raise UserError(_why_unsendable(function, error)) from error
    with tempfile.NamedTemporaryFile(prefix="kerasdp-") as file:
        file.write(bytes(_ALIGNMENT))  # an empty file cannot be mapped
        places = []
        for array in (buffer.raw() for buffer in buffers):
            places.append((file.tell(), file.tell() + array.nbytes))
            file.write(array)
            file.write(bytes(-array.nbytes % _ALIGNMENT))
        file.flush()
        yield SentFunction(content.getvalue(), file.name, places)


def _surroundings(by_code: list[Any]) -> tuple[dict[str, Any], ...]:
    """Returns the state of this process that a worker needs to run functions and classes that are sent as code.

    Args:
        by_code: functions and classes that are sent as code.

    Returns:
        A tuple of five dictionaries:
        - objects of `__main__` that `pickle`, or a process started by user code, looks up by name
        - source lines of code without a file, such as notebook cells, for tracebacks and `inspect.getsource`
        - values of Keras settings, such as `epsilon`, by name
        - custom classes that are registered in Keras, by their registered names
        - values of absl flags, by name of the flag
    """
    main: Any = sys.modules["__main__"]
    of_main = {name: value for name, value in vars(main).items() if any(value is kind for kind in by_code)}
    if hasattr(main, "__file__"):
        of_main["__file__"] = main.__file__
    names = {kind.__code__.co_filename for kind in by_code if isinstance(kind, types.FunctionType)}
    lines = {name: linecache.getlines(name) for name in names if not os.path.exists(name)}
    texts = {name: (len("".join(text)), None, text, name) for name, text in lines.items() if text}
    absl_flags: Any = sys.modules.get("absl.flags")
    values: Any = absl_flags.FLAGS if absl_flags and absl_flags.FLAGS.is_parsed() else {}
    of_absl = [name for name in values if values.find_module_defining_flag(name).startswith("absl.")]
    flag_values = {name: values[name].value for name in values if name not in of_absl}
    keras: Any = sys.modules.get("keras")
    if keras is None:
        return of_main, texts, {}, {}, flag_values
    known = keras.saving.get_custom_objects()
    registered = {name: value for name, value in known.items() if any(value is kind for kind in by_code)}
    settings = {name: getattr(keras.config, name)() for name in _SETTINGS}
    return of_main, texts, settings, registered, flag_values


def _set_flags(values: dict[str, Any]) -> None:
    """Defines and sets absl flags in a worker. `values` maps each flag name to its value in the main process."""
    if not values:
        return
    from absl import flags

    for name, value in values.items():
        if name not in flags.FLAGS:
            flags.DEFINE(flags.ArgumentParser(), name, None, "")
        flags.FLAGS[name].value = value
    flags.FLAGS.mark_as_parsed()


class _Pickler(cloudpickle.Pickler):
    """Pickles layers and models together with their custom classes, and a `History` without its model."""

    def reducer_override(self, obj: Any) -> Any:
        """Returns the pickle reduction of an object. See `pickle.Pickler.reducer_override`."""
        keras: Any = sys.modules.get("keras")
        if keras is not None and isinstance(obj, keras.callbacks.History):
            alone = copy.copy(obj)
            alone.set_model(None)
            return alone.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if keras is not None and isinstance(obj, keras.Layer):
            from kerasdp.keras_compat.saving import classes_saved

            with classes_saved() as classes:
                make, (file,) = obj.__reduce__()
            return _make_layer, (classes, make, file)
        return super().reducer_override(obj)


def _make_layer(classes: dict[str, Any], make: Callable[[io.BytesIO], Any], file: io.BytesIO) -> Any:
    """Loads a layer or a model from a `.keras` file. `classes` are the custom classes in the file, by name."""
    with sys.modules["keras"].saving.custom_object_scope(classes):
        return make(file)


class _FunctionPickler(_Pickler):
    """Pickles functions and classes as code if workers cannot import them.

    Attributes:
        by_code: functions and classes that were pickled as code.
    """

    def __init__(self, file: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None):
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.by_code: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        """Returns the pickle reduction of an object. See `pickle.Pickler.reducer_override`."""
        if isinstance(obj, (types.FunctionType, type)):
            module = sys.modules.get(obj.__module__)
            # What `runpy`, or another `multiprocessing`, runs by a name that no worker can import.
            if hasattr(module, "__file__") and getattr(module, "__spec__", None) is None:
                cloudpickle.register_pickle_by_value(module)
            way = super().reducer_override(obj)
            if way is not NotImplemented:
                self.by_code.append(obj)
                if isinstance(obj, types.FunctionType):
                    # cloudpickle (3.1) overlooks the names in bodies of classes, which are loaded otherwise.
                    way[2][1]["__globals__"].update(_globals_of(obj))
            return way
        keras: Any = sys.modules.get("keras")
        of_keras = keras and (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable)
        if keras is not None and isinstance(obj, of_keras) and getattr(obj, "variables", True):
            raise _MadeBeforeError
        absl_flags: Any = sys.modules.get("absl.flags")
        if absl_flags is not None and obj is absl_flags.FLAGS:
            return "FLAGS"
        if "numpy" in sys.modules and isinstance(obj, sys.modules["numpy"].memmap):
            place = _place_in_file(obj)
            if place is not None:
                return type(obj), place
        return super().reducer_override(obj)


class _MadeBeforeError(Exception):
    """Raised if a function refers to a Keras object that already has variables in this process."""


def _place_in_file(array: Any) -> tuple[Any, ...] | None:
    """Returns arguments of `np.memmap` that map an array from its file again; None if the array must be copied.

    Args:
        array: an `np.memmap`, or a slice of an `np.memmap`.
    """
    whole = array
    while isinstance(whole.base, type(array)):
        whole = whole.base
    if not isinstance(whole.base, mmap.mmap) or array.mode not in ("r", "r+", "w+") or not array.flags.c_contiguous:
        return None
    offset = whole.offset + array.ctypes.data - whole.ctypes.data
    return array.filename, array.dtype, "r" if array.mode == "r" else "r+", offset, array.shape


def _without_tensorflow_for(pickled: bytes | None = None) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that prevents Keras from importing TensorFlow when it saves or loads a layer.

    The context manager does nothing if Keras is not used.

    Args:
        pickled: the data that will be unpickled. None: an object will be pickled.
    """
    if "keras" not in sys.modules if pickled is None else _OF_KERAS not in pickled:
        return contextlib.nullcontext()
    from kerasdp.keras_compat.settings import without_tensorflow

    return without_tensorflow()


def _why_unsendable(function: Callable[..., Any], error: Exception) -> str:
    """Returns an error message that names the variable that cannot be sent.

    Args:
        function: the function that cannot be pickled.
        error: the error that pickling the function raised.
    """
    name = name_of(function)
    holder, variable, value, reason = _find_unsendable(function, set()) or ("", "", None, error)
    if isinstance(reason, _MadeBeforeError):
        return (
            f"{variable or 'a model, an optimizer or a metric'}, which {holder or name} refers to, was made before "
            "kerasdp.launch: make (or load) the model, the optimizer and the metrics in the function that launch "
            "calls, so that they use the devices and the seed of the run"
        )
    if not variable:
        return f"{name} cannot be sent to worker processes ({first_line(error)}); create its objects in the function"
    return (
        f"{variable}, which {holder} refers to, is a {type(value).__name__} and cannot be sent to worker processes "
        f"({first_line(reason)}): create it in {name}, from numbers, arrays or paths"
    )


def _find_unsendable(function: Any, seen: set[int]) -> tuple[str, str, Any, Exception] | None:
    """Finds a variable that cannot be pickled, among the variables that a function refers to.

    Returns:
        A tuple: the name of the function that uses the variable, the name and the value of the variable, and the error
            that pickling raised. None if all variables can be pickled.
    """
    seen.add(id(function))
    for name, value in _references_of(function).items():
        if id(value) in seen:
            continue
        try:
            _FunctionPickler(io.BytesIO()).dump(value)
        except Exception as error:
            return _find_unsendable(value, seen) or (name_of(function), name, value, error)
    return None


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function, as error messages show it."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__name__", type(function).__name__)
    return "the lambda" if name == "<lambda>" else name


def tf_data_of(function: Callable[..., Any]) -> str | None:
    """Returns the name of a `tf.data.Dataset` that a function refers to; None if it refers to no `tf.data.Dataset`."""
    for name, value in _references_of(function).items():
        if type(value).__module__.startswith("tensorflow.") and hasattr(value, "cardinality"):
            return name
    return None


def _references_of(function: Any) -> dict[str, Any]:
    """Returns the values that a function refers to, by name: global variables, closures, arguments of `partial`."""
    if isinstance(function, functools.partial):
        arguments = {f"argument {number}": value for number, value in enumerate(function.args)}
        return _references_of(function.func) | function.keywords | arguments
    if not isinstance(function, types.FunctionType):
        return {}
    found = _globals_of(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            found[name] = cell.cell_contents
    return found


# In functions; in bodies of classes; in scopes of annotations (Python 3.12).
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Returns the global variables that a function and the code nested in the function use, by name."""
    codes, found = [function.__code__], dict[str, Any]()
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        names = {step.argval for step in dis.get_instructions(code) if step.opname in _LOADS}
        found |= {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    return found


# Several threads may start runs, such as a search with several jobs. A process that is forked while this thread has the
# lock inherits it, and acquires it again: so it is reentrant.
_lock = threading.RLock()


@contextlib.contextmanager
def not_run_again() -> Iterator[None]:
    """Prevents processes that are spawned within the `with` block from running the user's script again.

    By default, `multiprocessing` makes a spawned process first run the main script of its parent process. It does not
    run the `__main__.py` of a package, because this file has no `if __name__ == "__main__"` (CPython 3.11 to 3.14,
    multiprocessing/spawn.py). So this context manager makes the main script look like a `__main__.py`.
    """
    main: Any = sys.modules["__main__"]
    with _lock:
        kept, main.__spec__ = getattr(main, "__spec__", None), importlib.machinery.ModuleSpec("__main__", None)
        try:
            yield
        finally:
            main.__spec__ = kept


class SentResult:
    """The pickled return value of a function, for the process that started the workers.

    Args:
        result: the return value.
        folder: folder to save the models of the return value, if the value cannot be pickled. None: the current folder.

    Raises:
        UserError: if the value cannot be pickled. The message names the files of the saved models.
    """

    def __init__(self, result: Any, folder: str | None = None):
        folder, content = folder or os.getcwd(), io.BytesIO()
        self._folder = folder if os.access(folder, os.W_OK) else tempfile.gettempdir()
        try:
            with _without_tensorflow_for():
                _Pickler(content).dump(result)
        except Exception as error:
            raise _unsent(result, error, "which cannot be sent from a worker process", self._folder) from error
        self._pickled = content.getvalue()

    def received(self) -> Any:
        """Unpickles and returns the value, in the process that started the workers.

        Raises:
            UserError: if the value cannot be unpickled in this process.
        """
        try:
            with _without_tensorflow_for(self._pickled):
                return pickle.loads(self._pickled)
        except Exception as error:
            without_models = _WithoutModels(io.BytesIO(self._pickled)).load()
            raise _unsent(without_models, error, "which cannot be unpickled in this process", self._folder) from error


class _WithoutModels(pickle.Unpickler):
    """Unpickles a return value, and replaces each model in the value by the bytes of its `.keras` file."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class or function by its name. See `pickle.Unpickler.find_class`."""
        if (module, name) == (__name__, _make_layer.__name__):
            return lambda classes, make, file: file
        return super().find_class(module, name)


def _unsent(result: Any, error: Exception, words: str, folder: str) -> UserError:
    """Saves the models in a return value to files, and returns an error with the file names and the reason.

    Args:
        result: the return value that cannot be sent.
        error: the error that pickling or unpickling raised.
        words: a relative clause about the value, such as "which cannot be sent".
        folder: folder in which a new folder for the files is created.
    """
    keras: Any = sys.modules["keras"]
    models = [part for part in keras.tree.flatten(result) if isinstance(part, (io.BytesIO, keras.Model))]
    new = tempfile.mkdtemp(prefix="returned-", dir=folder) if models else ""
    paths = [_save(model, os.path.join(new, str(number))) for number, model in enumerate(models, 1)]
    saved = f"the trained model is saved in {', '.join(paths)}; " if paths else ""
    reason = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
    return UserError(
        f"train returned a {type(result).__name__}, {words} ({reason:.300}): {saved}return numbers, arrays or a History"
    )


def _save(model: Any, stem: str) -> str:
    """Saves a model to a file, and returns the path of the file.

    Args:
        model: the bytes of a `.keras` file, or a model. For a model only the weights are saved, because its class may
            have no `get_config`.
        stem: path of the file, without its ending.
    """
    if isinstance(model, io.BytesIO):
        with open(path := f"{stem}.keras", "wb") as file:
            file.write(model.getbuffer())
        return path
    with _without_tensorflow_for():
        model.save_weights(path := f"{stem}.weights.h5")
    return path
