"""Makes the calls of all layers: the one place where something is done before and after what a layer does itself.

Random layers draw portably; what a step records is noted. On several replicas, a layer that adds losses (`add_loss`),
that assigns to a variable (a running maximum, a codebook), or mixes the rows, is called on all of them, as on one
device: its arguments are gathered, and of its outputs the replica takes its own rows. Activity
regularizers see the gathered outputs.
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
    """Lets this module make the calls of all layers, and take the losses that they add, from now on."""
    hook_calls(_make_call)
    hook_add_loss(_take_added_loss)


def _make_call(make: Call, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
    """Makes the call of a layer, or of another operation; `make`: what Keras does."""
    try:
        return _make_known_call(make, layer, *args, **kwargs)
    except Exception as error:
        other = None if isinstance(error, RunError) else other_frameworks_of(_function_of(layer))
        if other is None:
            raise
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"layer {layer.name} failed ({type(error).__name__}: {reason}). It refers to {other} in a run of "
            f"{keras.backend.backend()}; use keras.ops, which is the same on every backend"
        ) from error


FRAMEWORKS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}


def _function_of(layer: Any) -> Callable[..., Any]:
    return getattr(layer, "function", getattr(type(layer), "call", None)) or len


def other_frameworks_of(function: Callable[..., Any]) -> str | None:
    """Returns the names of frameworks, other than the backend, that a user-defined function refers to."""
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
    """Calls a layer on this replica's rows; on all rows where what it gives, adds or keeps is of all of them."""
    layout: Any = context.row_layout
    # A micro-batch knows no other rows; a user-defined step says itself where it wants all of them.
    if layout is None or context.is_micro_batch or context.is_custom_step:
        return call(*args, **kwargs)
    if context.is_trial:
        return layout.watch_call(call, layer, context, args, kwargs)
    # Within a layer that is called on all rows there are no others.
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
        # Torch differentiates with what a trained weight is now.
        if context.gather is not None and is_float and not variable.trainable:
            # All replicas computed it, on GPUs with sums in any order.
            variable.assign(context.gather(ops.stop_gradient(ops.convert_to_tensor(variable)))[0])
    return each(context.own_part, "outputs", outputs)


def row_orders_in(kind: str, layer: keras.layers.Layer, context: ReplicaContext, tensors: Any) -> list[Any]:
    """Returns where the rows are in each leaf of a layer's arguments or outputs, its `kind`; None if nowhere."""
    name = f"the call of layer {layer.name}"
    return [
        context.row_order((kind, id(layer)), leaf, name) if ops.is_tensor(leaf) else None
        for leaf in keras.tree.flatten(tensors)
    ]


def _penalty(layer: keras.layers.Layer, context: ReplicaContext, output: Any) -> Any:
    """Returns what Keras is to add for an activity regularizer, which sees the global batch, as on one device."""
    order = context.row_order(("penalty", id(layer)), output, f"the activity regularizer of layer {layer.name}")
    whole, rows = context.whole(output, order), output.shape[0]
    penalty = layer.activity_regularizer(whole) / whole.shape[0]  # by the samples, as Keras does
    return ops.divide_no_nan(penalty * rows, ops.cast(rows, penalty.dtype))


def _take_added_loss(add_loss: Callable[..., None], layer: keras.layers.Layer, loss: Any) -> None:
    """Gives what a layer adds to the running pass of a replica; to Keras where there is none, or one program for all.

    Args:
        add_loss: what Keras does with it.
        layer: that adds it.
        loss: scalar tensors.
    """
    context: ReplicaContext | None = current_step().replica
    if context is not None and context.rows is not None:
        layout = context.row_layout
        if penalties := context.regularized.get(id(layer)):  # Keras adds what its activity regularizer gave
            loss = penalties.pop(0)
        elif context.is_micro_batch:
            raise UserError(
                f"layer {layer.name} calls add_loss, with which it would count only one micro-batch: move that loss "
                "into the model's loss, or train with --strategy=data and without --accumulate"
            )
        elif layout is not None and not context.is_custom_step:
            # The call that can be repeated, also where that of the layer was called past Keras.
            adding = context.calling[-1] if context.calling else layer
            if context.is_trial:
                layout.adding.setdefault(id(adding), adding)
                return
            if id(adding) not in layout.adding:
                raise UserError(
                    f"layer {adding.name} adds a loss that it did not add when the model was first called, in "
                    "training, on a few rows: let it add one in each call in training, zero maybe, or train on one "
                    "device"
                )
    add: Callable[[Any], None] = functools.partial(add_loss, layer)
    if (added := current_step().adding) is not None:
        keras_add = add
        add = lambda loss: added.append((keras_add, loss))  # noqa: E731
    _add_in_float32(add, loss)


def _add_in_float32(add: Callable[[Any], None], loss: Any) -> None:
    """Adds a loss in float16 or bfloat16 as float32, as which jax and torch add it to the model's own.

    Keras (3.15) leaves penalties of activities in the type of the activities, and TensorFlow refuses to add the two.
    """

    def cast(leaf: Any) -> Any:
        is_half = ops.is_tensor(leaf) and keras.backend.standardize_dtype(leaf.dtype) in ("float16", "bfloat16")
        return ops.cast(leaf, "float32") if is_half else leaf

    add(keras.tree.map_structure(cast, loss))
