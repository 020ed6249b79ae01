"""Recomputes a layer in the backward pass on TensorFlow: see `kerasdp.scale.remat`."""

from typing import Any

import tensorflow as tf

from kerasdp.backends.tensorflow.gradients import dense
from kerasdp.errors import UserError


def rematerialized(block: Any) -> Any:
    """Calls the layer of `block`, so that the backward pass recomputes the layer. Returns the layer's outputs.

    In eager mode nothing is recomputed, because TensorFlow does not report the tensors that the layer closes over.

    Args:
        block: a `kerasdp.scale.remat.Block`.

    Raises:
        UserError: if the layer uses weights or tensors that would get no gradient.
    """
    from kerasdp.keras_compat.layers import current_value

    variables = list({id(variable): variable for variable in block.layer.variables}.values())
    if tf.executing_eagerly():
        return block.finish(block.run(block.tensors, []))
    values = [tf.convert_to_tensor(current_value(variable)) for variable in variables]
    given = [*block.tensors, *values]
    places = [place for place, tensor in enumerate(given) if tensor.dtype.is_floating]
    found: list[tf.Tensor] = []

    @tf.custom_gradient
    def compute(*floats: tf.Tensor) -> Any:
        by_place = dict(zip(places, floats, strict=True))
        tensors = [by_place.get(place, tensor) for place, tensor in enumerate(given)]
        first = len(tf.compat.v1.get_default_graph().get_operations())
        found[:] = block.run(tensors[: len(block.tensors)], list(zip(variables, tensors[len(block.tensors) :])))
        _refuse_others(block, variables, tensors, first)

        def gradient(*upstream: tf.Tensor) -> list[Any]:
            is_there = _is_there(upstream)
            again = [
                tf.identity(tensor) if place >= len(block.tensors) and tensor.dtype.is_floating
                else tf.where(is_there, tensor, tf.zeros((), tensor.dtype))
                for place, tensor in enumerate(tensors)
            ]  # fmt: skip
            own = [again[place] for place in places]
            with tf.GradientTape() as tape:
                tape.watch(own)
                results = block.again(again[: len(block.tensors)], list(zip(variables, again[len(block.tensors) :])))
                results = [result for result in results if result.dtype.is_floating]
            return dense(tape.gradient(results, own, list(upstream)))

        return [result for result in found if result.dtype.is_floating], gradient

    floats = iter(compute(*(given[place] for place in places)))
    return block.finish([next(floats) if result.dtype.is_floating else result for result in found])


def _is_there(upstream: Any) -> tf.Tensor:
    """Returns a tensor with the value True that is computed only after the gradients.

    TensorFlow (2.21) merges equal operations with the same inputs. It would merge the recomputation of a layer with the
    first computation, and keep all results in memory. The inputs of the recomputation depend on this tensor, so the
    operations differ. The tensor is the result of a test whether a cosine is at most 3. The result is always True, but
    neither TensorFlow nor XLA knows this.
    """
    firsts = [tf.cast(tf.reduce_sum(tf.reshape(each, [-1])[:1]), "float32") for each in upstream]
    return tf.logical_not(tf.cos(tf.add_n(firsts)) > 3.0)


def _refuse_others(block: Any, variables: list[Any], tensors: list[tf.Tensor], first: int) -> None:
    """Raises `UserError` if the layer used weights or float tensors that are not inputs of the call.

    Args:
        block: the call of the layer.
        variables: the variables of the layer.
        tensors: the inputs of the call: arguments and values of variables.
        first: the number of operations in the graph before the call.
    """
    known = {id(variable) for variable in variables}
    for variable, _ in block.begun:
        if id(variable) not in known and variable.trainable:
            raise UserError(
                f"--remat: layer {block.layer.name} uses {variable.path}, a variable that is not its own. TensorFlow "
                "would lose the variable's gradient; remove that layer from --remat, or use --backend=torch or jax"
            )
    operations = tf.compat.v1.get_default_graph().get_operations()
    own = {id(operation) for operation in operations[first:]} | {id(tensor.op) for tensor in tensors}
    device = tf.constant(0.0).device  # where replicas meet, their operations interleave
    for operation in operations[first:]:
        for tensor in operation.inputs if operation.device == device else ():
            is_known = id(tensor.op) in own or tensor.op.type == "Const" or tensor.device != device
            if tensor.dtype.is_floating and not is_known:
                raise UserError(
                    f"--remat: layer {block.layer.name} uses tensor {tensor.name}, which is not its input. TensorFlow "
                    "would lose the tensor's gradient; remove that layer from --remat, or use --backend=torch or jax"
                )
