"""Cuts a functional Keras model into stages, a batch into micro-batches, and says what a pipeline refuses.

The stages have about equally many weights, and share the model's layers.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import has_mask
from kerasdp.keras_compat.models import (
    as_functional,
    calls,
    distinct_names,
    input_conversions,
    inputs_structure,
    is_called_as_keras_does,
    outputs_structure,
)
from kerasdp.keras_compat.optimizers import inner_optimizer
from kerasdp.reporting.report import in_columns
from kerasdp.step.custom_steps import refuse_next_values
from kerasdp.step.global_batch import shares_of

__all__ = ["Stage", "split", "table"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a model.

    Args:
        model: functional; its inputs are the tensors that the stage before gives (of the first one: the whole model's
            inputs), its outputs those that the next one takes (of the last one: the whole model's outputs). Its layers
            are those of the whole model, so that their weights are, too.
        layers: names, in the order of their work; of those in a model within the model, after its name and `/`.
        share: of the cost of the whole model, from 0 to 1.
        num_bytes: of the tensors that go to the next stage, for a sample; 0 for the last stage.
    """

    model: keras.Model
    layers: list[str]
    share: float
    num_bytes: int

    def __call__(self, inputs: list[Any], training: bool = False) -> list[Any]:
        """Computes the outputs, for a list of inputs."""
        # Keras takes a list of one tensor, but gives the tensor.
        return keras.tree.flatten(self.model(inputs, training=training))

    def input_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the inputs, for a sample."""
        return [tuple(tensor.shape[1:]) for tensor in self.model.inputs]

    def output_shapes(self, num_rows: int) -> list[tuple[int, ...]]:
        """Returns the shapes of the outputs, for a sample."""
        inputs = [
            keras.KerasTensor((num_rows, *shape), tensor.dtype)
            for shape, tensor in zip(self.input_shapes(), self.model.inputs)
        ]
        outputs = keras.tree.flatten(self.model.compute_output_spec(inputs))
        return [tuple(output.shape[1:]) for output in outputs]


def split(model: keras.Model, num_stages: int = 2, *, cut_at: list[str] | None = None) -> list[Stage]:
    """Cuts a model into stages.

    A cut may be between any two layers: several tensors may cross it, and a tensor may pass through a stage that does
    not use it. Not cut are layers with weights that are used on both sides, and tensors that carry a mask.

    Args:
        model: functional or Sequential, built. Such models within it are cut, too, but for those that are called
            more than once, get a mask, or have a `call` of their own.
        num_stages: if `cut_at` is not given.
        cut_at: names of the layers after which to cut, in their order; `backbone/block_3` is in the model `backbone`.

    Returns:
        The stages in their order.

    Raises:
        UserError: if the model cannot be cut into so many stages, or not there.
    """
    graph = Graph(functional(model))
    costs = graph.costs()
    if cut_at is None:
        places = _balanced(graph, costs, num_stages)
    else:
        places = [graph.place_after(name) for name in cut_at]
        if places != sorted(set(places)):
            raise UserError(f"--cut_at: expected layers in the order of their work. Received: {', '.join(cut_at)}")
    bounds = [0, *places, len(graph.calls)]
    total = sum(costs) or 1.0
    names = [call.name for call in graph.calls]
    return [
        Stage(
            model=graph.stage(start, end, f"stage_{number}"),
            layers=names[start:end],
            share=sum(costs[start:end]) / total,
            num_bytes=graph.num_bytes(end) if end < len(names) else 0,
        )
        for number, (start, end) in enumerate(zip(bounds, bounds[1:]))
    ]


def table(stages: list[Stage]) -> str:
    """Formats a table of what each stage holds and sends."""
    rows = [["stage", "layers", "number", "parameters", "share", "tensors out", "bytes per sample"]]
    for number, stage in enumerate(stages):
        names = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} ... {stage.layers[-1]}"
        rows.append([
            str(number), names, str(len(stage.layers)), f"{stage.model.count_params():,}", f"{stage.share:.0%}",
            str(len(stage.model.outputs)), f"{stage.num_bytes:,}" if stage.num_bytes else "-",
        ])  # fmt: skip
    return in_columns(rows, right=(0, 2, 3, 4, 5, 6))


def functional(model: keras.Model) -> keras.Model:
    """Returns the model, or the functional one in a Sequential.

    Raises:
        UserError: if it is neither.
    """
    known = as_functional(model)
    if known is None:
        raise UserError(
            "a pipeline needs a model whose layers are known: functional, or Sequential with an Input. Received: "
            f"{type(model).__name__} {model.name!r}"
        )
    return known


class Graph:
    """The calls of a functional model's layers in an order in which they can be made.

    A model within it, at any depth, is replaced by its own calls. It stays one call if it is not functional or
    Sequential, has a `call` of its own or weights that its layers do not have, is called more than once, gets a mask,
    or gets its tensors in another structure than it was built with.

    Attributes:
        calls: in that order.
    """

    def __init__(self, model: keras.Model):
        keys = itertools.count()
        self._inputs = {next(keys): tensor for tensor in model.inputs}
        scope: _Scope = {id(tensor): (key, ()) for key, tensor in self._inputs.items()}
        counts = collections.Counter(id(node.operation) for node in _all_nodes(model))
        self.calls = list(_calls(model, scope, keys, "", counts))
        self._outputs = [scope[id(tensor)][0] for tensor in model.outputs]
        self._tensors = dict(self._inputs)
        made = dict.fromkeys(self._tensors, 0)
        for place, call in enumerate(self.calls):
            self._tensors |= call.outputs
            made |= dict.fromkeys(call.outputs, place + 1)
        # For each tensor: after how many calls it exists, and until how many it is needed.
        self._spans: dict[int, tuple[int, int]] = dict.fromkeys(made, (0, 0))
        uses = [(key, place) for place, call in enumerate(self.calls) for key, _ in call.inputs.values()]
        uses += [(key, len(self.calls)) for key in self._outputs]
        for key, place in uses:
            self._spans[key] = made[key], max(place, self._spans[key][1])

    def crossing(self, place: int) -> dict[int, Any]:
        """Returns the tensors that are made before a place, and used after it, by key."""
        return {key: self._tensors[key] for key, (made, used) in self._spans.items() if made <= place <= used}

    def num_bytes(self, place: int) -> int:
        """Returns the bytes of the tensors that cross a place, for a sample."""
        tensors = self.crossing(place).values()
        sizes = [2 if tensor.dtype == "bfloat16" else np.dtype(tensor.dtype).itemsize for tensor in tensors]
        counts = [int(np.prod([size or 1 for size in tensor.shape[1:]])) for tensor in tensors]
        return sum(count * size for count, size in zip(counts, sizes))

    def why_not(self, place: int) -> str:
        """Returns why the model cannot be cut at a place; empty if it can."""

        def holders(made: list[Call]) -> dict[int, str]:
            return {id(variable): call.name for call in made for variable in getattr(call.operation, "variables", [])}

        before, after = holders(self.calls[:place]), holders(self.calls[place:])
        for variable in before.keys() & after.keys():
            if before[variable] == after[variable]:
                return f"layer {before[variable]} has weights and is used on both sides"
            return f"layers {before[variable]} and {after[variable]}, on both sides, share weights"
        if any(has_mask(tensor) for tensor in self.crossing(place).values()):
            return "a tensor with a mask would cross it, and lose the mask"
        return ""

    def places(self) -> list[int]:
        """Returns where the model can be cut: after how many calls."""
        return [place for place in range(1, len(self.calls)) if not self.why_not(place)]

    def place_after(self, name: str) -> int:
        """Returns the place after the last call of a layer, or of the last one in a model.

        The models that it is in may be left out of its name, if there is one such layer.
        """
        names = [call.name for call in self.calls]
        longer = {known for known in names if known.endswith(f"/{name}")}
        if name not in names and len(longer) == 1:
            (name,) = longer
        found = [place + 1 for place, known in enumerate(names) if known == name or known.startswith(f"{name}/")]
        if not found:
            raise UserError(f"--cut_at: expected names of layers. Received: {name!r}; they are {', '.join(names)}")
        reason = "nothing would be left after it" if found[-1] == len(names) else self.why_not(found[-1])
        if reason:
            raise UserError(f"--cut_at: the model cannot be cut after {name}: {reason}")
        return found[-1]

    def stage(self, start: int, end: int, name: str) -> keras.Model:
        """Builds a model of the calls from one place to another, by calling the layers again on new inputs."""
        incoming = self._inputs if start == 0 else self.crossing(start)
        known = {key: keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype) for key, tensor in incoming.items()}
        inputs = list(known.values())
        for call in self.calls[start:end]:
            call.run(known)
        outgoing = self._outputs if end == len(self.calls) else self.crossing(end)
        with distinct_names(call.operation for call in self.calls[start:end]):
            return keras.Model(inputs, [known[key] for key in outgoing], name=name)

    def costs(self) -> list[float]:
        """Returns the cost of each call: numbers in its weights."""
        counted: set[int] = set()
        costs = []
        for operation in (call.operation for call in self.calls):
            # Weights of a layer that is called twice are there once.
            weights = [] if id(operation) in counted else getattr(operation, "weights", [])
            costs.append(float(sum(int(np.prod(weight.shape)) for weight in weights)))
            counted.add(id(operation))
        return costs


def _balanced(graph: Graph, costs: list[float], num_stages: int) -> list[int]:
    """Finds the places where the costliest stage costs least; among nearly equal ones, with the fewest bytes."""
    places = graph.places()
    if num_stages < 1 or num_stages - 1 > len(places):
        raise UserError(
            f"--gpus: expected from 1 to {len(places) + 1}, the most stages that this model has. Received: {num_stages}"
        )
    done = np.concatenate([[0.0], np.cumsum(costs)]) / (sum(costs) or 1.0)
    sizes = {place: graph.num_bytes(place) for place in places}
    # Reached with so many cuts, the last at a place: (share of the costliest stage, in hundredths, so that what is
    # nearly equal is equal; bytes over all cuts; the cuts).
    best: dict[int, tuple[float, int, list[int]]] = {0: (0.0, 0, [])}
    for _ in range(num_stages - 1):
        best = {
            place: min(
                (max(worst, round(done[place] - done[last], 2)), num_bytes + sizes[place], [*cuts, place])
                for last, (worst, num_bytes, cuts) in best.items()
                if last < place
            )
            for place in places
            if any(last < place for last in best)
        }
    return min(
        (max(worst, round(1.0 - done[last], 2)), num_bytes, cuts) for last, (worst, num_bytes, cuts) in best.items()
    )[2]


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


# For each symbolic tensor in a model, by `id`: the key of its value and the types to which that is converted.
_Scope = dict[int, tuple[int, tuple[str, ...]]]


def _calls(
    model: keras.Model, scope: _Scope, keys: Iterator[int], prefix: str, counts: collections.Counter[int]
) -> Iterator[Call]:
    for node in calls(model) or []:  # a functional model's are known
        operation, name = node.operation, f"{prefix}{node.operation.name}"
        inner = None if counts[id(operation)] > 1 else as_functional(operation)
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
    keys = [each.keys() if isinstance(each, dict) else None for each in (structure, given)]
    if keys[0] != keys[1]:
        return None
    flat = keras.tree.flatten(given)
    if len(flat) != len(inner.inputs) or any(
        not isinstance(outer, keras.KerasTensor) or has_mask(outer) or len(outer.shape) != len(tensor.shape)
        for outer, tensor in zip(flat, inner.inputs)
    ):
        return None
    return flat


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How a global batch is cut into micro-batches.

    Args:
        num_rows: of the global batch.
        size: rows of a micro-batch; the last one may have fewer.
    """

    num_rows: int
    size: int

    def __len__(self) -> int:
        return -(-self.num_rows // self.size)

    def rows(self, number: int) -> slice:
        """Returns the rows of one of them."""
        return slice(number * self.size, min((number + 1) * self.size, self.num_rows))

    def num_rows_of(self, number: int) -> int:
        """Returns how many rows one of them has."""
        rows = self.rows(number)
        return rows.stop - rows.start

    def shares(self, model: keras.Model, *, is_weighted: bool) -> list[float]:
        """Returns the weight of each micro-batch's loss in the loss of the global batch.

        Args:
            model: compiled, and its losses built.
            is_weighted: whether the samples have weights.

        Raises:
            UserError: if the loss of the global batch is no sum over the micro-batches.
        """
        counts = [self.num_rows_of(number) for number in range(len(self))]
        instead = f"use --strategy=data, or --split_size={self.num_rows}, with which the stages work in turn"
        return [1.0] if len(self) == 1 else shares_of(model, counts, is_weighted=is_weighted, instead=instead)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is trained as a pipeline.

    Args:
        model: functional.
        stages: of the model.
        size: rows of a micro-batch.
    """

    model: keras.Model
    stages: list[Stage]
    size: int

    def micro_batches(self, num_rows: int) -> MicroBatches:
        """Of a global batch of `num_rows` rows."""
        return MicroBatches(num_rows=num_rows, size=self.size)

    def inputs(self, inputs: Any) -> list[Any]:
        """Returns the inputs of the first stage, in its order, from what `fit` takes."""
        structure = inputs_structure(self.model)
        if isinstance(inputs, dict) and isinstance(structure, dict):
            inputs = {name: inputs[name] for name in structure}
        elif isinstance(inputs, dict):
            inputs = [inputs[tensor.name] for tensor in self.model.inputs]
        return keras.tree.flatten(inputs)

    def outputs(self, outputs: list[Any]) -> Any:
        """Returns what the model returns, from what the last stage returns."""
        packed = keras.tree.pack_sequence_as(outputs_structure(self.model), outputs)
        return packed[0] if isinstance(packed, (list, tuple)) and len(packed) == 1 else packed  # as Keras does

    def __str__(self) -> str:
        return f"{table(self.stages)}\nmicro-batches of {self.size}"


def make_plan(model: keras.Model, config: Config, num_devices: int) -> Plan:
    """Cuts a built model as a run's choices say.

    Args:
        model: functional.
        config: of the run.
        num_devices: of the run.

    Raises:
        UserError: if that cannot be done.
    """
    _check(model)
    refuse_next_values(model, "a pipeline", "use --strategy=data")
    inner = inner_optimizer(getattr(model, "optimizer", None))
    if inner and inner.global_clipnorm and inner.gradient_accumulation_steps:
        raise UserError(
            "a pipeline clips the gradients of each step, and would not clip what gradient_accumulation_steps has "
            "accumulated; use a larger --batch_size instead, or clipnorm"
        )
    cut_at = None if config.cut_at is None else [name.strip() for name in config.cut_at.split(",")]
    stages = split(model, num_devices, cut_at=cut_at)
    if any(has_mask(tensor) for tensor in stages[-1].model.outputs):
        raise UserError(f"a pipeline: the outputs of {model.name} carry a mask, which its micro-batches would lose")
    plan = Plan(model=functional(model), stages=stages, size=0)
    return with_rows(plan, config, config.batch_size)


def with_rows(plan: Plan, config: Config, num_rows: int) -> Plan:
    """Returns the plan for batches of `num_rows` rows, whatever `config.batch_size` is.

    Raises:
        UserError: if they cannot be cut into micro-batches as the configuration says.
    """
    size = config.split_size or -(-num_rows // min(2 * len(plan.stages), num_rows))
    if size > num_rows:
        raise UserError(f"--split_size: expected at most {num_rows}, a batch's samples. Received: {size}")
    return dataclasses.replace(plan, size=size)


def _check(model: keras.Model) -> None:
    for tensor in functional(model).inputs:
        if None in tensor.shape[1:]:
            raise UserError(
                f"a pipeline: expected inputs of known shape. Received: {tensor.name} with {tuple(tensor.shape)}; give "
                "keras.Input all sizes but that of the batch"
            )
    names = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
    own = [name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)]
    if own:
        raise UserError(
            f"a pipeline calls the layers of a model directly, and so never calls the {own[0]} of "
            f"{type(model).__name__}; use --strategy=data"
        )
