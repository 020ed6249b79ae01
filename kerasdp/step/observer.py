"""Records the values that training steps compute, to find the place where two runs diverge."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from kerasdp.keras_compat.layers import added_losses
from kerasdp.keras_compat.patches import step_with
from kerasdp.run_state import Detail
from kerasdp.same import replica_context
from kerasdp.same.layer_calls import hook_layers
from kerasdp.step.row_search import row_layout_of, to_array


class Observer:
    """Stores the values that training steps record, and how much they should record.

    Attributes:
        detail: how much to record.
        losses: the loss of each step over the global batch; scalar tensors.
        gradient_norms: the gradient norm of each step over all trainable weights; scalar tensors.
        samples: the indices in the data set of the rows of each step; integer tensors of shape `(rows,)`.
        gradients: the gradients of the last step, only with `Detail.EVERYTHING`: an array for each trainable weight, or
            None if the loss does not depend on the weight.
        outputs: the inputs of the last step, then the output of each layer in the order of the calls, for the global
            batch. Only with `Detail.EVERYTHING`.
    """

    def __init__(self, detail: Detail = Detail.SUMMARY):
        self.detail = detail
        self.losses: list[Any] = []
        self.gradient_norms: list[Any] = []
        self.samples: list[Any] = []
        self.gradients: list[Any] = []
        self.outputs: dict[str, Any] = {}

    def on_step(self, loss: Any, samples: Any, seen: dict[str, Any]) -> None:
        """Stores the loss, the sample indices and the recorded values of a step.

        Args:
            loss: the loss of the step.
            samples: the indices of the step's rows in the data set.
            seen: the result of `observed`; empty for a user-defined `train_step`.
        """
        self.losses.append(loss)
        self.samples.append(samples)
        self.gradient_norms.append(seen.get("gradient_norm"))
        if "outputs" in seen:
            self.gradients = [None if leaf is None else to_array(leaf) for leaf in seen["gradients"]]
            self.outputs = {name[_PLACE:]: to_array(output) for name, output in sorted(seen["outputs"].items())}


def observed(detail: Detail, gradients: list[Any], outputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors that a step records. This function runs in the compiled step.

    Args:
        detail: how much to record.
        gradients: the gradient of the global batch's loss for each trainable weight, reduced over the replicas; None
            for a weight without a gradient.
        outputs: the dictionary that `record_forward_pass` yields.
    """
    if detail == Detail.NOTHING:
        return {}
    squares = [
        ops.sum(ops.square(ops.cast(gradient, keras.backend.result_type(gradient.dtype, "float32"))))
        for gradient in gradients
        if gradient is not None
    ]
    seen = {"gradient_norm": ops.sqrt(sum(squares))}
    if detail == Detail.EVERYTHING:
        seen |= {"gradients": gradients, "outputs": outputs}
    return seen


# Length of the number before a name, and the suffix of the name in further calls.
_PLACE = 6
_NUMBER_OF_CALL = re.compile(r" \(\d+\)$")


@contextlib.contextmanager
def record_forward_pass(detail: Detail, model: keras.Model, inputs: Any) -> Iterator[dict[str, Any]]:
    """Records a replica's forward pass in a training step, if `detail` is `Detail.EVERYTHING`.

    Yields:
        A dictionary that receives the inputs and the output of each layer, by name and in the order of the calls.
    """
    outputs: dict[str, Any] = {}
    if detail < Detail.EVERYTHING:
        yield outputs
        return
    _collect(outputs, "inputs", inputs, _whole)
    with _recording(model, outputs, _whole):
        yield outputs


@contextlib.contextmanager
def shard_outputs(model: keras.Model) -> Iterator[dict[str, Any]]:
    """Records the output of each layer of a model in a forward pass, for this replica's rows.

    At the end, the context also records the losses that layers added, and the values that layers assigned to variables.
    Keras keeps these losses only in a `StatelessScope` that collects losses.
    """
    outputs: dict[str, Any] = {}
    with _recording(model, outputs, lambda tensor: tensor):
        yield outputs
    layout = row_layout_of(model)
    added = [
        (f"{layer.name}, in what it adds to the loss", loss)
        for layer in layout.adding.values()
        for loss in added_losses(layer)
    ]
    assigned = [
        (f"{layer.name}, in what it assigns to {variable.path}", variable.value)
        for layer, variables in layout.assigning.values()
        for variable in variables
    ]
    for name, tensor in added + assigned:
        outputs[f"{len(outputs):0{_PLACE - 1}d} {name}"] = ops.stop_gradient(tensor)


def layer_name(recorded: str) -> str:
    """Returns the name of a layer from the recorded name of an output of the layer."""
    return _NUMBER_OF_CALL.sub("", recorded[_PLACE:])


def _recording(
    model: keras.Model, outputs: dict[str, Any], convert: Callable[[Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """Returns a context that records the output of each layer of a model.

    Layers inside a layer are not recorded. Layers inside a nested model are recorded, instead of the nested model.

    Args:
        model: any model.
        outputs: the dictionary that receives the outputs, by name.
        convert: a function that converts an output before it is stored.
    """
    names = {id(layer): name for name, layer in layers_within(model)}

    def record(layer: keras.layers.Layer, result: Any) -> None:
        if id(layer) in names:
            _collect(outputs, names[id(layer)], result, convert)

    hook_layers()
    return step_with(record=record)


def layers_within(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Returns the layers of a model and of its nested models, each once, with their names in records."""
    found: dict[int, tuple[str, keras.layers.Layer]] = {}

    def enter(part: keras.Model, prefix: str) -> None:
        for layer in part.layers:
            if isinstance(layer, keras.Model):
                enter(layer, f"{prefix}{layer.name}/")
            elif not isinstance(layer, keras.layers.InputLayer):
                # A head may also use a layer of its backbone.
                found.setdefault(id(layer), (f"{prefix}{layer.name}", layer))

    enter(model, "")
    return list(found.values())


def _collect(outputs: dict[str, Any], name: str, result: Any, convert: Callable[[Any], Any]) -> None:
    for tensor in keras.tree.flatten(result):
        if hasattr(tensor, "shape"):  # a layer may also return Python numbers and objects
            number = sum(layer_name(known) == name for known in outputs)
            name_of_call = f"{name} ({number + 1})" if number else name
            # Numbered, because a function compiled by JAX returns a dict in the order of its keys.
            outputs[f"{len(outputs):0{_PLACE - 1}d} {name_of_call}"] = convert(tensor)


def _whole(tensor: Any) -> Any:
    """Gathers the tensor of the global batch if `tensor` is a replica's shard. The result has no gradient."""
    context, tensor = replica_context.current(), ops.stop_gradient(tensor)
    if context is None or context.gather_rows is None or tuple(tensor.shape[:1]) != (context.rows,):
        return tensor
    return context.gather_rows(tensor)
