"""Tells what a layer holds itself, and where: the layers within it, its variables and metrics."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.models.functional import Functional


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a layer holds itself, without what the layers within it hold.

    Args:
        in_order: layers of a functional or Sequential model, in the order of its graph.
        other_layers: that it knows of by its attributes alone.
        variables: each with the object that an attribute holds: itself, or the generator whose state it is.
        metrics: that it knows of by its attributes.
        attributes: by the `id` of an object, the attribute that holds it, with the place in lists and dictionaries.
        optimizers: that its attributes hold, each with the attribute, as above.
    """

    in_order: list[keras.layers.Layer]
    other_layers: list[keras.layers.Layer]
    variables: list[tuple[keras.Variable, Any]]
    metrics: list[keras.metrics.Metric]
    attributes: dict[int, str]
    optimizers: list[tuple[str, keras.optimizers.Optimizer]]


def parts_of(layer: keras.layers.Layer) -> Parts:
    """Returns what a layer holds itself.

    Keras 3.15: `Layer._layers`, `_trainable_variables`, `_non_trainable_variables`, `_seed_generators`, `_metrics`:
    what attributes hold, in the order in which they were set. That order may depend on the backend: on torch, models of
    KerasHub 0.32 set attributes past Keras before their graph is made. `Functional._operations`, whose order is that of
    the graph. No public way to see a layer's own ones.
    """
    in_order: list[Any] = []
    if isinstance(layer, Functional):
        in_order = [operation for operation in layer._operations if isinstance(operation, keras.layers.Layer)]
    elif isinstance(layer, keras.Sequential):
        in_order = layer.layers
    known = {id(one) for one in in_order}
    held = list(_held_by(layer))
    attributes: dict[int, str] = {}
    for path, value in held:
        attributes.setdefault(id(value), path)
    variables = [(one, one) for one in (*layer._trainable_variables, *layer._non_trainable_variables)]
    return Parts(
        in_order=in_order,
        other_layers=[one for one in layer._layers if id(one) not in known],
        variables=variables + [(generator.state, generator) for generator in layer._seed_generators],
        metrics=list(layer._metrics),
        attributes=attributes,
        optimizers=[(path, value) for path, value in held if isinstance(value, keras.optimizers.Optimizer)],
    )


def _held_by(layer: keras.layers.Layer) -> Iterator[tuple[str, Any]]:
    # On torch a module keeps the modules within it apart from its other attributes.
    values = {**vars(layer), **vars(layer).get("_modules", {})}
    for name in sorted(values.keys() - _bookkeeping(), key=lambda name: (name.startswith("_"), name)):
        if not name.startswith("_self_"):  # TensorFlow's bookkeeping
            yield from _within(name, values[name], ())


def _within(path: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yields a value, or what lists and dictionaries hold at any depth; not sets, whose order is that of memory."""
    if not isinstance(value, (list, tuple, dict)):
        yield path, value
    elif id(value) not in above:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _within(f"{path}.{name}", inner, (*above, id(value)))


@functools.cache
def _bookkeeping() -> frozenset[str]:
    """Returns the attributes that every layer has, and those in which models keep their graph."""
    of_models = ("_functional", "_modules", "_operations", "_torch_params", "nnx_operations")
    return frozenset({*dir(keras.layers.Layer()), *of_models})
