"""Names the variables of models and optimizers in the same way on every backend, and describes Keras objects."""

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
    """Names of the layers, variables, metrics and optimizers of a model. The names are the same on every backend.

    Each name is a path of layer names, from the outermost layer to the innermost one.

    Args:
        layers: names and layers of the model. The model itself is not included.
        variables: name of each variable, by `id` of the variable.
        metrics: name of each metric that is an attribute of a layer, by `id` of the metric.
        optimizers: names and optimizers that are attributes of a layer. The optimizer of `compile` is not included.
    """

    layers: list[tuple[str, keras.layers.Layer]]
    variables: dict[int, str]
    metrics: dict[int, str]
    optimizers: list[tuple[str, keras.optimizers.Optimizer]]


def names_in(model: keras.Model) -> Names:
    """Names the layers, variables and metrics of a model.

    A name contains the names of the enclosing layers, without the counters that Keras appends to instance names. If
    two objects in a layer have the same name, their position in the graph or the name of their attribute is appended.
    A shared layer can be reached on several paths. Its name is the path through the graph if there is one; otherwise
    the shortest path; among paths of the same length the alphabetically first one. Objects that are in no graph and no
    attribute may have the same name.
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
    """Returns the names and the variables of a group of variables. Each name begins with the name of the group.

    Args:
        model: a built model. For all groups except `"model"`, the model must be compiled, too.
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
    """Returns whether a name of `named` is ambiguous, because several variables would have the same name."""
    return re.search(rf" \{_UNSURE}\d+$", name) is not None


def _without_numbers(name: str) -> str:
    """Returns a name without the counters that Keras appends to instance names."""
    return re.sub(r"_\d+(?=$|/|_)", "", name)


def _numbers(names: list[str]) -> Iterator[int | None]:
    """Yields a number for each name: 0, 1, ... for names that occur several times, None for names that occur once."""
    counts = collections.Counter(names)
    numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    for name in names:
        yield next(numbers[name]) if counts[name] > 1 else None


def _numbered(things: Sequence[Any], attributes: Sequence[str | None] | None = None) -> list[str]:
    """Returns unique names of layers or variables: names that occur several times get an attribute or a counter.

    Args:
        things: layers or variables.
        attributes: name of the attribute that holds each layer or variable; None if no attribute holds it.
    """
    names = [_without_numbers(thing.name) for thing in things]
    marks = attributes or [None] * len(names)
    return [
        name if number is None else f"{name}.{number if mark is None else mark}"
        for name, number, mark in zip(names, _numbers(names), marks)
    ]


def _ways(parts: Parts) -> Iterator[tuple[bool, bool, str, keras.layers.Layer]]:
    """Yields the direct sublayers of a layer.

    Yields:
        A tuple for each sublayer: whether it is in no graph and no attribute of the layer; whether it is outside the
            graph of the layer; its name; the sublayer.
    """
    for label, layer in zip(_numbered(parts.in_order), parts.in_order):
        yield False, False, label, layer
    for layer in parts.other_layers:
        where, name = parts.attributes.get(id(layer)), _without_numbers(layer.name)
        yield where is None, bool(parts.in_order), name if where is None else f"{name}.{where}", layer


def _named_metrics(model: keras.Model, names: Names) -> list[tuple[str, Any]]:
    """Returns the names and the variables of all metrics of a model.

    If a layer holds a metric, the metric is named after the layer. All other metrics have their Keras name, with a
    counter if several metrics have the same name.
    """
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
    """Returns the names and the variables of an optimizer. A slot variable is named after the weight of the slot.

    For the group `"loss_scale"`, the function returns only the variables of the loss scale.
    """
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
    """Returns a text with the class and the arguments of a Keras object; only the class if the object has no config.

    Args:
        thing: a Keras object, a string, or a dictionary, list or tuple of these.
        without: names of arguments to leave out.
    """
    if isinstance(thing, (dict, list, tuple)):
        return json.dumps(keras.tree.flatten(keras.tree.map_structure(in_words, thing)))
    arguments = {name: value for name, value in arguments_of(thing).items() if name not in without}
    name = thing if isinstance(thing, str) else getattr(thing, "__name__", type(thing).__name__)
    return f"{name} {json.dumps(comparable(arguments), sort_keys=True)}"


def arguments_of(thing: Any) -> dict[str, Any]:
    """Returns the config of a Keras object. It is empty if the object has no config, like some custom layers."""
    try:
        return getattr(thing, "get_config", dict)()
    except NotImplementedError:  # Keras raises this error if a class has no `get_config`
        return {}


def comparable(value: Any) -> Any:
    """Converts a config to JSON types, without entries that depend on the precision, the process or the backend.

    Args:
        value: a config, or a value in a config.
    """
    if isinstance(value, dict):
        if value.keys() == {"code", "defaults", "closure"} or isinstance(value.get("value"), tuple):
            return "lambda"  # as Keras (3.15) writes it: code with the file and line where it stands
        return {str(name): comparable(part) for name, part in value.items() if name not in _SKIPPED}
    if isinstance(value, (list, tuple)):
        return [comparable(part) for part in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
