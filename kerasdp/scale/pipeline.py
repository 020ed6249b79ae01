"""Cuts a functional Keras model into stages with about equally many weights.

A run with `strategy="pipeline"` (torch) trains the model in these stages.

Example:
    ```python
    import keras
    import kerasdp

    layers = [keras.layers.Dense(16, name=f"dense{number}") for number in range(4)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    stages = kerasdp.pipeline.split(model, 2)
    print(kerasdp.pipeline.table(stages))
    ```
"""

import dataclasses
from typing import Any

import keras
import numpy as np

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import all_layers, has_mask
from kerasdp.keras_compat.models import as_functional, calls, inputs_structure, outputs_structure
from kerasdp.keras_compat.optimizers import inner_optimizer
from kerasdp.reporting.report import in_columns
from kerasdp.sharding import bytes_of_row
from kerasdp.step.custom_steps import refuse_next_values

__all__ = ["Stage", "split", "table"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Holds one stage of a model that `split` has cut. A call takes a list of inputs, and returns a list of outputs.

    Args:
        model: a functional model with the layers of this stage. It shares these layers and their weights with the whole
            model. Its inputs are the outputs of the previous stage. The inputs of the first stage are the inputs of the
            whole model.
        layers: names of the layers, in the order of their calls.
        share: the stage's fraction of the weights of the whole model, from 0 to 1.
        num_bytes: number of bytes that the stage sends to the next stage for one sample; 0 for the last stage.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        layers = [keras.layers.Dense(16, name=f"dense{number}") for number in range(4)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        first, second = kerasdp.pipeline.split(model, 2)
        print(first.layers, first.share)  # ["dense0", "dense1"] 0.5
        (outputs,) = second(first([np.random.rand(64, 16)]))  # the same as model(...)
        ```
    """

    model: keras.Model
    layers: list[str]
    share: float
    num_bytes: int

    def __call__(self, inputs: list[Any], training: bool = False) -> list[Any]:
        """Computes the outputs of the stage.

        Args:
            inputs: a list of tensors, the outputs of the previous stage.
            training: whether the layers run in training mode, as for a Keras model.

        Returns:
            A list of tensors.
        """
        # Keras takes a list of one tensor, but returns the tensor.
        return keras.tree.flatten(self.model(inputs, training=training))


def split(model: keras.Model, num_stages: int = 2, *, cut_at: list[str] | None = None) -> list[Stage]:
    """Cuts a model into stages.

    A cut may be between any two layers, with two exceptions: a layer with weights must not be used on both sides of the
    cut, and a tensor with a mask must not cross the cut. Several tensors may cross a cut. A tensor may pass through a
    stage that does not use the tensor. A nested model counts as one layer.

    Args:
        model: a built functional or Sequential model.
        num_stages: number of stages with about equally many weights, if `cut_at` is None.
        cut_at: names of the layers after which to cut, in the order of their calls.

    Returns:
        A list of `Stage`, in the order of their calls.

    Raises:
        UserError: if the model cannot be cut into `num_stages` stages, or not after the layers in `cut_at`.

    Example:
        ```python
        import keras
        import kerasdp

        layers = [keras.layers.Dense(16, name=f"dense{number}") for number in range(4)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        halves = kerasdp.pipeline.split(model, 2)
        thirds = kerasdp.pipeline.split(model, cut_at=["dense0", "dense2"])
        print([stage.layers for stage in thirds])  # [["dense0"], ["dense1", "dense2"], ["dense3"]]
        ```
    """
    graph = Graph(functional(model))
    costs = graph.costs()
    if cut_at is None:
        places = _balanced(graph, costs, num_stages)
    else:
        places = [graph.place_after(name) for name in cut_at]
        if places != sorted(set(places)):
            raise UserError(f"--cut_at: expected layers in the order of their calls. Received: {', '.join(cut_at)}")
    bounds = [0, *places, len(graph.calls)]
    total = sum(costs) or 1.0
    return [
        Stage(
            model=graph.stage(start, end, f"stage_{number}"),
            layers=graph.names[start:end],
            share=sum(costs[start:end]) / total,
            num_bytes=graph.num_bytes(end) if end < len(graph.calls) else 0,
        )
        for number, (start, end) in enumerate(zip(bounds, bounds[1:]))
    ]


def table(stages: list[Stage]) -> str:
    """Returns a table as text, with the layers and parameters of each stage, and the bytes that each stage sends.

    Args:
        stages: stages as `split` returns them.

    Example:
        ```python
        import keras
        import kerasdp

        layers = [keras.layers.Dense(16, name=f"dense{number}") for number in range(4)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        print(kerasdp.pipeline.table(kerasdp.pipeline.split(model, 4)))
        ```
    """
    rows = [["stage", "layers", "number", "parameters", "share", "tensors out", "bytes per sample"]]
    for number, stage in enumerate(stages):
        names = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} ... {stage.layers[-1]}"
        rows.append([
            str(number), names, str(len(stage.layers)), f"{stage.model.count_params():,}", f"{stage.share:.0%}",
            str(len(stage.model.outputs)), f"{stage.num_bytes:,}" if stage.num_bytes else "-",
        ])  # fmt: skip
    return in_columns(rows, right=(0, 2, 3, 4, 5, 6))


def functional(model: keras.Model) -> keras.Model:
    """Returns the model if it is functional. Returns the inner functional model of a Sequential model.

    Raises:
        UserError: if the model is neither functional nor Sequential.
    """
    known = as_functional(model)
    if known is None:
        raise UserError(
            "a pipeline: expected a functional model, or a Sequential model with an Input. Received: "
            f"{type(model).__name__} {model.name!r}"
        )
    return known


class Graph:
    """Lists the layer calls of a functional model, in an order in which they can be computed.

    A place is a possible cut, given as the number of calls before the cut.

    Attributes:
        calls: the calls in that order.
        names: name of the called layer for each call.
    """

    def __init__(self, model: keras.Model):
        self._model, self.calls = model, calls(model) or []
        self.names = [call.operation.name for call in self.calls]

    def crossing(self, place: int) -> list[Any]:
        """Returns the tensors that are computed before a place and used after it."""
        made = [*self._model.inputs, *(tensor for call in self.calls[:place] for tensor in call.outputs)]
        used = {id(tensor) for call in self.calls[place:] for tensor in call.input_tensors}
        return [tensor for tensor in made if id(tensor) in used.union(map(id, self._model.outputs))]

    def num_bytes(self, place: int) -> int:
        """Returns the size in bytes of the tensors that cross a place, for one sample."""
        return bytes_of_row(self.crossing(place))

    def why_not(self, place: int) -> str:
        """Returns the reason why the model cannot be cut at a place; an empty text if it can be cut there."""

        def holders(made: list[Any]) -> dict[int, str]:
            operations = [call.operation for call in made]
            return {id(variable): one.name for one in operations for variable in getattr(one, "variables", [])}

        before, after = holders(self.calls[:place]), holders(self.calls[place:])
        for variable in before.keys() & after.keys():
            if before[variable] == after[variable]:
                return f"layer {before[variable]} has weights and is used on both sides of the cut"
            return f"layers {before[variable]} and {after[variable]} share weights, but a cut would separate the layers"
        if any(map(has_mask, self.crossing(place))):
            return "a tensor with a mask would cross the cut and lose its mask"
        return ""

    def places(self) -> list[int]:
        """Returns the places where the model can be cut."""
        return [place for place in range(1, len(self.calls)) if not self.why_not(place)]

    def place_after(self, name: str) -> int:
        """Returns the place after the last call of the named layer."""
        if name not in self.names:
            raise UserError(f"--cut_at: expected names of layers. Received: {name!r}; known: {', '.join(self.names)}")
        place = len(self.names) - self.names[::-1].index(name)
        reason = "no layer comes after it" if place == len(self.names) else self.why_not(place)
        if reason:
            raise UserError(f"--cut_at: the model cannot be cut after {name}: {reason}; name another layer")
        return place

    def stage(self, start: int, end: int, name: str) -> keras.Model:
        """Builds a model of the calls between two places. Calls the layers again on new inputs."""
        incoming = self._model.inputs if start == 0 else self.crossing(start)
        outgoing = self._model.outputs if end == len(self.calls) else self.crossing(end)
        known = {id(tensor): keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype) for tensor in incoming}
        inputs = list(known.values())
        for call in self.calls[start:end]:
            args, kwargs = call.arguments.fill_in({id(tensor): known[id(tensor)] for tensor in call.input_tensors})
            known |= zip(map(id, call.outputs), keras.tree.flatten(call.operation(*args, **kwargs)))
        return keras.Model(inputs, [known[id(tensor)] for tensor in outgoing], name=name)

    def costs(self) -> list[float]:
        """Returns the cost of each call: the number of elements in its weights."""
        counted: set[int] = set()
        costs = []
        for operation in (call.operation for call in self.calls):
            # The weights of a layer that is called twice count once.
            weights = [] if id(operation) in counted else getattr(operation, "weights", [])
            costs.append(float(sum(int(np.prod(weight.shape)) for weight in weights)))
            counted.add(id(operation))
        return costs


def _balanced(graph: Graph, costs: list[float], num_stages: int) -> list[int]:
    """Returns the places that cut a model into stages of about equal cost.

    For each cut, chooses the place nearest to an equal share of the cost. Of equally near places, chooses the place
    that the fewest bytes cross.
    """
    places = graph.places()
    if num_stages < 1 or num_stages - 1 > len(places):
        raise UserError(
            f"--gpus: expected from 1 to {len(places) + 1}, the largest number of stages of this model (a "
            f"nested model is one layer). Received: {num_stages}"
        )
    done = np.cumsum(costs) / (sum(costs) or 1.0)
    found: list[int] = []
    for number in range(1, num_stages):

        def rank(place: int, share: float = number / num_stages) -> tuple[float, int]:
            """Returns the distance of a place from an equal share of the cost, and the bytes that cross the place.

            The distance is rounded to hundredths, so that nearly equal distances count as equal.
            """
            return round(abs(float(done[place - 1]) - share), 2), graph.num_bytes(place)

        left = [place for place in places if place > max(found, default=0)]
        # Each stage after this one needs a place, too.
        found.append(min(left[: len(left) - (num_stages - 1 - number)], key=rank))
    return found


def stages_of(model: keras.Model, config: Config, num_devices: int) -> list[Stage]:
    """Cuts a built model into stages: after the layers in `config.cut_at`, or into stages of about equal cost.

    Raises:
        UserError: if the model cannot be cut this way.
    """
    _check(model)
    refuse_next_values(model, "a pipeline", "use --strategy=data")
    inner = inner_optimizer(getattr(model, "optimizer", None))
    if inner and inner.global_clipnorm and inner.gradient_accumulation_steps:
        raise UserError(
            "a pipeline cannot use global_clipnorm with gradient_accumulation_steps: it would clip the gradients of "
            "each step, not the accumulated gradients; use clipnorm, or a larger --batch_size without accumulation"
        )
    cut_at = None if config.cut_at is None else [name.strip() for name in config.cut_at.split(",")]
    stages = split(model, num_devices, cut_at=cut_at)
    if any(has_mask(tensor) for tensor in stages[-1].model.outputs):
        raise UserError(f"a pipeline would lose the mask of an output of {model.name}; use --strategy=data")
    return stages


def flat_inputs(model: keras.Model, inputs: Any) -> list[Any]:
    """Converts the inputs of `fit` to the list of inputs of the first stage. `model` is the functional model."""
    structure = inputs_structure(model)
    if isinstance(inputs, dict) and isinstance(structure, dict):
        inputs = {name: inputs[name] for name in structure}
    elif isinstance(inputs, dict):
        inputs = [inputs[tensor.name] for tensor in model.inputs]
    return keras.tree.flatten(inputs)


def packed_outputs(model: keras.Model, outputs: list[Any]) -> Any:
    """Packs the outputs of the last stage into the structure that the functional model returns."""
    packed = keras.tree.pack_sequence_as(outputs_structure(model), outputs)
    return packed[0] if isinstance(packed, (list, tuple)) and len(packed) == 1 else packed  # as Keras does


def _check(model: keras.Model) -> None:
    for layer in all_layers(model):
        if layer.activity_regularizer is not None:
            raise UserError(
                f"a pipeline: layer {layer.name} has an activity regularizer, which needs the whole batch; use "
                "--strategy=data"
            )
    for tensor in functional(model).inputs:
        if None in tensor.shape[1:]:
            raise UserError(
                f"a pipeline: expected inputs of known shape. Received: {tensor.name} with {tuple(tensor.shape)}; give "
                "keras.Input every size except the batch size"
            )
    names = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
    own = [name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)]
    if own:
        raise UserError(
            f"a pipeline calls the layers of a model directly, so it never calls {own[0]} of "
            f"{type(model).__name__}; use --strategy=data"
        )
