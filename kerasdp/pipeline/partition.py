"""Cuts a functional Keras model into stages, each a Keras model that shares its layers with the whole."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kerasdp.config.validation import BALANCES
from kerasdp.errors import UserError
from kerasdp.keras_compat import as_functional, calls, has_mask, outputs_structure
from kerasdp.pipeline.cost_model import costs_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a model.

    Args:
        model: functional; its inputs are the tensors that the stage before gives (of the first one: the whole model's
            inputs), its outputs those that the next one takes (of the last one: the whole model's outputs). Its layers
            are those of the whole model, so that their weights are, too.
        layers: names, in the order of their work.
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

    @property
    def num_parameters(self) -> int:
        """Returns how many numbers the weights of its layers hold."""
        return self.model.count_params()


def split(
    model: keras.Model,
    num_stages: int = 2,
    *,
    cut_at: list[str] | None = None,
    balance: str = "time",
    batch_size: int = 8,
    broadcast_from_rank0: Callable[[list[float]], list[float]] = lambda costs: costs,
) -> list[Stage]:
    """Cuts a model into stages.

    A cut may be between any two layers: several tensors may cross it, and a tensor may pass through a stage that does
    not use it. Not cut are layers with weights that are used on both sides, and tensors that carry a mask.

    Args:
        model: functional or Sequential, built; a model within it counts as one layer.
        num_stages: if `cut_at` is not given.
        cut_at: names of the layers after which to cut, in their order.
        balance: what is to be equal in all stages: `"time"`, measured here, `"flops"` or `"parameters"`.
        batch_size: samples with which the time is measured.
        broadcast_from_rank0: gives all ranks the costs that rank 0 measured.

    Returns:
        The stages in their order.

    Raises:
        UserError: if the model cannot be cut into so many stages, or not there.
    """
    if balance not in BALANCES:
        raise UserError(f"balance: expected one of {', '.join(BALANCES)}. Received: {balance!r}")
    graph = _Graph(functional(model))
    costs = broadcast_from_rank0(costs_of(graph.nodes, graph.inputs, balance, batch_size))
    if cut_at is None:
        places = _balanced(graph, costs, num_stages)
    else:
        places = [graph.place_after(name) for name in cut_at]
        if places != sorted(set(places)):
            raise UserError(f"--cut_at: expected layers in the order of their work. Received: {', '.join(cut_at)}")
    bounds = [0, *places, len(graph.nodes)]
    total = sum(costs) or 1.0
    return [
        Stage(
            model=graph.stage(start, end, f"stage_{number}"),
            layers=[node.operation.name for node in graph.nodes[start:end]],
            share=sum(costs[start:end]) / total,
            num_bytes=graph.num_bytes(end) if end < len(graph.nodes) else 0,
        )
        for number, (start, end) in enumerate(zip(bounds, bounds[1:]))
    ]


def table(stages: list[Stage]) -> str:
    """Formats a table of what each stage holds and sends."""
    rows = [("stage", "layers", "number", "parameters", "share", "tensors out", "bytes per sample")]
    for number, stage in enumerate(stages):
        names = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} ... {stage.layers[-1]}"
        rows.append((
            str(number), names, str(len(stage.layers)), f"{stage.num_parameters:,}", f"{stage.share:.0%}",
            str(len(stage.model.outputs)), f"{stage.num_bytes:,}" if stage.num_bytes else "-",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 1 else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    )  # fmt: skip


def functional(model: keras.Model, user: str = "a pipeline") -> keras.Model:
    """Returns the model, or the functional one in a Sequential; `user` names, in the error, what needs it.

    Raises:
        UserError: if it is neither.
    """
    known = as_functional(model)
    if known is None:
        raise UserError(
            f"{user} needs a model whose layers are known: functional, or Sequential with an Input. Received: "
            f"{type(model).__name__} {model.name!r}"
        )
    return known


class _Graph:
    """The calls of a model's layers in an order in which they can be made."""

    def __init__(self, model: keras.Model):
        self.inputs, self.outputs = model.inputs, model.outputs
        self.structure = outputs_structure(model)
        self.nodes = calls(model) or []  # a functional model's are known
        made = {id(tensor): 0 for tensor in self.inputs}
        for place, node in enumerate(self.nodes):
            made |= {id(tensor): place + 1 for tensor in node.outputs}
        # For each tensor: after how many calls it exists, and until how many it is needed.
        self._spans: dict[int, tuple[int, int]] = dict.fromkeys(made, (0, 0))
        self._tensors = {id(tensor): tensor for tensor in self.inputs}
        self._tensors |= {id(tensor): tensor for node in self.nodes for tensor in node.outputs}
        uses = [(tensor, place) for place, node in enumerate(self.nodes) for tensor in node.input_tensors]
        uses += [(tensor, len(self.nodes)) for tensor in self.outputs]
        for tensor, place in uses:
            self._spans[id(tensor)] = made[id(tensor)], max(place, self._spans[id(tensor)][1])

    def crossing(self, place: int) -> list[Any]:
        """Returns the tensors that are made before a place, and used after it."""
        return [self._tensors[key] for key, (made, used) in self._spans.items() if made <= place <= used]

    def num_bytes(self, place: int) -> int:
        """Returns the bytes of the tensors that cross a place, for a sample."""
        return sum(
            int(np.prod([size or 1 for size in tensor.shape[1:]])) * _item_size(tensor.dtype)
            for tensor in self.crossing(place)
        )

    def why_not(self, place: int) -> str:
        """Returns why the model cannot be cut at a place; empty if it can."""

        def holders(nodes: list[Any]) -> dict[int, str]:
            return {
                id(variable): node.operation.name
                for node in nodes
                for variable in getattr(node.operation, "variables", [])
            }

        before, after = holders(self.nodes[:place]), holders(self.nodes[place:])
        for variable in before.keys() & after.keys():
            if before[variable] == after[variable]:
                return f"layer {before[variable]} has weights and is used on both sides"
            return f"layers {before[variable]} and {after[variable]}, on both sides, share weights"
        if any(has_mask(tensor) for tensor in self.crossing(place)):
            return "a tensor with a mask would cross it, and lose the mask"
        return ""

    def places(self) -> list[int]:
        """Returns where the model can be cut: after how many calls."""
        return [place for place in range(1, len(self.nodes)) if not self.why_not(place)]

    def place_after(self, name: str) -> int:
        """Returns the place after the last call of a layer."""
        names = [node.operation.name for node in self.nodes]
        if name not in names:
            raise UserError(f"--cut_at: expected names of layers. Received: {name!r}; they are {', '.join(names)}")
        place = len(names) - names[::-1].index(name)
        reason = "nothing would be left after it" if place == len(names) else self.why_not(place)
        if reason:
            raise UserError(f"--cut_at: the model cannot be cut after {name}: {reason}")
        return place

    def stage(self, start: int, end: int, name: str) -> keras.Model:
        """Builds a model of the calls from one place to another, by calling the layers again on new inputs."""
        incoming = self.inputs if start == 0 else self.crossing(start)
        inputs = [keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype) for tensor in incoming]
        known = {id(tensor): value for tensor, value in zip(incoming, inputs)}
        for node in self.nodes[start:end]:
            args, kwargs = node.arguments.fill_in(known)
            outputs = node.operation(*args, **kwargs)
            known |= {id(tensor): value for tensor, value in zip(node.outputs, keras.tree.flatten(outputs))}
        outgoing = self.outputs if end == len(self.nodes) else self.crossing(end)
        return keras.Model(inputs, [known[id(tensor)] for tensor in outgoing], name=name)


def _balanced(graph: _Graph, costs: list[float], num_stages: int) -> list[int]:
    """Finds the places where the costliest stage costs least; among nearly equal ones, with the fewest bytes."""
    places = graph.places()
    if num_stages < 1 or num_stages - 1 > len(places):
        raise UserError(
            f"--stages: expected from 1 to {len(places) + 1}, the most that this model has. Received: {num_stages}"
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


def _item_size(dtype: str) -> int:
    return {"bool": 1, "bfloat16": 2}.get(dtype) or np.dtype(dtype).itemsize
