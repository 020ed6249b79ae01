"""Sends functions to worker processes, wherever they were written, and sends back what they return.

A function of a module that workers can import travels by its name. Any other travels as its code (by cloudpickle), with
the values of the variables that it refers to: no worker runs the script or notebook that it is from. What cannot be
sent back is saved, so that no training is lost.
"""

import contextlib
import copy
import dis
import functools
import importlib.machinery
import inspect
import io
import itertools
import json
import linecache
import mmap
import os
import pickle
import sys
import sysconfig
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from kerasdp.errors import UserError
from kerasdp.processes.error_text import first_line

# Buffers of arrays from this size on travel in files; in bytes.
_LARGE = 1 << 16
# In what was pickled, the modules of Keras' classes and functions begin so.
_OF_KERAS = b"keras.src"
# Keras' settings that change numbers. Precision and seed are choices of the run.
_SETTINGS = ("image_data_format", "epsilon")


class SentFunction:
    """A function on its way to worker processes; what it refers to is as it was when it was sent.

    Args:
        pickled: what a worker loads.
        paths: of files, each with a large array, which all workers map into their memory.
    """

    def __init__(self, pickled: bytes, paths: list[str]):
        self._pickled, self._paths = pickled, paths

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, in a worker."""
        return self.received()(*args, **kwargs)

    def received(self) -> Callable[..., Any]:
        """Returns the function, in a worker. Imports what it refers to, maybe Keras."""
        buffers = []
        for path in self._paths:
            with open(path, "rb") as file:  # a page becomes the process's own where it is written to
                buffers.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        unpickler = pickle.Unpickler(io.BytesIO(self._pickled), buffers=buffers)
        with without_tensorflow_for(self._pickled):
            main, texts, settings = unpickler.load()
            linecache.cache.update(texts)  # for tracebacks and inspect.getsource
            names, registered = unpickler.load()
            _become(main, names)
            if "keras" in sys.modules:
                _set_keras(settings, registered)
            function: Callable[..., Any] = unpickler.load()
        return function


@contextlib.contextmanager
def sent(function: Callable[..., Any]) -> Iterator[SentFunction]:
    """Makes a function ready to be sent to processes that are started in the context.

    Args:
        function: wherever it was written.

    Raises:
        UserError: if it refers to something that cannot be sent; the text names it.
    """
    large: list[memoryview] = []
    try:
        with without_tensorflow_for():
            pickled = _pickled(function, large)
    except Exception as error:
        raise UserError(_why_unsendable(function, error)) from error
    with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
        paths = [os.path.join(folder, str(number)) for number in range(len(large))]
        try:
            for path, array in zip(paths, large):
                with open(path, "wb") as file:
                    file.write(array)
        except OSError as error:
            name, size = name_of(function), sum(array.nbytes for array in large) >> 20
            raise UserError(
                f"cannot write {size} MiB of arrays that {name} refers to, which the worker processes read, to "
                f"{tempfile.gettempdir()} ({error}): load them in {name}, or set TMPDIR to another folder"
            ) from error
        yield SentFunction(pickled, paths)


class _Pickler(cloudpickle.Pickler):
    """Pickles functions and classes that workers cannot import by their code.

    Attributes:
        by_code: those that it has pickled so.
    """

    def __init__(self, file: Any, large: list[memoryview]):
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: _is_small(buffer, large))
        self.by_code: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        """Returns how an object is pickled; see the standard library."""
        if isinstance(obj, (types.FunctionType, type)):
            self._notice_module(obj.__module__)
            way = super().reducer_override(obj)
            if way is not NotImplemented:
                self.by_code.append(obj)
                if isinstance(obj, types.FunctionType):
                    # cloudpickle (3.1) overlooks the names in bodies of classes, which are loaded otherwise.
                    way[2][1]["__globals__"].update(_globals_known(obj))
            return way
        if "keras" in sys.modules:
            _require_no_variables(obj)
        if "numpy" in sys.modules and isinstance(obj, sys.modules["numpy"].memmap):
            place = _place_in_file(obj)
            if place is not None:
                return type(obj), place
        return super().reducer_override(obj)

    def _notice_module(self, name: str) -> None:
        """Lets what a module has travel by its code, if a worker could not import it.

        cloudpickle (3.1) expects that of no module that is imported here. But a name may have been given by
        `runpy.run_path`, by pytest's `--import-mode=importlib`, or by another `multiprocessing`.
        """
        module = sys.modules.get(name)
        known = cloudpickle.list_registry_pickle_by_value()
        if module is not None and name not in known and not _can_be_imported(module):
            cloudpickle.register_pickle_by_value(module)


def _pickled(function: Callable[..., Any], large: list[memoryview]) -> bytes:
    first = _Pickler(io.BytesIO(), [])
    first.dump(function)
    # Who looks for a class by its name, as `pickle` does, finds it in the worker, too.
    sources = {name: sys.modules[name] for name in {kind.__module__ for kind in first.by_code} & sys.modules.keys()}
    names = {name: _those_of(vars(module), first.by_code) for name, module in sources.items()}
    texts = _texts([kind.__code__ for kind in first.by_code if isinstance(kind, types.FunctionType)])
    settings, registered = {}, {}
    if "keras" in sys.modules:
        keras: Any = sys.modules["keras"]
        settings = {name: getattr(keras.config, name)() for name in _SETTINGS}
        registered = _those_of(keras.saving.get_custom_objects(), first.by_code)
    file = io.BytesIO()
    pickler = _Pickler(file, large)
    for part in ((_description(), texts, settings), (names, registered), function):
        pickler.dump(part)
    return file.getvalue()


def _is_small(buffer: pickle.PickleBuffer, large: list[memoryview]) -> bool:
    """Returns whether the content of a buffer is to stay among what is pickled; notes it otherwise."""
    content = buffer.raw()
    if content.nbytes >= _LARGE:
        large.append(content)
    return content.nbytes < _LARGE


def _place_in_file(array: Any) -> tuple[Any, ...] | None:
    """Returns the arguments that make an `np.memmap`, or a slice of one, anew; None if it is to be copied."""
    whole = array
    while isinstance(whole.base, type(array)):
        whole = whole.base
    if not isinstance(whole.base, mmap.mmap) or array.mode not in ("r", "r+", "w+") or not array.flags.c_contiguous:
        return None
    offset = whole.offset + array.ctypes.data - whole.ctypes.data
    return array.filename, array.dtype, "r" if array.mode == "r" else "r+", offset, array.shape


def _texts(codes: list[types.CodeType]) -> dict[str, Any]:
    """Returns what `linecache` knows of code that is in no file: a notebook's cells."""
    names = {code.co_filename for code in codes if not os.path.exists(code.co_filename)}
    lines = {name: linecache.getlines(name) for name in names}
    return {name: (len("".join(text)), None, text, name) for name, text in lines.items() if text}


def _those_of(known: dict[str, Any], kinds: list[Any]) -> dict[str, Any]:
    """Returns those of these functions and classes that are known by a name, by that name."""
    return {name: value for name, value in known.items() if any(value is kind for kind in kinds)}


def without_tensorflow_for(pickled: bytes | None = None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which Keras, where it is used, does not import TensorFlow to serialize a layer.

    `pickled`: what is to be loaded; None: something is to be pickled.
    """
    if "keras" not in sys.modules if pickled is None else _OF_KERAS not in pickled:
        return contextlib.nullcontext()
    from kerasdp.keras_compat.settings import without_tensorflow

    return without_tensorflow()


def _set_keras(settings: dict[str, Any], registered: dict[str, Any]) -> None:
    import keras

    for name, value in settings.items():
        getattr(keras.config, f"set_{name}")(value)
    for name, kind in registered.items():
        package, _, short = name.rpartition(">")
        keras.saving.register_keras_serializable(package, short)(kind)


def _require_no_variables(obj: Any) -> None:
    """Raises `_MadeBeforeError` for a Keras object with variables, else what keeps Keras from making it anew."""
    keras: Any = sys.modules["keras"]
    if isinstance(obj, (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable)):
        if isinstance(obj, keras.Variable) or obj.variables:
            raise _MadeBeforeError
        pickle.loads(pickle.dumps(obj))


class _MadeBeforeError(Exception):
    """A Keras object whose variables are those of this process."""


def _why_unsendable(function: Callable[..., Any], error: Exception) -> str:
    """Returns a line that names the variable which cannot be sent; `error`: why the function cannot."""
    found = _find(function, set())
    name = name_of(function)
    if found is None:
        return (
            f"{name} cannot be sent to worker processes ({first_line(error)}): use a function of a module or a script"
        )
    referrer, variable, value, reason = found
    if isinstance(reason, _MadeBeforeError):
        return (
            f"{variable}, which {referrer} refers to, was made before kerasdp.launch: make (or load) the model, the "
            f"optimizer and the metrics in the function that launch calls, for the run's devices and seed"
        )
    return (
        f"{variable}, which {referrer} refers to, is a {type(value).__name__} and cannot be sent to worker processes "
        f"({first_line(reason)}): make it in {name}, or let that refer to what it is made of (numbers, arrays, paths)"
    )


def name_of(function: Callable[..., Any]) -> str:
    """Returns how people call a function."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__name__", type(function).__name__)
    return "the lambda" if name == "<lambda>" else name


def _find(holder: Any, seen: set[int]) -> tuple[str, str, Any, Exception] | None:
    """Returns who refers to what cannot be sent, by which name, the value, and the reason."""
    seen.add(id(holder))
    for name, value in _references(holder):
        if id(value) in seen:
            continue
        try:
            _Pickler(io.BytesIO(), []).dump(value)
        except Exception as error:
            return _find(value, seen) or (name_of(holder), name, value, error)
    return None


def _references(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yields the variables that a function refers to, by name."""
    if isinstance(holder, functools.partial):
        yield from (("the function", holder.func), *holder.keywords.items())
        yield from ((f"argument {number}", value) for number, value in enumerate(holder.args))
    elif isinstance(holder, types.MethodType):
        yield from (("self", holder.__self__), (holder.__name__, holder.__func__))
    elif isinstance(holder, types.FunctionType):
        parameters = inspect.signature(holder, follow_wrapped=False).parameters.values()
        yield from ((one.name, one.default) for one in parameters if one.default is not one.empty)
        for name, cell in zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing is in it yet
                yield name, cell.cell_contents
        yield from _globals_known(holder).items()


def tf_data_of(holder: Any, seen: set[int] | None = None) -> str | None:
    """Returns by which name a function, or one that it calls, refers to a tf.data data set; None if none does."""
    seen = {id(holder)} if seen is None else seen
    for name, value in _references(holder):
        if type(value).__module__.startswith("tensorflow.") and hasattr(value, "cardinality"):
            return name
        if isinstance(value, (types.FunctionType, functools.partial)) and id(value) not in seen:
            seen.add(id(value))
            if (found := tf_data_of(value, seen)) is not None:
                return found
    return None


def _globals_known(function: types.FunctionType) -> dict[str, Any]:
    """Returns the global variables that a function, and code within it, load."""
    known = function.__globals__
    return {name: known[name] for name in _globals_of(function.__code__) if name in known}


# In functions; in bodies of classes; in scopes of annotations (Python 3.12).
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def _globals_of(code: types.CodeType) -> list[str]:
    """Returns the global names that code, and functions within it, load."""
    names = [step.argval for step in dis.get_instructions(code) if step.opname in _LOADS]
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            names += _globals_of(part)
    return names


_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))

# Several threads may start runs, as a search with several jobs does. A process that is forked by the thread that holds
# it holds it, too, and takes it again.
_lock = threading.RLock()


@contextlib.contextmanager
def not_run_again() -> Iterator[None]:
    """Lets a process that `multiprocessing` spawns within the context leave `__main__` as it is.

    Before all else a spawned process runs the file of its parent's `__main__`, or the module that `__main__.__spec__`
    names, but for a package's `__main__.py`, which has no guard (CPython 3.11 to 3.14, multiprocessing/spawn.py). So
    the script gets the name of such a one.
    """
    main: Any = sys.modules["__main__"]
    with _lock:
        kept, main.__spec__ = getattr(main, "__spec__", None), importlib.machinery.ModuleSpec("__main__", None)
        try:
            yield
        finally:
            main.__spec__ = kept


def _description() -> tuple[str | None, str | None]:
    """Returns the name by which `__main__` can be imported, and its file."""
    main: Any = sys.modules["__main__"]
    with _lock:
        return getattr(getattr(main, "__spec__", None), "name", None), getattr(main, "__file__", None)


def _become(described: tuple[str | None, str | None], names: dict[str, dict[str, Any]]) -> None:
    """Makes this process's `__main__` look like the caller's, to processes that user code starts, and to `pickle`.

    Args:
        described: the caller's `_description()`.
        names: functions and classes, by the module that they are from, of `__main__` and of others that cannot be
            imported here.
    """
    main: Any = sys.modules["__main__"]
    name, file = described
    if name is not None:
        main.__spec__ = importlib.machinery.ModuleSpec(name, None)
    if file is not None:
        main.__file__ = file
    for module, known in names.items():
        if module not in sys.modules and known:
            sys.modules[module] = types.ModuleType(module)
        vars(sys.modules.get(module, main)).update(known)


def _can_be_imported(module: types.ModuleType) -> bool:
    """Returns whether a new process that imports the name of a module gets this one."""
    path = getattr(module, "__file__", None) or ""
    if not path.endswith(".py") or os.path.abspath(path).startswith(_INSTALLED):
        return True  # an extension, say
    origin, places = None, None
    # Unlike `importlib.util.find_spec`, whatever is loaded here.
    for name in itertools.accumulate(module.__name__.split("."), "{}.{}".format):
        found = (finder.find_spec(name, places) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        if spec is None:
            return False
        origin, places = spec.origin, spec.submodule_search_locations
    return origin is not None and os.path.realpath(origin) == os.path.realpath(path)


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
                _ResultPickler(file).dump(result)
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


class _ResultPickler(cloudpickle.Pickler):
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
    files = ", ".join(_save(list(_parts_of(result)), folder))
    reason = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
    return UserError(
        f"train returned a {type(result).__name__}, {words} ({reason:.300}): "
        f"{files and f'what was trained is in {files}; '}return numbers, arrays or a History"
    )


def _parts_of(value: Any) -> Iterator[Any]:
    """Yields the models, files of models and histories in a value: in lists, tuples and dictionaries."""
    keras: Any = sys.modules.get("keras")
    if isinstance(value, io.BytesIO) or (keras and isinstance(value, (keras.Model, keras.callbacks.History))):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts_of(part)


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
