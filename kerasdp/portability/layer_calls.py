"""Makes the calls of all layers: the one place where something is done before and after what a layer does itself.

Random layers draw portably; what a step records is told. On several replicas, the losses that layers add (`add_loss`)
become those of the global batch, as on one device: what is a mean over the rows is averaged over the replicas, where
these have equally many. Anything else (a sum; the product of two means by which experts are balanced; an uneven batch)
is computed of the whole batch: the layer is called once more, on the gathered arguments of its call, for that loss
alone. Activity regularizers see the gathered outputs.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from kerasdp.errors import RunError, UserError
from kerasdp.keras_compat.layers import hook_add_loss, hook_calls
from kerasdp.keras_compat.patches import current_step, step_with
from kerasdp.keras_compat.random import draws_portably, given_seed_generator
from kerasdp.portability.random import portable_draws
from kerasdp.portability.replica_context import Adding, ReplicaContext, use

# The call of a layer, and what Keras' `add_loss` of a layer does with a loss.
Call = Callable[..., Any]
Add = Callable[[Any], None]


class AddedLosses:
    """Takes what layers add in a forward pass of one replica: `ReplicaContext.adds`."""

    def __init__(self, known: dict[int, Adding]):
        """`known`: the layers that add losses, by `id`."""
        self.known = known
        self.left: list[keras.layers.Layer] = []  # of whose call the losses are to be computed of the whole batch

    def is_exact(self, layer: keras.layers.Layer, context: ReplicaContext) -> bool:
        """Returns whether the mean over the replicas is what a layer adds, if it adds anything."""
        adding = self.known.get(id(layer))
        return adding is None or (adding.is_mean and context.is_even)

    def __call__(self, context: ReplicaContext, layer: keras.layers.Layer, loss: Any, add: Add) -> None:
        """Takes a loss; see `_take_added_loss`."""
        if id(layer) not in self.known:
            raise UserError(
                f"layer {layer.name} adds a loss that it did not add when the model was first called, in training, on "
                "a few rows: let it add one in each call in training, zero maybe, or train on one device"
            )
        if self.is_exact(layer, context):
            add(keras.tree.map_structure(functools.partial(_mean_of_replicas, context), loss))
        elif layer not in self.left:
            self.left.append(layer)


class FoundAdding:
    """Finds the layers that add losses, in trials: `ReplicaContext.adds`."""

    def __init__(self) -> None:
        self.layers: dict[int, keras.layers.Layer] = {}
        self.known: set[int] = set()  # those of earlier trials, by `id`
        self.arguments: dict[int, Any] = {}  # of their first calls

    def __call__(self, context: ReplicaContext, layer: keras.layers.Layer, loss: Any, add: Add) -> None:
        """Takes a loss; see `_take_added_loss`."""
        self.layers.setdefault(id(layer), layer)


def keep(context: ReplicaContext, layer: keras.layers.Layer, loss: Any, add: Add) -> None:
    """Lets Keras take a loss: in user-defined steps, whose losses are their own affair."""
    add(loss)


def hook_layers() -> None:
    """Lets this module make the calls of all layers, and take the losses that they add, from now on."""
    hook_calls(_make_call)
    hook_add_loss(_take_added_loss)


def _make_call(make: Call, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
    """Makes the call of a layer, or of another operation; `make`: what Keras does."""
    try:
        return _make_known_call(make, layer, *args, **kwargs)
    except Exception as error:
        other = None if isinstance(error, RunError) else _other_framework_of(layer)
        if other is None:
            raise
        raise UserError(
            f"layer {layer.name} calls {other} in a run of {keras.backend.backend()}; use keras.ops, which is the same "
            "on every backend"
        ) from error


_FRAMEWORKS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}


def _other_framework_of(layer: Any) -> str | None:
    """Returns the name of a framework, other than the backend, that the `call` of a user-defined layer refers to."""
    function = inspect.unwrap(getattr(layer, "function", getattr(type(layer), "call", None)) or len)
    if not isinstance(function, types.FunctionType) or function.__module__.startswith(("keras.", "kerasdp.")):
        return None
    known = inspect.getclosurevars(function)
    values = [*known.nonlocals.values(), *known.globals.values()]
    names = [
        getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", "") for value in values
    ]
    imported = {str(name).partition(".")[0] for name in (*names, *function.__code__.co_names)}
    others = sorted(_FRAMEWORKS[name] for name in _FRAMEWORKS.keys() & imported - {keras.backend.backend()})
    return " and ".join(others) or None


def _make_known_call(make: Call, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
    step = current_step()
    context: ReplicaContext | None = step.replica
    is_drawing = draws_portably(layer)
    is_plain = context is None and step.record is None and not is_drawing
    if is_plain or not isinstance(layer, keras.layers.Layer):
        return make(layer, *args, **kwargs)
    call = functools.partial(make, layer)
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
        if layer.activity_regularizer is not None and context.adds is not keep:
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
    """Calls a layer on this replica's rows, and once more on all rows for what it adds, if that is needed."""
    adds = context.adds
    if isinstance(adds, FoundAdding) and id(layer) in adds.known:
        _row_axes_of(layer, context, (args, kwargs))
        adds.arguments.setdefault(id(layer), (args, kwargs))
    if not isinstance(adds, AddedLosses) or adds.is_exact(layer, context):
        return call(*args, **kwargs)
    axes, numbers = _row_axes_of(layer, context, (args, kwargs)), context.numbers_of_calls()
    # What the call changes, the second one is to find as it was: seeds, say.
    changing = [(variable, ops.copy(variable.value)) for variable in layer.non_trainable_variables]
    begun = changing + [(variable, ops.convert_to_tensor(variable)) for variable in layer.trainable_variables]
    outputs = call(*args, **kwargs)
    if layer in adds.left:
        adds.left.remove(layer)
        leaves = keras.tree.flatten((args, kwargs))
        whole = [leaf if axis is None else context.whole(leaf, axis) for leaf, axis in zip(leaves, axes)]
        args, kwargs = keras.tree.pack_sequence_as((args, kwargs), whole)
        found = losses_of(layer, lambda: call(*args, **kwargs), context.of_repeat(numbers), begun)
        with use(None):
            layer.add_loss(found)
    return outputs


def _row_axes_of(layer: keras.layers.Layer, context: ReplicaContext, arguments: Any) -> list[Any]:
    """Returns where the rows are in each leaf of a call's arguments; None if nowhere."""
    name = f"the call of layer {layer.name}"
    return [
        context.row_axis(("added", id(layer)), leaf, name) if ops.is_tensor(leaf) else None
        for leaf in keras.tree.flatten(arguments)
    ]


def losses_of(
    layer: keras.layers.Layer, call: Callable[[], Any], context: ReplicaContext, values: list[tuple[Any, Any]]
) -> list[Any]:
    """Calls a layer, and returns what it adds itself; no variable changes.

    Args:
        layer: that `call` calls.
        call: its call.
        context: of the call.
        values: of the layer's variables.
    """
    found: list[Any] = []

    def take(_: ReplicaContext, adding: keras.layers.Layer, loss: Any, add: Add) -> None:
        if adding is layer:
            found.extend(keras.tree.flatten(loss))

    repeat = dataclasses.replace(context, adds=take, is_repeat=True, calling=[layer])
    with step_with(replica=repeat, record=None), keras.StatelessScope(values):
        call()
    return found


def _mean_of_replicas(context: ReplicaContext, loss: Any) -> Any:
    """Averages a number over the replicas, with the gradient for weights whose gradients are averaged as well."""
    if context.gather is None:
        return loss
    wide = ops.cast(loss, keras.backend.result_type(loss.dtype, "float32"))
    return ops.cast(ops.mean(context.gather(wide), axis=0), loss.dtype)


def _penalty(layer: keras.layers.Layer, context: ReplicaContext, output: Any) -> Any:
    """Returns what Keras is to add for an activity regularizer, which sees the global batch, as on one device.

    In micro-batches nothing: there it goes into `ReplicaContext.penalties`, since Keras' list of losses belongs to the
    layer, which with TensorFlow all replicas share while they are traced in turns.
    """
    axis = context.row_axis(("penalty", id(layer)), output, f"the activity regularizer of layer {layer.name}")
    whole, rows = context.whole(output, axis), output.shape[0]
    penalty = layer.activity_regularizer(whole) / whole.shape[0]  # by the samples, as Keras does
    if isinstance(context.adds, AddedLosses):
        return ops.divide_no_nan(penalty * rows, ops.cast(rows, penalty.dtype))
    context.penalties.append(penalty)
    return ops.zeros(())


def _take_added_loss(add_loss: Callable[..., None], layer: keras.layers.Layer, loss: Any) -> None:
    """Gives what a layer adds to the running pass of a replica; to Keras where there is none, or one program for all.

    Args:
        add_loss: what Keras does with it.
        layer: that adds it.
        loss: scalar tensors.
    """
    context: ReplicaContext | None = current_step().replica
    add: Add = functools.partial(add_loss, layer)
    if context is None or not context.is_trial:  # a trial asks how exact it is
        add = functools.partial(_add_in_float32, add)
    if context is None or context.rows is None:
        add(loss)
    elif penalties := context.regularized.get(id(layer)):  # Keras adds what its activity regularizer gave
        add(penalties.pop(0))
    elif context.adds is None:
        raise UserError(
            f"layer {layer.name} calls add_loss, with which it would count only one micro-batch: move that loss into "
            "the model's loss, or train with --strategy=data and without --accumulate"
        )
    else:
        # The call that can be repeated, also where that of the layer was called past Keras.
        context.adds(context, context.calling[-1] if context.calling else layer, loss, add)


def _add_in_float32(add: Add, loss: Any) -> None:
    """Adds a loss in float16 or bfloat16 as float32, as which jax and torch add it to the model's own.

    Keras (3.15) leaves penalties of activities in the type of the activities, and TensorFlow refuses to add the two.
    """

    def cast(leaf: Any) -> Any:
        is_half = ops.is_tensor(leaf) and keras.backend.standardize_dtype(leaf.dtype) in ("float16", "bfloat16")
        return ops.cast(leaf, "float32") if is_half else leaf

    add(keras.tree.map_structure(cast, loss))
