"""Records each call of `keras.ops`, and of backend functions that layers call directly, with its arrays."""

import contextlib
import dataclasses
import difflib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras.src import backend
from keras.src import ops as used_by_layers

from kerasdp.keras_compat.patches import in_place_of, replaced_in_each, step_with

# The backend's modules with the functions that `keras.ops` calls (Keras 3.15); "" is the backend itself.
_MODULES = ("core", "image", "linalg", "math", "nn", "numpy", "")
# The functions of the backend that layers call directly.
_OF_LAYERS = ("gru", "lstm", "rnn")
# These compute nothing.
_NO_OPERATIONS = frozenset(
    ("convert_to_numpy", "convert_to_tensor", "custom_gradient", "device_scope", "dtype", "is_tensor", "ndim", "shape",
     "size", "stop_gradient", "unstack")
)  # fmt: skip
LAYER = "layer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Records one call of an operation, or the output of one layer.

    Args:
        function: the path of an operation, such as `"keras.ops.tanh"`, or of a backend's function, such as
            `"keras.src.backend.nn.tanh"`. `"layer"` for the output of a layer.
        layer: the class and the name of the layer whose code makes the call, or the class of a loss or metric. Empty
            for a call by other code.
        site: the file, the line and the function that make the call.
        arguments: a list and a dictionary, in which `Array(number)` replaces each array. None for the output of a
            layer.
        inputs: the arrays among the arguments.
        outputs: the arrays that the call returned.
    """

    function: str
    layer: str
    site: str
    arguments: Any
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]

    @property
    def name(self) -> str:
        """Returns the name of the function without its module, or the name of the layer for a layer's output."""
        return self.layer if self.function == LAYER else self.function.rpartition(".")[2]

    def __str__(self) -> str:
        if self.function == LAYER:
            return f"layer {self.layer}"
        shapes = ", ".join(f"{array.dtype}{list(array.shape)}" for array in self.inputs)
        return f"{self.function}({shapes}){f' of {self.layer}' if self.layer else ''}, {self.site}"


@dataclasses.dataclass(frozen=True)
class Array:
    """Replaces an array in the recorded arguments of a call; `number` is the index of the array in `Call.inputs`."""

    number: int


@contextlib.contextmanager
def telling(tell: Callable[[Call], None]) -> Iterator[None]:
    """Calls `tell` with a `Call` after each operation, and after each call of a layer, within the context.

    Operations inside other operations are left out. The output of a layer comes after the operations inside that layer.
    Calls without values are also left out: operations with a function as an argument (`keras.ops.scan`), and calls that
    a framework traces.
    """
    busy = False

    def record(layer: Any, result: Any) -> None:
        if not busy and not isinstance(layer, keras.Model):
            with contextlib.suppress(Exception):  # as in `_call`
                outputs = [_array(tensor) for tensor in _tensors(result)]
                name = f"{type(layer).__name__} {layer.name}"
                tell(Call(function=LAYER, layer=name, site="", arguments=None, inputs=[], outputs=outputs))

    def watched(function: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal busy
        if busy:
            return original(*args, **kwargs)
        busy = True
        try:
            result = original(*args, **kwargs)
            call = _call(function, args, kwargs, result)
        finally:
            busy = False
        if call is not None:
            tell(call)
        return result

    owners = []
    for path, owner, name in _operations():
        original = getattr(owner, name)
        owners.append((owner, {name: in_place_of(original, functools.partial(watched, path))}))
    with replaced_in_each(owners), step_with(record=record):
        yield


def call_again(call: Call, arrays: list[Any]) -> list[Any]:
    """Repeats a recorded call with other arrays or tensors, and returns the output tensors.

    Args:
        call: the recorded call.
        arrays: the new arrays or tensors, in the order of `call.inputs`.
    """

    def filled(value: Any) -> Any:
        if isinstance(value, Array):
            return arrays[value.number]
        if isinstance(value, (list, tuple)):
            return type(value)(map(filled, value))
        return {key: filled(each) for key, each in value.items()} if isinstance(value, dict) else value

    module, _, name = call.function.rpartition(".")
    owner = {"keras.ops": keras.ops}.get(module) or _module_of(module.removeprefix("keras.src.backend").strip("."))
    args, kwargs = filled(call.arguments)
    return _tensors(getattr(owner, name)(*args, **kwargs))


def aligned(calls: list[Call], others: list[Call]) -> Iterator[tuple[Call, Call]]:
    """Yields pairs of matching calls of two recorded passes, and skips calls that only one pass has.

    Some calls do not match, because within some layers the backends call different operations.
    """
    keys: list[list[Any]] = [[(call.layer, call.site, call.name) for call in each] for each in (calls, others)]
    for first, second, length in difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks():
        yield from zip(calls[first : first + length], others[second : second + length])


def _operations() -> Iterator[tuple[str, Any, str]]:
    """Yields the path of each operation, a module that holds the operation, and its name in that module."""
    names = [
        name
        for name, value in vars(keras.ops).items()
        if isinstance(value, types.FunctionType) and not name.startswith("_") and name not in _NO_OPERATIONS
    ]
    for name in names:
        yield f"keras.ops.{name}", keras.ops, name
        if hasattr(used_by_layers, name):
            yield f"keras.ops.{name}", used_by_layers, name
    for module in _MODULES:
        owner = _module_of(module)
        public = vars(getattr(keras.ops, module)) if hasattr(keras.ops, module) else _OF_LAYERS  # `keras.ops.image`
        for name in {*names, *public} - _NO_OPERATIONS:
            if isinstance(getattr(owner, name, None), types.FunctionType):
                yield ".".join(filter(None, ("keras.src.backend", module, name))), owner, name


def _module_of(name: str) -> Any:
    return getattr(getattr(backend, "ops", backend), name) if name else backend


def _call(function: str, args: Any, kwargs: Any, result: Any) -> Call | None:
    inputs: list[np.ndarray] = []
    try:
        arguments = _described((list(args), dict(kwargs)), inputs)
        outputs = [_array(tensor) for tensor in _tensors(result)]
    except Exception:  # traced tensors have no values, and raise errors of many types
        return None
    layer, site = _place()
    return Call(function=function, layer=layer, site=site, arguments=arguments, inputs=inputs, outputs=outputs)


def _described(value: Any, arrays: list[np.ndarray]) -> Any:
    """Returns arguments in which an `Array` replaces each tensor.

    The tensors are appended to `arrays` as NumPy arrays.
    """
    if isinstance(value, (np.ndarray, keras.Variable)) or keras.ops.is_tensor(value):
        arrays.append(_array(value))
        return Array(len(arrays) - 1)
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(_described(each, arrays) for each in value)
    if isinstance(value, dict):
        return {key: _described(each, arrays) for key, each in value.items()}
    if value is None or isinstance(value, (bool, int, float, str, slice, type(...), np.generic)):
        return value
    return keras.backend.standardize_dtype(value)


def _array(tensor: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(tensor))


def _tensors(result: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(result) if hasattr(leaf, "shape")]


def _place() -> tuple[str, str]:
    """Returns the layer, loss or metric whose code is running, and the place where that code calls an operation."""
    site = ""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        is_within = module.startswith(("keras.src.backend.", "keras.src.ops", "kerasdp.keras_compat", "contextlib"))
        if not is_within and not site:
            code = frame.f_code
            site = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        owner = frame.f_locals.get("self")
        if site and isinstance(owner, keras.layers.Layer) and not isinstance(owner, keras.Model):
            return f"{type(owner).__name__} {owner.name}", site
        if site and isinstance(owner, (keras.losses.Loss, keras.metrics.Metric)):
            return type(owner).__name__, site
        frame = frame.f_back
    return "", site
