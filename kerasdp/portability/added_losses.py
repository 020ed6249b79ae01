"""Makes the losses that layers add (`add_loss`) those of the global batch on several replicas, as on one device.

What is a mean over the rows is averaged over the replicas, where these have equally many. Anything else (a sum; the
product of two means by which experts are balanced; an uneven batch) is computed of the whole batch: the layer is called
once more, on the gathered arguments of its call, for that loss alone. Activity regularizers see the gathered outputs.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import all_layers, has_mask, hook_add_loss, wrapped_calls, wrapped_regularizers
from kerasdp.portability import replica_context
from kerasdp.portability.replica_context import ReplicaContext
from kerasdp.portability.row_axes import FIRST, Adding, RowAxes

# What Keras' `add_loss` of a layer does with a loss.
Add = Callable[[Any], None]
# Rows of the calls that tell what is a mean, and by how much its halves must differ to tell anything.
_TRIAL_ROWS, _LEAST_DIFFERENCE = 32, 0.01
# For float16 and bfloat16 ten of the last bits. Too strict costs a recomputation; too loose costs accuracy.
_TOLERANCES = {"float32": 1e-5, "float64": 1e-10, "float16": 0.005, "bfloat16": 0.04}


class AddedLosses:
    """Takes what layers add in a forward pass of one replica: `ReplicaContext.adds`."""

    def __init__(self, known: dict[int, Adding]):
        """`known`: the layers that add losses, by `id`."""
        self.known = known
        self.left: list[keras.layers.Layer] = []  # of whose call the losses are to be computed of the whole batch

    def __call__(self, context: ReplicaContext, layer: keras.layers.Layer, loss: Any, add: Add) -> None:
        """Takes a loss; see `taking_added_losses`."""
        adding = self.known.get(id(layer))
        if adding is None:
            raise UserError(
                f"layer {layer.name} adds a loss that it did not add when the model was first called, in training, on "
                "a few rows: let it add one in each call in training, zero maybe, or train on one device"
            )
        if adding.is_mean and context.is_even:
            add(keras.tree.map_structure(functools.partial(_mean_of_replicas, context), loss))
        elif layer not in self.left:
            self.left.append(layer)


class FoundAdding:
    """Finds the layers that add losses, in a trial: `ReplicaContext.adds`."""

    def __init__(self) -> None:
        self.layers: dict[int, keras.layers.Layer] = {}
        self.arguments: dict[int, Any] = {}  # of their first calls

    def __call__(self, context: ReplicaContext, layer: keras.layers.Layer, loss: Any, add: Add) -> None:
        """Takes a loss; see `taking_added_losses`."""
        self.layers.setdefault(id(layer), layer)


def keep(context: ReplicaContext, layer: keras.layers.Layer, loss: Any, add: Add) -> None:
    """Lets Keras take a loss: in user-defined steps, whose losses are their own affair."""
    add(loss)


def take_added_loss(layer: keras.layers.Layer, loss: Any, add: Add) -> None:
    """Gives what a layer adds to the running pass of a replica; to Keras where there is none, or one program for all.

    Args:
        layer: that calls `add_loss`.
        loss: what it adds: scalar tensors.
        add: what Keras does with that.
    """
    context = replica_context.current()
    if context is None or not context.is_trial:  # a trial asks how exact it is
        add = functools.partial(_add_in_float32, add)
    if context is None or context.rows is None:
        add(loss)
    elif id(layer) in context.regularized:  # Keras adds what its activity regularizer gave
        context.regularized.remove(id(layer))
        add(loss)
    elif context.adds is None:
        raise UserError(
            f"layer {layer.name} calls add_loss, with which it would count only one micro-batch: move that loss into "
            "the model's loss, or train with --strategy=data and without --accumulate"
        )
    else:
        context.adds(context, layer, loss, add)


def _add_in_float32(add: Add, loss: Any) -> None:
    """Adds a loss in float16 or bfloat16 as float32, as which jax and torch add it to the model's own.

    Keras (3.15) leaves penalties of activities in the type of the activities, and TensorFlow refuses to add the two.
    """

    def cast(leaf: Any) -> Any:
        is_half = ops.is_tensor(leaf) and keras.backend.standardize_dtype(leaf.dtype) in ("float16", "bfloat16")
        return ops.cast(leaf, "float32") if is_half else leaf

    add(keras.tree.map_structure(cast, loss))


def _watched_calls(layers: list[keras.layers.Layer]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which layers that add losses compute them of the whole batch, where that is needed."""
    return wrapped_calls(layers, functools.partial(functools.partial, _call))


def _call(layer: keras.layers.Layer, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    context = replica_context.current()
    adds = None if context is None else context.adds
    if context is None or not isinstance(adds, (AddedLosses, FoundAdding)):
        return call(*args, **kwargs)
    if isinstance(adds, FoundAdding):
        _row_axes_of(layer, context, (args, kwargs))
        adds.arguments.setdefault(id(layer), (args, kwargs))
        return call(*args, **kwargs)
    if adds.known[id(layer)].is_mean and context.is_even:
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
        found = _losses_of(layer, lambda: call(*args, **kwargs), context.of_repeat(numbers), begun)
        with replica_context.use(None):
            layer.add_loss(found)
    return outputs


def _row_axes_of(layer: keras.layers.Layer, context: ReplicaContext, arguments: Any) -> list[Any]:
    """Returns where the rows are in each leaf of a call's arguments; None if nowhere."""
    name = f"the call of layer {layer.name}"
    return [
        context.row_axis(("added", id(layer)), leaf, name) if ops.is_tensor(leaf) else None
        for leaf in keras.tree.flatten(arguments)
    ]


def _losses_of(
    layer: keras.layers.Layer, call: Callable[[], Any], context: ReplicaContext, values: list[tuple[Any, Any]]
) -> list[Any]:
    """Calls a layer, and returns what it adds itself; no variable changes."""
    found: list[Any] = []

    def take(_: ReplicaContext, adding: keras.layers.Layer, loss: Any, add: Add) -> None:
        if adding is layer:
            found.extend(keras.tree.flatten(loss))

    with replica_context.use(dataclasses.replace(context, adds=take, is_repeat=True)), keras.StatelessScope(values):
        call()
    return found


def _mean_of_replicas(context: ReplicaContext, loss: Any) -> Any:
    """Averages a number over the replicas, with the gradient for weights whose gradients are averaged as well."""
    if context.gather is None:
        return loss
    wide = ops.cast(loss, keras.backend.result_type(loss.dtype, "float32"))
    return ops.cast(ops.mean(context.gather(wide), axis=0), loss.dtype)


def is_mean_over_rows(layer: keras.layers.Layer, arguments: Any, axes: RowAxes) -> bool:
    """Returns whether what a layer adds surely is a mean over the rows: it is tried, with random weights and inputs.

    Args:
        layer: built, and made `portable`.
        arguments: of a call, for their shapes and sizes.
        axes: where the rows are in them.
    """
    known = iter(axes.of(("added", id(layer))))
    places = [next(known) if ops.is_tensor(leaf) else None for leaf in keras.tree.flatten(arguments)]
    if any(place not in (None, FIRST) for place in places) or any(map(has_mask, keras.tree.flatten(arguments))):
        return False
    with contextlib.suppress(Exception):  # user-defined, on numbers that it may not expect
        return all(_is_mean_in_trial(layer, arguments, places, np.random.RandomState(seed)) for seed in range(3))
    return False


def _is_mean_in_trial(layer: keras.layers.Layer, arguments: Any, axes: list[Any], random: Any) -> bool:
    def numbers_like(tensor: Any, shape: tuple[int, ...]) -> Any:
        array = ops.convert_to_numpy(ops.stop_gradient(ops.cast(tensor, "float32"))).astype("float64")
        return random.normal(0.0, float(np.sqrt(np.mean(np.square(array)))) or 0.1, shape)

    def rows_like(leaf: Any) -> Any:
        """Returns other rows than those of the sample, which may all be full where others are padded, say."""
        shape, name = (_TRIAL_ROWS, *leaf.shape[1:]), keras.backend.standardize_dtype(leaf.dtype)
        if "float" in name:
            numbers = numbers_like(leaf, shape)
            numbers[_TRIAL_ROWS // 2 :] *= 2  # for halves that differ
            for length in range(1, len(shape) + 1):  # rows, tokens and numbers that are zero
                sizes = shape[:length] + (1,) * (len(shape) - length)
                numbers = numbers * (random.uniform(size=sizes) >= 0.15)
            return ops.convert_to_tensor(numbers, dtype=leaf.dtype)
        largest = 1 if name == "bool" else max(int(ops.convert_to_numpy(leaf).max()), 1)
        return ops.convert_to_tensor(random.randint(0, largest + 1, shape), dtype=leaf.dtype)

    leaves = [leaf if axis is None else rows_like(leaf) for leaf, axis in zip(keras.tree.flatten(arguments), axes)]
    values = [
        (weight, ops.convert_to_tensor(numbers_like(weight.value, weight.shape), dtype=weight.dtype))
        for weight in layer.trainable_variables
    ] + [(variable, ops.copy(variable.value)) for variable in layer.non_trainable_variables]

    def losses(first: int, end: int) -> list[Any]:
        own = [leaf if axis is None else leaf[first:end] for leaf, axis in zip(leaves, axes)]
        args, kwargs = keras.tree.pack_sequence_as(arguments, own)
        size = end - first
        context = ReplicaContext(
            num_replicas=1, num_rows=size, rows=size, first_row=first, total_rows=_TRIAL_ROWS, is_trial=True
        )
        return _losses_of(layer, lambda: layer.call(*args, **kwargs), context, values)

    half = _TRIAL_ROWS // 2
    parts = losses(0, _TRIAL_ROWS), losses(0, half), losses(half, _TRIAL_ROWS)
    is_alike = len(parts[0]) == len(parts[1]) == len(parts[2]) > 0
    return is_alike and all(map(_is_mean_of, *parts))


def _is_mean_of(whole: Any, first: Any, second: Any) -> bool:
    name = keras.backend.standardize_dtype(whole.dtype)
    tolerance, wide = _TOLERANCES.get(name, 0.0), keras.backend.result_type(name, "float32")
    # TensorFlow (2.21) makes no array of one number in bfloat16.
    parts = [ops.convert_to_numpy(ops.cast(ops.stop_gradient(each), wide)) for each in (whole, first, second)]
    numbers = [float(np.sum(part)) for part in parts]
    size = max(map(abs, numbers))
    is_telling = np.isfinite(numbers).all() and abs(numbers[1] - numbers[2]) > _LEAST_DIFFERENCE * size
    return bool(is_telling and abs(numbers[0] - (numbers[1] + numbers[2]) / 2) <= tolerance * size)


class WholeBatchPenalties:
    """Activity regularizers that see the global batch, as on one device, not one replica's padded rows.

    What they give goes into `ReplicaContext.penalties`, not into Keras' list of losses: that list belongs to the
    layer, which with TensorFlow all replicas share while they are traced in turns.
    """

    def __init__(self, model: keras.Model):
        self.regularized = [layer for layer in all_layers(model) if layer.activity_regularizer is not None]
        hook_add_loss(take_added_loss)

    @contextlib.contextmanager
    def active(self, adding: Iterable[Adding] = ()) -> Iterator[None]:
        """Returns the context of a forward pass on several replicas. `adding`: the layers that add losses."""
        penalizing = functools.partial(functools.partial, self._penalize)
        with wrapped_regularizers(self.regularized, penalizing), _watched_calls([each.layer for each in adding]):
            yield

    def _penalize(self, layer: keras.layers.Layer, regularizer: Any, output: Any) -> Any:
        context = replica_context.current()
        if context is None or context.rows is None:
            return regularizer(output)
        axis = context.row_axis(("penalty", id(layer)), output, f"the activity regularizer of layer {layer.name}")
        whole = context.whole(output, axis)
        penalty = regularizer(whole) / whole.shape[0]  # by the samples, as Keras does
        context.regularized.append(id(layer))
        if isinstance(context.adds, AddedLosses):
            return penalty * output.shape[0]  # by which Keras divides it
        context.penalties.append(penalty)
        return keras.ops.zeros(())
