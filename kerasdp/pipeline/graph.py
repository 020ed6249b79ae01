"""Lists the calls of a model's layers, those in models within it among them."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import keras

from kerasdp.keras_compat.layers import has_mask
from kerasdp.keras_compat.models import (
    as_functional,
    calls,
    input_conversions,
    inputs_structure,
    is_called_as_keras_does,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a layer.

    Args:
        name: of the layer, after those of the models that it is in: `backbone/block_3`.
        operation: the layer, or an operation without weights.
        arguments: of the call, as Keras holds them.
        inputs: for each symbolic tensor in the arguments, by `id`: the key of its value, and the types to which that is
            converted, one after the other.
        outputs: keys of the values that it returns, each with the symbolic tensor.
    """

    name: str
    operation: Any
    arguments: Any
    inputs: dict[int, tuple[int, tuple[str, ...]]]
    outputs: dict[int, Any]

    def run(self, known: dict[int, Any]) -> list[Any]:
        """Calls the layer with values by their keys, adds what it returns to them, and returns that."""
        values = {}
        for tensor, (key, dtypes) in self.inputs.items():
            values[tensor] = known[key]
            for dtype in dtypes:
                values[tensor] = keras.ops.cast(values[tensor], dtype)
        args, kwargs = self.arguments.fill_in(values)
        outputs = keras.tree.flatten(self.operation(*args, **kwargs))
        known |= dict(zip(self.outputs, outputs))
        return outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graph:
    """The calls of a model in an order in which they can be made.

    Args:
        calls: in that order.
        inputs: keys of the model's inputs, each with its symbolic tensor.
        outputs: keys of its outputs.
    """

    calls: list[Call]
    inputs: dict[int, Any]
    outputs: list[int]


# For each symbolic tensor in a model, by `id`: the key of its value and the types to which that is converted.
_Scope = dict[int, tuple[int, tuple[str, ...]]]


def graph_of(model: keras.Model, *, is_opened: bool = True) -> Graph:
    """Returns the calls of a functional model.

    Args:
        model: functional.
        is_opened: whether a model within it, at any depth, is replaced by its own calls. It stays one call if it is not
            functional or Sequential, has a `call` of its own or weights that its layers do not have, is called more
            than once, or gets a mask.
    """
    keys = itertools.count()
    inputs = {next(keys): tensor for tensor in model.inputs}
    scope: _Scope = {id(tensor): (key, ()) for key, tensor in inputs.items()}
    counts = collections.Counter(id(node.operation) for node in _all_nodes(model)) if is_opened else None
    made = list(_calls(model, scope, keys, "", counts))
    return Graph(calls=made, inputs=inputs, outputs=[scope[id(tensor)][0] for tensor in model.outputs])


def _calls(
    model: keras.Model, scope: _Scope, keys: Iterator[int], prefix: str, counts: collections.Counter[int] | None
) -> Iterator[Call]:
    for node in calls(model) or []:  # a functional model's are known
        operation, name = node.operation, f"{prefix}{node.operation.name}"
        inner = None if counts is None or counts[id(operation)] > 1 else as_functional(operation)
        given = None if inner is None else _given(node, inner)
        if inner is None or given is None:
            outputs = {next(keys): tensor for tensor in node.outputs}
            yield Call(
                name=name,
                operation=operation,
                arguments=node.arguments,
                inputs={id(tensor): scope[id(tensor)] for tensor in node.input_tensors},
                outputs=outputs,
            )
            scope |= {id(tensor): (key, ()) for key, tensor in outputs.items()}
            continue
        inside: _Scope = {}
        for tensor, outer in zip(inner.inputs, given):
            key, dtypes = scope[id(outer)]
            now = dtypes[-1] if dtypes else outer.dtype
            inside[id(tensor)] = key, (*dtypes, *input_conversions(operation, now, tensor.dtype))
        yield from _calls(inner, inside, keys, f"{name}/", counts)
        scope |= {id(outer): inside[id(tensor)] for outer, tensor in zip(node.outputs, inner.outputs)}


def _all_nodes(model: keras.Model) -> Iterator[Any]:
    for node in calls(model) or []:
        yield node
        inner = as_functional(node.operation)
        if inner is not None:
            yield from _all_nodes(inner)


def _given(node: Any, inner: keras.Model) -> list[Any] | None:
    """Returns the tensors that a call gives to the inputs of a model, in their order; None if it cannot be opened."""
    if not is_called_as_keras_does(node.operation):
        return None
    own = {id(variable) for made in calls(inner) or [] for variable in getattr(made.operation, "variables", [])}
    if not own >= {id(variable) for variable in node.operation.variables}:
        return None
    args, kwargs = node.arguments.args, node.arguments.kwargs
    others = keras.tree.flatten([value for name, value in kwargs.items() if name != "training"])  # masks
    if len(args) != 1 or any(value is not None for value in others):
        return None
    structure, (given,) = inputs_structure(inner), args
    if isinstance(given, dict) and not isinstance(structure, dict):
        names = [tensor.name for tensor in inner.inputs]
        given = [given[name] for name in names] if given.keys() >= set(names) else []
    elif isinstance(given, dict) != isinstance(structure, dict) or isinstance(given, dict) and (
        given.keys() != structure.keys()
    ):  # fmt: skip
        return None
    flat = keras.tree.flatten(given)
    if len(flat) != len(inner.inputs) or any(
        not isinstance(outer, keras.KerasTensor) or has_mask(outer) or len(outer.shape) != len(tensor.shape)
        for outer, tensor in zip(flat, inner.inputs)
    ):
        return None
    return flat
