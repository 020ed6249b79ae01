"""Sends functions to worker processes, wherever they were written: in a script, a notebook, another function.

A function of a module that workers can import travels by its name. Any other travels as its code (by cloudpickle), with
the values of the variables that it refers to: no worker runs the script or notebook that it is from.
"""

import contextlib
import dis
import functools
import importlib.machinery
import inspect
import io
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

# Buffers of arrays from this size on travel in a file; in bytes.
_LARGE = 1 << 16
# Of arrays in that file, in bytes: wide enough for any vector instruction.
_ALIGNMENT = 64
# In what was pickled, the modules of Keras' classes and functions begin so.
_OF_KERAS = b"keras.src"
# Keras' settings that change numbers. Precision and seed are choices of the run.
_SETTINGS = ("image_data_format", "epsilon")


class SentFunction:
    """A function on its way to worker processes; what it refers to is as it was when it was sent.

    Args:
        pickled: what a worker loads.
        path: of a file with its large arrays, which all workers map into their memory.
        places: begin and length of each of these arrays, in bytes.
    """

    def __init__(self, pickled: bytes, path: str, places: list[tuple[int, int]]):
        self._pickled, self._path, self._places = pickled, path, places

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, in a worker."""
        return self.received()(*args, **kwargs)

    def received(self) -> Callable[..., Any]:
        """Returns the function, in a worker. Imports what it refers to, maybe Keras."""
        buffers = []
        if self._places:
            with open(self._path, "rb") as file:
                # A page becomes the process's own where it is written to.
                mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            buffers = [mapped[begin : begin + length] for begin, length in self._places]
        unpickler = pickle.Unpickler(io.BytesIO(self._pickled), buffers=buffers)
        with without_tensorflow_for(self._pickled):
            main, texts, settings = unpickler.load()
            linecache.cache.update(texts)  # for tracebacks and inspect.getsource
            names, registered = unpickler.load()
            become(main, names)
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
    with without_tensorflow_for():
        try:
            pickled = _pickled(function, large)
        except Exception as error:
            raise UserError(why_unsendable(function, error, _pickle_to_nowhere)) from error
    with _in_file(large, function) as (path, places):
        yield SentFunction(pickled, path, places)


@contextlib.contextmanager
def _in_file(large: list[memoryview], function: Callable[..., Any]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Writes arrays to a file, which lives as long as the context; returns its path, and their places in it."""
    if not large:
        yield "", []
        return
    places = []
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="kerasdp-", suffix=".arrays"))
            for array in large:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                places.append((file.tell(), array.nbytes))
                file.write(array)
            file.flush()
        except OSError as error:
            size, name = sum(array.nbytes for array in large) >> 20, name_of(function)
            raise UserError(
                f"cannot write the {size} MiB of arrays that {name} refers to, which the worker processes read, to "
                f"{tempfile.gettempdir()} ({error}): load them in {name}, or set TMPDIR to another folder"
            ) from error
        yield file.name, places


class _Pickler(cloudpickle.Pickler):
    """Pickles functions and classes that workers cannot import by their code.

    Attributes:
        by_code: those that it has pickled so.
    """

    def __init__(self, file: Any, large: list[memoryview]):
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: _is_small(buffer, large))
        self.by_code: list[Any] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "_Pickler":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

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
        if "keras" in sys.modules and isinstance(obj, _kinds_with_variables()):
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
        if module is not None and name not in known and not can_be_imported(module):
            cloudpickle.register_pickle_by_value(module)
            self._stack.callback(cloudpickle.unregister_pickle_by_value, module)


def _pickled(function: Callable[..., Any], large: list[memoryview]) -> bytes:
    with _Pickler(_Nowhere(), []) as first:
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
    with _Pickler(file, large) as pickler:
        pickler.dump((description(), texts, settings))
        pickler.dump((names, registered))
        pickler.dump(function)
    return file.getvalue()


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, _: Any) -> None:
        """Does nothing."""


def _pickle_to_nowhere(value: Any) -> None:
    with _Pickler(_Nowhere(), []) as pickler:
        pickler.dump(value)


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


def _kinds_with_variables() -> tuple[type, ...]:
    keras = sys.modules["keras"]
    return keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable


def _require_no_variables(obj: Any) -> None:
    """Raises `MadeBeforeError` for a Keras object with variables, else what keeps Keras from making it anew."""
    if isinstance(obj, sys.modules["keras"].Variable) or obj.variables:
        raise MadeBeforeError
    pickle.loads(pickle.dumps(obj))


class MadeBeforeError(Exception):
    """A Keras object whose variables are those of this process."""


def why_unsendable(function: Callable[..., Any], error: Exception, attempt: Callable[[Any], None]) -> str:
    """Returns a line that names the variable which cannot be sent.

    Args:
        function: the one that was to be sent.
        error: what its attempt raised.
        attempt: raises an exception for a value that cannot be sent.
    """
    found = _find(function, attempt, set())
    name = name_of(function)
    if found is None:
        return (
            f"{name} cannot be sent to worker processes ({first_line(error)}): use a function of a module or a script"
        )
    referrer, variable, value, reason = found
    if isinstance(reason, MadeBeforeError):
        return (
            f"{variable}, which {referrer} refers to, was made before kerasdp.launch: make (or load) the model, the "
            f"optimizer and the metrics in the function that launch calls, for the run's devices and seed"
        )
    return (
        f"{variable}, which {referrer} refers to, is a {type(value).__name__} and cannot be sent to worker processes "
        f"({first_line(reason)}): make it in {name}, or let {name} refer to what it is made of (numbers, arrays, paths)"
    )


def name_of(function: Callable[..., Any]) -> str:
    """Returns how people call a function."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__name__", type(function).__name__)
    return "the lambda" if name == "<lambda>" else name


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text; its class, where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _find(holder: Any, attempt: Callable[[Any], None], seen: set[int]) -> tuple[str, str, Any, Exception] | None:
    """Returns who refers to what cannot be sent, by which name, the value, and the reason."""
    seen.add(id(holder))
    for name, value in _references(holder):
        if id(value) in seen:
            continue
        try:
            attempt(value)
        except Exception as error:
            return _find(value, attempt, seen) or (name_of(holder), name, value, error)
    return None


def _references(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yields the variables that a function, or the methods of a class, refer to, by name."""
    if isinstance(holder, functools.partial):
        yield from (("the function", holder.func), *holder.keywords.items())
        yield from ((f"argument {number}", value) for number, value in enumerate(holder.args))
    elif isinstance(holder, types.MethodType):
        yield from (("self", holder.__self__), (holder.__name__, holder.__func__))
    elif isinstance(holder, type):
        yield from vars(holder).items()
    elif type(holder).__module__ == "__main__" and not hasattr(
        holder, "variables"
    ):  # a user-defined object, not Keras'
        yield from getattr(holder, "__dict__", {}).items()
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

_lock = threading.Lock()
_num_contexts = 0
_kept: Any = None


@contextlib.contextmanager
def not_run_again() -> Iterator[None]:
    """Lets processes that `multiprocessing` spawns within the context leave `__main__` as it is.

    Before all else a spawned process runs the file of its parent's `__main__`, or the module that `__main__.__spec__`
    names, but for a package's `__main__.py`, which has no guard (CPython 3.11 to 3.14, multiprocessing/spawn.py). So
    the script gets the name of such a one.
    """
    global _num_contexts, _kept
    main: Any = sys.modules["__main__"]
    with _lock:  # several threads may start runs, as a search with several jobs does
        if _num_contexts == 0:
            _kept, main.__spec__ = getattr(main, "__spec__", None), importlib.machinery.ModuleSpec("__main__", None)
        _num_contexts += 1
    try:
        yield
    finally:
        with _lock:
            _num_contexts -= 1
            if _num_contexts == 0:
                main.__spec__ = _kept


def description() -> tuple[str | None, str | None]:
    """Returns the name by which `__main__` can be imported, and its file."""
    main: Any = sys.modules["__main__"]
    spec = _kept if _num_contexts else getattr(main, "__spec__", None)
    return getattr(spec, "name", None), getattr(main, "__file__", None)


def become(described: tuple[str | None, str | None], names: dict[str, dict[str, Any]]) -> None:
    """Makes this process's `__main__` look like the caller's, to processes that user code starts, and to `pickle`.

    Args:
        described: the caller's `description()`.
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


def can_be_imported(module: types.ModuleType) -> bool:
    """Returns whether a new process that imports the name of a module gets this one."""
    path = getattr(module, "__file__", None) or ""
    if not path.endswith(".py") or os.path.abspath(path).startswith(_INSTALLED):
        return True  # an extension, say
    spec = _find_module(module.__name__)
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(path)


def _find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """Returns where a new process would find a module: unlike `importlib.util.find_spec`, whatever is loaded here."""
    parent = name.rpartition(".")[0]
    found = _find_module(parent) if parent else None
    if parent and found is None:
        return None
    places = found.submodule_search_locations if found is not None else None
    for finder in sys.meta_path:
        spec = finder.find_spec(name, places) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None
