"""Wraps the calls of all layers: for portable random values, for records, and for layers that need all rows.

Random layers draw the same values on every backend, and the recorder of a step gets each output. On several replicas,
each replica calls a layer on its rows, except for layers that need all rows. These are layers that add losses
(`add_loss`), assign to a variable (a running maximum, a codebook), or mix rows. Each replica calls such a layer on the
gathered global batch, and takes its rows of the outputs. Activity regularizers get the gathered outputs.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from kerasdp.errors import RunError, UserError
from kerasdp.keras_compat.layers import call_of, hook_add_loss, hook_calls
from kerasdp.keras_compat.patches import current_step
from kerasdp.keras_compat.random import draws_portably, given_seed_generator
from kerasdp.same.random import portable_draws
from kerasdp.same.replica_context import ReplicaContext, use

# The call of a layer.
Call = Callable[..., Any]


def hook_layers() -> None:
    """Wraps the calls of all layers, and `Layer.add_loss`, permanently."""
    hook_calls(_make_call)
    hook_add_loss(_take_added_loss)


def _make_call(make: Call, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer or another operation; explains an error if the layer uses a framework that is not the backend.

    `make` is Keras' method for the call.
    """
    try:
        return _make_known_call(make, layer, *args, **kwargs)
    except Exception as error:
        other = None if isinstance(error, RunError) else other_frameworks_of(_function_of(layer))
        if other is None:
            raise
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"layer {layer.name} failed ({type(error).__name__}: {reason}). The layer uses {other}, but the backend is "
            f"{keras.backend.backend()}; use keras.ops, which works on every backend"
        ) from error


FRAMEWORKS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}


def _function_of(layer: Any) -> Callable[..., Any]:
    return getattr(layer, "function", getattr(type(layer), "call", None)) or len


def other_frameworks_of(function: Callable[..., Any]) -> str | None:
    """Returns the frameworks that a user-defined function uses, except the backend; None if there are none."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or function.__module__.startswith(("keras.", "kerasdp.")):
        return None
    known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    codes, imported = [function.__code__], set[str]()
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]  # of functions within it
        for name in (*code.co_names, *code.co_freevars):
            value = known.get(name)
            module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            imported |= {name, str(module).partition(".")[0]}
    others = sorted(FRAMEWORKS[name] for name in FRAMEWORKS.keys() & imported - {keras.backend.backend()})
    return " and ".join(others) or None


def _make_known_call(make: Call, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
    step = current_step()
    context: ReplicaContext | None = step.replica
    is_drawing = draws_portably(layer)
    given_call = call_of(layer)
    is_plain = context is None and step.record is None and not is_drawing and given_call is None
    if is_plain or not isinstance(layer, keras.layers.Layer):
        return make(layer, *args, **kwargs)
    call = functools.partial(make, layer)
    if given_call is not None:
        call = functools.partial(given_call, call, layer)
    if is_drawing:
        call = functools.partial(_call_with_portable_draws, call, layer)
    if context is None or context.rows is None:
        outputs = call(*args, **kwargs)
    else:
        context.calling.append(layer)
        try:
            outputs = _call_on_replica(call, layer, context, args, kwargs)
        finally:
            context.calling.pop()
        if layer.activity_regularizer is not None and not context.is_custom_step:
            context.regularized[id(layer)] = [
                _penalty(layer, context, output) for output in keras.tree.flatten(outputs) if ops.is_tensor(output)
            ]
    if step.record is not None:
        step.record(layer, outputs)
    return outputs


def _call_with_portable_draws(call: Call, layer: Any, *args: Any, **kwargs: Any) -> Any:
    # Keras (3.15) lets TimeDistributed call the `call` of its layer.
    drawing = layer.layer if isinstance(layer, keras.layers.TimeDistributed) else layer
    given = given_seed_generator(drawing)
    with portable_draws(f"layer {drawing.name}", (args, kwargs), given and given.next):
        return call(*args, **kwargs)


def _call_on_replica(
    call: Call, layer: keras.layers.Layer, context: ReplicaContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a layer on this replica's rows, or on all rows if its outputs, losses or variables need all rows."""
    layout: Any = context.row_layout
    # A micro-batch has no other rows; a user-defined step gathers all rows itself where it needs them.
    if layout is None or context.is_micro_batch or context.is_custom_step:
        return call(*args, **kwargs)
    if context.is_trial:
        return layout.watch_call(call, layer, context, args, kwargs)
    # Layers within a layer that is called on all rows get all rows already.
    if not context.replicas or not layout.couples(layer):
        return call(*args, **kwargs)

    def each(function: Callable[[Any, Any], Any], kind: str, tensors: Any) -> Any:
        orders = row_orders_in(kind, layer, context, tensors)
        leaves = [
            leaf if order is None else function(leaf, order) for leaf, order in zip(keras.tree.flatten(tensors), orders)
        ]
        return keras.tree.pack_sequence_as(tensors, leaves)

    gather = functools.partial(context.whole, gather_rows=context.rows_of_all)
    args, kwargs = each(gather, "arguments", (args, kwargs))
    with use(context.of_whole()):
        outputs = call(*args, **kwargs)
    _, variables = layout.assigning.get(id(layer), (layer, []))
    for variable in variables:
        is_float = "float" in keras.backend.standardize_dtype(variable.dtype)
        # torch needs the present value of a trained weight for the gradient.
        if context.gather is not None and is_float and not variable.trainable:
            # All replicas computed it, but GPUs may sum in any order: all take the value of the first one.
            variable.assign(context.gather(ops.stop_gradient(ops.convert_to_tensor(variable)))[0])
    return each(context.own_part, "outputs", outputs)


def row_orders_in(kind: str, layer: keras.layers.Layer, context: ReplicaContext, tensors: Any) -> list[Any]:
    """Returns the `RowOrder` of each leaf of `tensors`, a layer's arguments or outputs; None for a leaf without rows.

    `kind` is `"arguments"` or `"outputs"`.
    """
    name = f"the call of layer {layer.name}"
    return [
        context.row_order((kind, id(layer)), leaf, name) if ops.is_tensor(leaf) else None
        for leaf in keras.tree.flatten(tensors)
    ]


def _penalty(layer: keras.layers.Layer, context: ReplicaContext, output: Any) -> Any:
    """Returns the loss of a layer's activity regularizer over the global batch, as on one device."""
    order = context.row_order(("penalty", id(layer)), output, f"the activity regularizer of layer {layer.name}")
    whole, rows = context.whole(output, order), output.shape[0]
    penalty = layer.activity_regularizer(whole) / whole.shape[0]  # by the samples, as Keras does
    return ops.divide_no_nan(penalty * rows, ops.cast(rows, penalty.dtype))


def _take_added_loss(add_loss: Callable[..., None], layer: keras.layers.Layer, loss: Any) -> None:
    """Handles a call of `add_loss` by a layer.

    In the trial call on a few rows, this function records the layer. In other calls, it passes the loss to Keras, or to
    `Step.adding` if the step collects losses.

    Args:
        add_loss: Keras' method.
        layer: the layer that adds the loss.
        loss: a scalar tensor, or a structure of scalar tensors.

    Raises:
        UserError: if the loss would be wrong on several replicas or with micro-batches.
    """
    context: ReplicaContext | None = current_step().replica
    if context is not None and context.rows is not None:
        layout = context.row_layout
        if penalties := context.regularized.get(id(layer)):  # Keras adds the loss of its activity regularizer
            loss = penalties.pop(0)
        elif context.is_micro_batch:
            raise UserError(
                f"layer {layer.name} calls add_loss, but with micro-batches the loss would cover only one micro-batch; "
                "move that loss into the model's loss, or train with --strategy=data and without --accumulate"
            )
        elif layout is not None and not context.is_custom_step:
            # The innermost layer whose call can be repeated: `layer` itself may have been called without Keras.
            adding = context.calling[-1] if context.calling else layer
            if context.is_trial:
                layout.adding.setdefault(id(adding), adding)
                return
            if id(adding) not in layout.adding:
                raise UserError(
                    f"layer {adding.name} calls add_loss, but did not call it in the trial call before the first step; "
                    "add a loss in each call with training=True (0.0 if there is no loss), or train on one device"
                )
    add: Callable[[Any], None] = functools.partial(add_loss, layer)
    if (added := current_step().adding) is not None:
        keras_add = add
        add = lambda loss: added.append((keras_add, loss))  # noqa: E731
    _add_in_float32(add, loss)


def _add_in_float32(add: Callable[[Any], None], loss: Any) -> None:
    """Adds a float16 or bfloat16 loss as float32. On jax and torch, Keras adds losses to the model's loss in float32.

    Keras (3.15) keeps activity penalties in the dtype of the activities, and TensorFlow cannot add values of different
    dtypes.
    """

    def cast(leaf: Any) -> Any:
        is_half = ops.is_tensor(leaf) and keras.backend.standardize_dtype(leaf.dtype) in ("float16", "bfloat16")
        return ops.cast(leaf, "float32") if is_half else leaf

    add(keras.tree.map_structure(cast, loss))
