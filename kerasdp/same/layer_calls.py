"""Makes the calls of all layers: the one place where something is done before and after what a layer does itself.

Random layers draw portably; what a step records is told. On several replicas, a layer that adds losses (`add_loss`),
that assigns to a variable (a running maximum, a codebook), or mixes the rows, is called on all of them, as on one
device: its arguments are gathered, and of its outputs the replica takes its own rows. Activity
regularizers see the gathered outputs.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from kerasdp.errors import RunError, UserError
from kerasdp.keras_compat.layers import call_of, hook_add_loss, hook_calls, seed_variables
from kerasdp.keras_compat.patches import current_step
from kerasdp.keras_compat.random import draws_portably, given_seed_generator
from kerasdp.same.random import portable_draws
from kerasdp.same.replica_context import ReplicaContext, use

# The call of a layer.
Call = Callable[..., Any]


class Found:
    """Finds, in trials, the layers that add losses, and those that assign to variables: `ReplicaContext.found`.

    Attributes:
        adding: layers by `id`.
        assigning: layers by `id`, each with the variables of the model to which it, and no layer within it, assigns.
        whole: the layers, by `id`, that will be called with all rows, and so will the layers within: it is asked where
            the rows are in their arguments and outputs.
        scope: of the trial: its current values are what was assigned.
    """

    def __init__(self) -> None:
        self.adding: dict[int, keras.layers.Layer] = {}
        self.assigning: dict[int, tuple[keras.layers.Layer, dict[int, keras.Variable]]] = {}
        self.whole: set[int] = set()
        self.scope = keras.StatelessScope()
        self._assigned: dict[int, Any] = {}

    def keeping(self) -> dict[int, list[keras.Variable]]:
        """Returns, by the `id` of layers, the variables to which they assign what may depend on the rows."""
        return {
            key: list(variables.values())
            for key, (layer, variables) in self.assigning.items()
            if not isinstance(layer, keras.layers.SpectralNormalization)  # which assigns what depends on weights alone
        }

    def call(
        self, call: Call, layer: keras.layers.Layer, context: ReplicaContext, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Calls a layer, and notes what it does."""
        is_asked = id(layer) in self.whole and not any(id(outer) in self.whole for outer in context.calling[:-1])
        if is_asked:
            _row_axes_in("arguments", layer, context, (args, kwargs))
        seeds = {id(variable) for variable in seed_variables(layer)}
        variables = [variable for variable in layer.variables if id(variable) not in seeds]
        before = [self.scope.get_current_value(variable) for variable in variables]
        outputs = call(*args, **kwargs)
        for variable, old in zip(variables, before):
            new = self.scope.get_current_value(variable)
            if new is not old and new is not self._assigned.get(id(variable)):
                self._assigned[id(variable)] = new
                self.assigning.setdefault(id(layer), (layer, {}))[1][id(variable)] = variable
        if is_asked:
            _row_axes_in("outputs", layer, context, outputs)
        return outputs


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


def other_frameworks_of(function: Callable[..., Any], frameworks: Mapping[str, str] = FRAMEWORKS) -> str | None:
    """Returns the names of frameworks, other than the backend, that a user-defined function refers to."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or function.__module__.startswith(("keras.", "kerasdp.")):
        return None
    known = inspect.getclosurevars(function)
    values = [*known.nonlocals.values(), *known.globals.values()]
    names = [
        getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", "") for value in values
    ]
    imported = {str(name).partition(".")[0] for name in (*names, *function.__code__.co_names)}
    within = [each for each in function.__code__.co_consts if isinstance(each, types.CodeType)]
    for code in within:  # of functions within it
        held = [known.nonlocals.get(name, function.__globals__.get(name)) for name in code.co_names]
        imported |= {getattr(value, "__name__", "") for value in held if isinstance(value, types.ModuleType)}
        within += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    others = sorted(frameworks[name] for name in frameworks.keys() & imported - {keras.backend.backend()})
    return " and ".join(others) or None


def _make_known_call(make: Call, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
    step = current_step()
    context: ReplicaContext | None = step.replica
    is_drawing = draws_portably(layer)
    own_call = call_of(layer)
    is_plain = context is None and step.record is None and not is_drawing and own_call is None
    if is_plain or not isinstance(layer, keras.layers.Layer):
        return make(layer, *args, **kwargs)
    call = functools.partial(make, layer)
    if own_call is not None:
        call = functools.partial(own_call, call, layer)
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
        if layer.activity_regularizer is not None and not context.is_own_step:
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
    axes = context.row_axes
    if context.found is not None:
        return context.found.call(call, layer, context, args, kwargs)
    # A micro-batch knows no other rows; within a layer that is called on all rows there are no others.
    if axes is None or not context.replicas or context.is_micro_batch or not axes.couples(layer):
        return call(*args, **kwargs)

    def each(function: Callable[[Any, Any], Any], kind: str, tensors: Any) -> Any:
        places = _row_axes_in(kind, layer, context, tensors)
        leaves = [
            leaf if axis is None else function(leaf, axis) for leaf, axis in zip(keras.tree.flatten(tensors), places)
        ]
        return keras.tree.pack_sequence_as(tensors, leaves)

    gather = functools.partial(context.whole, gather_rows=context.rows_of_all)
    args, kwargs = each(gather, "arguments", (args, kwargs))
    with use(context.of_whole()):
        outputs = call(*args, **kwargs)
    for variable in axes.keeping.get(id(layer), ()):
        is_float = "float" in keras.backend.standardize_dtype(variable.dtype)
        # Torch differentiates with what a trained weight is now.
        if context.gather is not None and is_float and not variable.trainable:
            # All replicas computed it, on GPUs with sums in any order.
            variable.assign(context.gather(ops.stop_gradient(ops.convert_to_tensor(variable)))[0])
    return each(context.own_part, "outputs", outputs)


def _row_axes_in(kind: str, layer: keras.layers.Layer, context: ReplicaContext, tensors: Any) -> list[Any]:
    """Returns where the rows are in each leaf of a layer's arguments or outputs, its `kind`; None if nowhere."""
    name = f"the call of layer {layer.name}"
    return [
        context.row_axis((kind, id(layer)), leaf, name) if ops.is_tensor(leaf) else None
        for leaf in keras.tree.flatten(tensors)
    ]


def _penalty(layer: keras.layers.Layer, context: ReplicaContext, output: Any) -> Any:
    """Returns what Keras is to add for an activity regularizer, which sees the global batch, as on one device."""
    axis = context.row_axis(("penalty", id(layer)), output, f"the activity regularizer of layer {layer.name}")
    whole, rows = context.whole(output, axis), output.shape[0]
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
        if penalties := context.regularized.get(id(layer)):  # Keras adds what its activity regularizer gave
            loss = penalties.pop(0)
        elif context.is_micro_batch:
            raise UserError(
                f"layer {layer.name} calls add_loss, with which it would count only one micro-batch: move that loss "
                "into the model's loss, or train with --strategy=data and without --accumulate"
            )
        else:
            # The call that can be repeated, also where that of the layer was called past Keras.
            adding = context.calling[-1] if context.calling else layer
            if context.found is not None:
                context.found.adding.setdefault(id(adding), adding)
                return
            _require_known(adding, context)
    add: Callable[[Any], None] = functools.partial(add_loss, layer)
    if (added := current_step().adding) is not None:
        keras_add = add
        add = lambda loss: added.append((keras_add, loss))  # noqa: E731
    _add_in_float32(add, loss)


def _require_known(layer: keras.layers.Layer, context: ReplicaContext) -> None:
    """Raises `UserError` for a layer that adds a loss, but did not when the model was tried."""
    axes = context.row_axes
    if not context.is_own_step and axes is not None and id(layer) not in axes.adding:
        raise UserError(
            f"layer {layer.name} adds a loss that it did not add when the model was first called, in training, on "
            "a few rows: let it add one in each call in training, zero maybe, or train on one device"
        )


def _add_in_float32(add: Callable[[Any], None], loss: Any) -> None:
    """Adds a loss in float16 or bfloat16 as float32, as which jax and torch add it to the model's own.

    Keras (3.15) leaves penalties of activities in the type of the activities, and TensorFlow refuses to add the two.
    """

    def cast(leaf: Any) -> Any:
        is_half = ops.is_tensor(leaf) and keras.backend.standardize_dtype(leaf.dtype) in ("float16", "bfloat16")
        return ops.cast(leaf, "float32") if is_half else leaf

    add(keras.tree.map_structure(cast, loss))
