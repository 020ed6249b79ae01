"""Names the variables of models and optimizers the same on every backend, and describes Keras objects as text."""

import collections
import dataclasses
import heapq
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from kerasdp.keras_compat.layers import Parts, parts_of
from kerasdp.keras_compat.models import compiled_metrics, made_by_compile
from kerasdp.keras_compat.optimizers import inner_optimizer, slots_by_weight

GROUPS = ("model", "optimizer", "loss_scale", "optimizers", "metrics")
# What stands behind the names of variables that cannot be told apart.
_UNSURE = "?"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """Names of the parts of a model, the same on every backend. Each name is a path from the model down.

    Args:
        layers: all layers except the model itself, with their names.
        variables: name of each variable, by `id`.
        metrics: name of each metric that is an attribute of a layer, by `id`.
        optimizers: optimizers that are attributes of a layer, with their names, without the optimizer of `compile`.
    """

    layers: list[tuple[str, keras.layers.Layer]]
    variables: dict[int, str]
    metrics: dict[int, str]
    optimizers: list[tuple[str, keras.optimizers.Optimizer]]


def names_in(model: keras.Model) -> Names:
    """Names the layers, variables and metrics of a model.

    A name contains the names of the layers above it, without the counters that Keras appends to instance names. If two
    parts of a layer share a name, their position in the graph or their attribute is added. A shared layer can be
    reached on several paths. The path through the graph is used, then the shortest, then the alphabetically first.
    Parts that are in no graph and no attribute may share a name.
    """
    names = Names(layers=[], variables={}, metrics={}, optimizers=[])
    of_compile = getattr(model, "optimizer", None)
    seen: set[int] = {id(of_compile), id(inner_optimizer(of_compile))}
    numbers = itertools.count()
    # (Ways without a place, ways by an attribute past a graph), length, path, and a number that decides between equals.
    heap: list[tuple[tuple[int, int], int, tuple[str, ...], int, keras.layers.Layer]] = []
    heap.append(((0, 0), 0, (), next(numbers), model))
    while heap:
        (hidden, outside), depth, path, _, layer = heapq.heappop(heap)
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        parts = parts_of(layer)
        has_new = any(id(variable) not in names.variables for variable, _ in parts.variables)
        # A layer that no graph calls may be known on one backend only, unless it brings variables.
        if layer is not model and (has_new or not (hidden or outside)):
            names.layers.append(("/".join(path), layer))
        own = [variable for variable, _ in parts.variables]
        labels = _numbered(own, [parts.attributes.get(id(holder)) for _, holder in parts.variables])
        for label, variable in zip(labels, own):
            names.variables.setdefault(id(variable), "/".join((*path, label)))
        for metric in parts.metrics:
            where = parts.attributes.get(id(metric), _without_numbers(metric.name))
            names.metrics.setdefault(id(metric), "/".join((*path, where)))
        for where, optimizer in parts.optimizers:
            if id(optimizer) not in seen:
                seen |= {id(optimizer), id(inner_optimizer(optimizer))}
                names.optimizers.append(("/".join((*path, where)), optimizer))
        for is_hidden, is_outside, label, child in _ways(parts):
            rank = hidden + is_hidden, outside + is_outside
            heapq.heappush(heap, (rank, depth + 1, (*path, label), next(numbers), child))
    return names


def named(model: keras.Model, group: str) -> list[tuple[str, Any]]:
    """Returns the variables of a group with their names. Each name begins with the name of the group.

    Args:
        model: a built model; for groups other than `"model"`, also compiled.
        group: one of `GROUPS`.
    """
    names = names_in(model)
    if group == "model":
        # On jax a model holds the variables of its optimizers, too.
        apart = {id(variable) for _, optimizer in names.optimizers for variable in optimizer.variables}
        own = [variable for variable in model.variables if id(variable) not in apart]
        pairs = [(names.variables[id(variable)], variable) for variable in own]
    elif group == "optimizers":
        pairs = [
            (f"{where}/{name}", variable)
            for where, optimizer in names.optimizers
            for part in ("optimizer", "loss_scale")
            for name, variable in _named_in_optimizer(optimizer, names, part)
        ]
    elif group == "metrics":
        pairs = _named_metrics(model, names)
    else:
        pairs = _named_in_optimizer(getattr(model, "optimizer", None), names, group)
    marks = ("" if number is None else f" {_UNSURE}{number}" for number in _numbers([name for name, _ in pairs]))
    return [(f"{group}/{name}{mark}", variable) for (name, variable), mark in zip(pairs, marks)]


def is_unsure(name: str) -> bool:
    """Returns whether several variables share this name, so that they cannot be distinguished."""
    return re.search(rf" \{_UNSURE}\d+$", name) is not None


def _without_numbers(name: str) -> str:
    """Returns a name without the counters that Keras appends to instance names."""
    return re.sub(r"_\d+(?=$|/|_)", "", name)


def _numbers(names: list[str]) -> Iterator[int | None]:
    """Yields for each name a counter from 0 among equal names; None if the name is unique."""
    counts = collections.Counter(names)
    numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    for name in names:
        yield next(numbers[name]) if counts[name] > 1 else None


def _numbered(things: Sequence[Any], attributes: Sequence[str | None] | None = None) -> list[str]:
    """Returns the names of layers or variables. Names that occur several times get their attribute or a counter."""
    names = [_without_numbers(thing.name) for thing in things]
    marks = attributes or [None] * len(names)
    return [
        name if number is None else f"{name}.{number if mark is None else mark}"
        for name, number, mark in zip(names, _numbers(names), marks)
    ]


def _ways(parts: Parts) -> Iterator[tuple[bool, bool, str, keras.layers.Layer]]:
    """Yields the layers directly in a layer.

    Yields:
        A tuple for each layer: whether it has no attribute and no place in the graph, whether it is outside the graph,
            its name, and the layer.
    """
    for label, layer in zip(_numbered(parts.in_order), parts.in_order):
        yield False, False, label, layer
    for layer in parts.other_layers:
        where, name = parts.attributes.get(id(layer)), _without_numbers(layer.name)
        yield where is None, bool(parts.in_order), name if where is None else f"{name}.{where}", layer


def _named_metrics(model: keras.Model, names: Names) -> list[tuple[str, Any]]:
    """Names metrics by the layer that holds them, and other metrics by their name, with a counter if not unique."""
    _, of_compile = made_by_compile(model)
    held: list[tuple[str, Any]] = []
    others: list[tuple[str, Any]] = []
    for metric in {id(metric): metric for metric in model.metrics}.values():  # of inner layers Keras has some twice
        if metric is of_compile:
            others += [(f"compiled/{_without_numbers(name)}", each) for name, each in compiled_metrics(model)]
        elif id(metric) in names.metrics:
            held.append((names.metrics[id(metric)], metric))
        else:
            others.append((f"tracked/{_without_numbers(metric.name)}", metric))
    pairs: dict[int, tuple[str, Any]] = {}
    numbers = _numbers([name for name, _ in others])
    named_others = [
        (name if number is None else f"{name}.{number}", each) for (name, each), number in zip(others, numbers)
    ]
    for name, metric in held + named_others:
        for label, variable in zip(_numbered(metric.variables), metric.variables):
            pairs.setdefault(id(variable), (f"{name}/{label}", variable))
    return list(pairs.values())


def _named_in_optimizer(optimizer: Any, names: Names, group: str) -> list[tuple[str, Any]]:
    """Names the optimizer's slot variables after their weight, and its other variables by their names."""
    if optimizer is None:
        return []
    inner = inner_optimizer(optimizer)
    if group == "loss_scale":
        known = {id(variable) for variable in inner.variables}
        rest = [variable for variable in optimizer.variables if id(variable) not in known]
        return list(zip(_numbered(rest), rest))
    slots = slots_by_weight(inner)
    rest = [variable for variable in inner.variables if id(variable) not in slots]
    pairs = dict(zip(map(id, rest), zip(_numbered(rest), rest)))
    for variable in inner.variables:
        if id(variable) in slots:
            kind, weight = slots[id(variable)]
            name = names.variables.get(id(weight)) or _without_numbers(weight.path)
            pairs[id(variable)] = f"{kind} {name}", variable
    return list(pairs.values())


# What depends on precision, process and backend.
_SKIPPED = ("name", "dtype", "seed", "module", "registered_name", "build_config", "trainable")


def in_words(thing: Any, without: tuple[str, ...] = ()) -> str:
    """Describes a Keras object by its class and arguments; only by its class if it has no config."""
    if isinstance(thing, (dict, list, tuple)):
        return json.dumps(keras.tree.flatten(keras.tree.map_structure(in_words, thing)))
    arguments = {name: value for name, value in arguments_of(thing).items() if name not in without}
    name = thing if isinstance(thing, str) else getattr(thing, "__name__", type(thing).__name__)
    return f"{name} {json.dumps(comparable(arguments), sort_keys=True)}"


def arguments_of(thing: Any) -> dict[str, Any]:
    """Returns the arguments of a Keras object; empty if it has no config. Some user-defined layers have none."""
    try:
        return getattr(thing, "get_config", dict)()
    except NotImplementedError:  # what Keras raises where a class has none of its own
        return {}


def comparable(value: Any) -> Any:
    """Returns a config as JSON can hold it, without values that depend on precision, process or backend.

    Args:
        value: a config, or a part of one.
    """
    if isinstance(value, dict):
        if value.keys() == {"code", "defaults", "closure"} or isinstance(value.get("value"), tuple):
            return "lambda"  # as Keras (3.15) writes it: code with the file and line where it stands
        return {str(name): comparable(part) for name, part in value.items() if name not in _SKIPPED}
    if isinstance(value, (list, tuple)):
        return [comparable(part) for part in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
