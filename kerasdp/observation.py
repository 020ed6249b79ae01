"""What a training step made on its way, for finding the place where two runs part."""

import contextlib
import enum
import types
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from kerasdp import replica_context


class Detail(enum.IntEnum):
    """How much a step tells: nothing; the norm of its gradient; every layer's output and every weight's gradient."""

    NOTHING = 0
    NORM = 1
    EVERYTHING = 2


class Observer:
    """Asked before each training step what it should tell, and told it afterwards.

    Attributes:
        gradient_norms: of each step, scalar tensors.
        gradients: of the detailed step, for each trainable weight: an array, or None if the loss does not depend on it.
        outputs: of the detailed step: the inputs, then what each layer gave for the global batch, in the order of
            the calls.
    """

    def __init__(self, detailed_step: int | None = None):
        """`detailed_step`: the step, counted from 0, that tells everything."""
        self.detailed_step = detailed_step
        self.gradient_norms: list[Any] = []
        self.gradients: list[Any] = []
        self.outputs: dict[str, Any] = {}

    @property
    def detail(self) -> Detail:
        """What the next step should tell."""
        return Detail.EVERYTHING if len(self.gradient_norms) == self.detailed_step else Detail.NORM

    def on_step(self, observed: dict[str, Any]) -> None:
        """Takes what `observed` gave."""
        self.gradient_norms.append(observed["gradient_norm"])
        if "outputs" in observed:
            self.gradients = [None if leaf is None else _array(leaf) for leaf in observed["gradients"]]
            self.outputs = {name: _array(output) for name, output in observed["outputs"].items()}


def observed(detail: Detail, gradients: list[Any], outputs: dict[str, Any]) -> dict[str, Any]:
    """What a step tells, as tensors: part of its compiled function.

    Args:
        detail: how much.
        gradients: for each trainable weight, of the loss of the global batch, reduced over the replicas; may hold None.
        outputs: what `layer_outputs` found.
    """
    if detail == Detail.NOTHING:
        return {}
    # TensorFlow gives the gradient of an embedding as rows and their places; this makes it dense.
    gradients = [None if gradient is None else ops.convert_to_tensor(gradient) for gradient in gradients]
    squares = [
        ops.sum(ops.square(ops.cast(gradient, keras.backend.result_type(gradient.dtype, "float32"))))
        for gradient in gradients
        if gradient is not None
    ]
    result = {"gradient_norm": ops.sqrt(sum(squares))}
    if detail == Detail.EVERYTHING:
        result |= {"gradients": gradients, "outputs": outputs}
    return result


@contextlib.contextmanager
def layer_outputs(detail: Detail, model: keras.Model, inputs: Any) -> Iterator[dict[str, Any]]:
    """Within it, collects the inputs and what each layer gives, by name and in the order of the calls.

    Only if `detail` asks for everything. A layer counts as a whole with all layers in it; only models within models
    are entered.
    """
    outputs: dict[str, Any] = {}
    if detail < Detail.EVERYTHING:
        yield outputs
        return
    _collect(outputs, "inputs", inputs)
    layers = list(_layers(model))
    for name, layer in layers:
        call = layer.call  # may be bound to the instance already

        def call_and_keep(layer: Any, *args: Any, name: str = name, call: Any = call, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            _collect(outputs, name, result)
            return result

        object.__setattr__(layer, "_kerasdp_call", vars(layer).get("call"))
        object.__setattr__(layer, "call", types.MethodType(call_and_keep, layer))
    try:
        yield outputs
    finally:
        for _, layer in layers:
            kept = vars(layer).pop("_kerasdp_call")
            if kept is None:
                object.__delattr__(layer, "call")
            else:
                object.__setattr__(layer, "call", kept)


def _layers(model: keras.Model, prefix: str = "") -> Iterator[tuple[str, keras.layers.Layer]]:
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _layers(layer, f"{prefix}{layer.name}/")
        elif not isinstance(layer, keras.layers.InputLayer):
            yield f"{prefix}{layer.name}", layer


def _collect(outputs: dict[str, Any], name: str, result: Any) -> None:
    context = replica_context.current()
    for tensor in keras.tree.flatten(result):
        if tensor is None:
            continue
        tensor = ops.stop_gradient(tensor)
        if context is not None and context.gather_rows is not None and tensor.shape[:1] == (context.rows,):
            tensor = context.gather_rows(tensor)
        calls = sum(known.partition(" ")[0] == name for known in outputs)
        outputs[f"{name} ({calls + 1})" if calls else name] = tensor


def _array(tensor: Any) -> Any:
    if "bfloat16" in str(tensor.dtype):  # NumPy has none
        tensor = ops.cast(tensor, "float32")
    return ops.convert_to_numpy(tensor)
