"""Cuts a functional Keras model into stages with about equally many weights. The stages share the model's layers."""

import dataclasses
from typing import Any

import keras
import numpy as np

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import has_mask
from kerasdp.keras_compat.models import as_functional, distinct_names
from kerasdp.pipeline.graph import Call, Graph, graph_of
from kerasdp.reporting.report import in_columns

# From this share of the cost on, in one of several stages, the run says why.
_HOPELESS = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a model.

    Args:
        model: functional; its inputs are the tensors that the stage before gives (of the first one: the whole model's
            inputs), its outputs those that the next one takes (of the last one: the whole model's outputs). Its layers
            are those of the whole model, so that their weights are, too.
        layers: names, in the order of their work; of those in a model within the model, after its name and `/`.
        share: of the cost of the whole model, from 0 to 1.
        costliest: the layer that costs most, and its share of the cost of the whole model.
        num_bytes: of the tensors that go to the next stage, for a sample; 0 for the last stage.
    """

    model: keras.Model
    layers: list[str]
    share: float
    num_bytes: int
    costliest: tuple[str, float] = ("", 0.0)

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

    @property
    def num_parameters(self) -> int:
        """Returns how many numbers the weights of its layers hold."""
        return self.model.count_params()


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
    graph = _Graph(functional(model), is_opened=num_stages > 1 or cut_at is not None)
    costs = costs_of(graph.graph)
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
            costliest=max(zip(names[start:end], (cost / total for cost in costs[start:end])), key=lambda pair: pair[1]),
        )
        for number, (start, end) in enumerate(zip(bounds, bounds[1:]))
    ]


def table(stages: list[Stage]) -> str:
    """Formats a table of what each stage holds and sends."""
    rows = [["stage", "layers", "number", "parameters", "share", "tensors out", "bytes per sample"]]
    for number, stage in enumerate(stages):
        names = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} ... {stage.layers[-1]}"
        rows.append([
            str(number), names, str(len(stage.layers)), f"{stage.num_parameters:,}", f"{stage.share:.0%}",
            str(len(stage.model.outputs)), f"{stage.num_bytes:,}" if stage.num_bytes else "-",
        ])  # fmt: skip
    return in_columns(rows, right=(0, 2, 3, 4, 5, 6))


def imbalance(stages: list[Stage]) -> str:
    """Returns a line on a stage that has nearly all of the cost; empty if none has, or there is only one."""
    for number, stage in enumerate(stages):
        if len(stages) > 1 and stage.share > _HOPELESS:
            name, share = stage.costliest
            return (
                f"stage {number} has {stage.share:.0%} of the cost, and {name} in it {share:.0%}: the other stages "
                "hardly help; cut elsewhere, or give the model layers that can be cut apart (a layer is one piece, and "
                "so is a model that is not functional)"
            )
    return ""


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


class _Graph:
    """The calls of a model's layers in an order in which they can be made."""

    def __init__(self, model: keras.Model, *, is_opened: bool = True):
        self.graph = graph_of(model, is_opened=is_opened)
        self.calls: list[Call] = self.graph.calls
        self._tensors = dict(self.graph.inputs)
        made = dict.fromkeys(self._tensors, 0)
        for place, call in enumerate(self.calls):
            self._tensors |= call.outputs
            made |= dict.fromkeys(call.outputs, place + 1)
        # For each tensor: after how many calls it exists, and until how many it is needed.
        self._spans: dict[int, tuple[int, int]] = dict.fromkeys(made, (0, 0))
        uses = [(key, place) for place, call in enumerate(self.calls) for key, _ in call.inputs.values()]
        uses += [(key, len(self.calls)) for key in self.graph.outputs]
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
        incoming = self.graph.inputs if start == 0 else self.crossing(start)
        known = {key: keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype) for key, tensor in incoming.items()}
        inputs = list(known.values())
        for call in self.calls[start:end]:
            call.run(known)
        outgoing = self.graph.outputs if end == len(self.calls) else self.crossing(end)
        with distinct_names(call.operation for call in self.calls[start:end]):
            return keras.Model(inputs, [known[key] for key in outgoing], name=name)


def _balanced(graph: _Graph, costs: list[float], num_stages: int) -> list[int]:
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


def costs_of(graph: Graph) -> list[float]:
    """Returns the cost of each call: numbers in its weights."""
    counted: set[int] = set()
    costs = []
    for operation in (call.operation for call in graph.calls):
        # Weights of a layer that is called twice are there once.
        weights = [] if id(operation) in counted else getattr(operation, "weights", [])
        costs.append(float(sum(int(np.prod(weight.shape)) for weight in weights)))
        counted.add(id(operation))
    return costs
