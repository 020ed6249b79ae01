"""Shards weights and optimizer variables over the ranks on PyTorch, so that no rank holds all of them."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kerasdp.backends.torch.collectives import gather_by_group
from kerasdp.backends.torch.data_parallel import DataParallel
from kerasdp.backends.torch.private import (
    all_reduce_async,
    is_being_captured,
    reduce_scatter_async,
    storage_of,
    wait,
)
from kerasdp.config import Config
from kerasdp.contract import StepFunctions
from kerasdp.errors import UserError
from kerasdp.processes.devices import Devices
from kerasdp.run_state import ModelCache, RunState
from kerasdp.sharding import cut_axis, part_of, part_shape
from kerasdp.step.replica import compared_variables, held_in_words

# Largest number of bytes of several weights in one message. A larger weight is sent alone.
_MESSAGE_BYTES = 25 * 2**20
# Smallest number of messages for all weights: otherwise a small model would be gathered at once.
_MESSAGES = 8
# Optimizers of Keras (3.15) that update each element of a weight independently.
_BY_NUMBER = [
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "ScheduleFreeAdamW", "SGD",
]  # fmt: skip


class Parts:
    """Holds this rank's shards of a model's variables. `cut_axis` says which variables are sharded.

    While steps run, a sharded variable holds this rank's shard. Between steps, the variable holds the whole value,
    which callbacks and checkpoints read. `cut` and `gather` switch between the two states.

    Attributes:
        model: the built model.
        size: the number of ranks. Each rank holds one shard.
        holds_weights: whether the weights are sharded, and not only the optimizer variables.
        cut_weights: the weights that are sharded, or whose optimizer slots are sharded, each with the axis of the cut.
        axes: the axis of the cut for each of these weights, by the `id` of the weight.
        is_cut: whether the variables hold shards at present.
    """

    def __init__(self, model: Any, config: Config):
        """Finds the weights to shard.

        Args:
            model: the built model.
            config: the configuration of the run. Only `config.shard` is used.
        """
        from kerasdp.keras_compat.layers import is_next_value

        self.model, self.size, self._rank = model, dist.get_world_size(), dist.get_rank()
        self.holds_weights = config.shard == "weights"
        self._optimizer = getattr(model, "optimizer", None)
        weights = model.variables if self.holds_weights else model.trainable_variables
        # A constraint needs the whole weight. A next value is a maximum over all replicas.
        self.cut_weights = [
            (weight, axis)
            for weight in weights
            if weight.constraint is None
            and not is_next_value(weight)
            and (axis := cut_axis(weight.shape, self.size)) is not None
        ]
        self.axes = {id(weight): axis for weight, axis in self.cut_weights}
        # The sharded variables, each with its axis and the tensor of this rank's shard, which compiled steps hold.
        self._held: dict[int, tuple[Any, int, torch.Tensor]] = {}
        self.is_cut = False
        self._groups: dict[int, int] = {}

    @property
    def is_stale(self) -> bool:
        """Returns whether the model was compiled again. Then the shards belong to the old optimizer."""
        return getattr(self.model, "optimizer", None) is not self._optimizer

    def require_steps_of_keras(self, own: Iterable[str]) -> None:
        """Raises `UserError` if the model has user-defined steps, which do not support shards.

        Args:
            own: the names of the user-defined steps.
        """
        if names := ", ".join(sorted(own)):
            raise UserError(
                f"--shard={'weights' if self.holds_weights else 'optimizer'}: expected the steps of Keras' fit, "
                f"evaluate and predict. Received: {names} of {self.model.name}, a custom step; use --backend=jax"
            )

    def cut(self) -> None:
        """Replaces the whole value of each sharded variable by this rank's shard of the current value."""
        from kerasdp.keras_compat.layers import held_in_parts, raw_value

        if self.is_cut:
            return
        for variable, axis in self.to_cut():
            value = raw_value(variable)
            if tuple(value.shape) != tuple(variable.shape):
                raise UserError(f"--shard: the fit of another model still shards {variable.path}; end that fit first")
            part, known = part_of(value.detach(), axis, self._rank, self.size), self._held.get(id(variable))
            kept = part.clone(memory_format=torch.contiguous_format) if known is None else known[2].copy_(part)
            # Set the data of the parameter: Keras (3.15) also holds it in modules, where the whole value would stay.
            value.data = kept
            self._held[id(variable)] = variable, axis, kept
            held_in_parts(variable, True)
        self.is_cut = True
        if self.holds_weights and not self._groups:
            self._groups = _groups_of([weight for weight, _ in self.cut_weights])

    def gather(self) -> None:
        """Replaces this rank's shard in each variable by the whole value, one variable after the other.

        All processes must call this method together.
        """
        from kerasdp.keras_compat.layers import held_in_parts, raw_value

        for variable, axis, kept in self._held.values() if self.is_cut else ():
            raw_value(variable).data = self.whole([kept], [axis])[0]
            held_in_parts(variable, False)
        self.is_cut = False

    def read(self, variable: Any) -> Any:
        """Returns the whole value of a variable. Leaves the variable unchanged.

        All processes must call this method together.
        """
        if not self.is_cut or id(variable) not in self._held:
            return variable
        _, axis, kept = self._held[id(variable)]
        return self.whole([kept], [axis])[0]

    def to_cut(self) -> list[tuple[Any, int]]:
        """Returns the variables to shard, each with the axis of the cut.

        Raises:
            UserError: if the optimizer cannot update shards.
        """
        from kerasdp.keras_compat.layers import is_of_keras
        from kerasdp.keras_compat.optimizers import inner_optimizer, slots_by_weight

        found = self.cut_weights[:] if self.holds_weights else []
        if self._optimizer is None:
            return found
        optimizer = inner_optimizer(self._optimizer)
        kind = type(optimizer)
        if not is_of_keras(kind) or kind.__name__ not in _BY_NUMBER:
            raise UserError(
                f"--shard: {kind.__name__} may need whole weights, but with --backend=torch a rank holds only a "
                f"shard; use --backend=jax, or one of these optimizers: {', '.join(_BY_NUMBER)}"
            )
        of_weight = slots_by_weight(optimizer)
        for slot in optimizer.variables:
            _, weight = of_weight.get(id(slot), ("", None))
            if id(weight) in self.axes and tuple(slot.shape) == tuple(weight.shape):
                found.append((slot, self.axes[id(weight)]))
        return found

    def whole(self, parts: Sequence[torch.Tensor], axes: Sequence[int]) -> list[torch.Tensor]:
        """Gathers the shards of all ranks in one message. Returns the whole tensors. All shards must have one dtype."""
        return [one.movedim(0, axis).flatten(axis, axis + 1) for one, axis in zip(self._of_all_ranks(parts), axes)]

    def _of_all_ranks(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gathers one shard of each tensor from each rank, all in one message.

        Each result has the shape `(ranks, ...)`: the shards of one tensor, in the order of the ranks.
        """
        own = [part.reshape(-1) for part in parts]
        gathered = gather_by_group(torch.cat(own) if len(own) > 1 else own[0])
        found = gathered.split([part.numel() for part in parts], dim=1)
        return [one.reshape(self.size, *part.shape) for one, part in zip(found, parts)]

    def average(
        self, wholes: Sequence[torch.Tensor], axes: Sequence[int], dtype: torch.dtype
    ) -> Callable[[], list[torch.Tensor]]:
        """Starts to average tensors over the ranks in one message. Each rank gets only its shards of the averages.

        Args:
            wholes: the whole tensors on this rank.
            axes: the axis along which each tensor is cut.
            dtype: the dtype in which the tensors are sent.

        Returns:
            A function that waits for this rank's shards, and returns them.
        """
        rows = [whole.unflatten(axis, (self.size, -1)).movedim(axis, 0) for whole, axis in zip(wholes, axes)]
        shapes = [row.shape[1:] for row in rows]
        if is_being_captured(rows[0]):
            sent = torch.cat([row.to(dtype).reshape(self.size, -1) for row in rows], dim=1)
        else:  # copies each tensor only once
            sizes = [shape.numel() for shape in shapes]
            sent = rows[0].new_empty((self.size, sum(sizes)), dtype=dtype)
            for row, place in zip(rows, sent.split(sizes, dim=1)):
                place.unflatten(1, row.shape[1:]).copy_(row)
        return functools.partial(_parts_of_mean, reduce_scatter_async(sent.reshape(-1)), self.size, shapes)

    def whole_gradients(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the whole gradients of the trainable weights, so that a step can record them."""
        return [
            gradient if gradient is None or axis is None else self.whole([gradient], [axis])[0]
            for gradient, axis in zip(gradients, [self.axes.get(id(weight)) for weight in self.model.trainable_weights])
        ]

    def take(self, changed: list[tuple[Any, torch.Tensor, torch.Tensor]]) -> list[Any]:
        """Gathers the updated shards of weights that each rank holds whole. Returns all other changes.

        Args:
            changed: tuples of a variable, its current value and its new value. The new value may be only this rank's
                shard.
        """
        new = {id(variable): part for variable, value, part in changed if part.shape != value.shape}
        mine = [entry for entry in changed if id(entry[0]) in new]
        for _, same in itertools.groupby(mine, key=lambda entry: entry[1].dtype):
            for bucket in _bucketed(list(same), lambda entry: entry[1].nbytes, _MESSAGE_BYTES):
                axes = [self.axes[id(variable)] for variable, _, _ in bucket]
                parts = self._of_all_ranks([part for *_, part in bucket])
                for (_, value, _), axis, rows in zip(bucket, axes, parts):
                    value.unflatten(axis, (self.size, -1)).copy_(rows.movedim(0, axis))
        return [entry for entry in changed if id(entry[0]) not in new]

    def own(self, variable: Any, value: Any) -> Any:
        """Returns this rank's shard of a weight's value.

        Returns the value unchanged if it is already the shard, or if the weight is not sharded.
        """
        axis = self.axes.get(id(variable))
        if axis is None or value.shape[axis] != variable.shape[axis]:
            return value
        return part_of(value, axis, self._rank, self.size)

    @contextlib.contextmanager
    def updating(self, optimizer: Any) -> Iterator[None]:
        """Returns the context in which an optimizer updates this rank's shards like whole weights."""
        from kerasdp.keras_compat.layers import with_shapes
        from kerasdp.keras_compat.optimizers import updating_parts

        held = [*self.cut_weights, *((variable, axis) for variable, axis, _ in self._held.values())]
        shapes = {id(one): (one, part_shape(one.shape, axis, self.size)) for one, axis in held}
        parts = updating_parts(
            optimizer,
            lambda weight: id(weight) in self.axes,
            counts_wholes=self._rank == 0,
            add_up=lambda tensor: wait(all_reduce_async(tensor)),
        )
        with with_shapes(shapes.values()), parts:
            yield

    @contextlib.contextmanager
    def scope(self, values: list[tuple[Any, torch.Tensor]]) -> Iterator[Any]:
        """Returns a `keras.StatelessScope` that gathers weights when a layer reads them.

        One message gathers a group of weights. The group stays in memory until a layer reads a weight of another group.
        No whole weight is kept for the backward pass; see `_Reading.unkept`.
        """
        from kerasdp.keras_compat.layers import ScopeOfParts

        reading = _Reading(self, self._groups, values)
        with (
            torch.autograd.graph.saved_tensors_hooks(reading.unkept, reading.again),
            ScopeOfParts(values, reading.value) as scope,
        ):
            yield scope


class ShardedDataParallel(DataParallel):
    """Runs a replica of the model in each process, and shards some of the variables over the processes."""

    def __init__(self, devices: Devices, config: Config):
        super().__init__(devices, config)
        self._parts: ModelCache[Parts] = ModelCache()

    def parts_of(self, model: Any) -> Parts | None:
        """Returns the `Parts` of a model, or None if there is only one replica.

        After each `compile` of the model, the first call creates new `Parts`.
        """
        if self.split.num_replicas == 1:
            return None
        if (parts := self._parts.get(model)) is None or parts.is_stale:
            parts = Parts(model, self.config)
            self._parts.put(model, parts)
        return parts

    def gather_variables(self, model: Any) -> None:
        """Gathers the whole values of all variables in each process. See `Strategy`."""
        if (parts := self._parts.get(model)) is not None:
            parts.gather()

    def read(self, model: Any, variables: list[Any], take: Callable[[Any], Any] | None) -> list[Any]:
        """Calls `take` on the whole value of each variable, and returns the results. See `Strategy`."""
        parts = self._parts.get(model)
        wholes = variables if parts is None else map(parts.read, variables)
        return [take(whole) if take else None for whole in wholes]

    def diverged_variables(self, model: Any, state_only: bool = False) -> list[str]:
        """Returns the paths of variables that differ between replicas, except sharded weights. See `Strategy`."""
        parts = self._parts.get(model)
        cut = parts.axes if parts is not None and parts.is_cut and parts.holds_weights else ()
        return self.differing([each for each in compared_variables(model, state_only) if id(each) not in cut])

    def step_functions(self, model: Any, run_state: RunState) -> StepFunctions:
        """Returns the step functions. Their description says how many bytes a device holds. See `Strategy`."""
        functions = super().step_functions(model, run_state)
        held = held_in_words(model, self.config.shard, self.split.num_replicas)
        return dataclasses.replace(functions, description=held)


class _Saved(NamedTuple):
    """Describes a gathered weight that the backward pass needs, so that the weight can be gathered again."""

    key: tuple[int, torch.dtype]
    weight: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Reading:
    """Gathers weights when the forward pass reads them, and again when the backward pass needs them.

    Args:
        parts: the shards of the model.
        groups: the number of the message that gathers a sharded weight, by the `id` of the weight.
        values: the variables, each with its current value.
    """

    def __init__(self, parts: Parts, groups: dict[int, int], values: list[tuple[Any, torch.Tensor]]):
        self._parts, self._groups = parts, groups
        self._members: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        for variable, value in values:
            if id(variable) in groups:
                self._members.setdefault(groups[id(variable)], []).append((variable, value))
        # For each message and dtype: the weights that layers read in this dtype, with their current values.
        self._read: dict[tuple[int, torch.dtype], list[tuple[Any, torch.Tensor]]] = {}
        # For the last message: its number and dtype, the whole weights by `id`, and the weight of each memory block.
        self._key: Any = None
        self._wholes: dict[int, torch.Tensor] = {}
        self._storages: dict[int, int] = {}

    def value(self, variable: Any, value: torch.Tensor) -> torch.Tensor:
        """Returns the whole value of a sharded weight, cast to the compute dtype of its layer.

        If the variable is not sharded, returns `value` unchanged.
        """
        from kerasdp.keras_compat.layers import autocast

        if id(variable) not in self._groups:
            return value
        key = self._groups[id(variable)], autocast(variable, value[:0]).dtype
        if key not in self._read:
            own = self._members[key[0]]
            self._read[key] = [pair for pair in own if autocast(pair[0], pair[1][:0]).dtype == key[1]]
        return self._gathered(key)[id(variable)]

    def _gathered(self, key: tuple[int, torch.dtype]) -> dict[int, torch.Tensor]:
        if self._key != key:
            self._wholes, self._storages = {}, {}  # freed before the next weights are gathered
            own = self._read[key]
            axes = [self._parts.axes[id(weight)] for weight, _ in own]
            found = _Whole.apply(self._parts, axes, key[1], *(part for _, part in own))
            self._key, self._wholes = key, {id(weight): whole for (weight, _), whole in zip(own, found)}
            self._storages = {storage_of(whole): weight for weight, whole in self._wholes.items()}
        return self._wholes

    def unkept(self, tensor: torch.Tensor) -> Any:
        """Returns the object that PyTorch keeps for the backward pass instead of `tensor`.

        For a gathered weight, this is a `_Saved`, which holds no values. All other tensors are returned unchanged.
        """
        weight = self._storages.get(storage_of(tensor))
        if weight is None:
            return tensor
        return _Saved(self._key, weight, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def again(self, kept: Any) -> torch.Tensor:
        """Returns a tensor for the backward pass. `kept` is the object that `unkept` returned for this tensor."""
        if not isinstance(kept, _Saved):
            return kept
        with torch.no_grad():
            whole = self._gathered(kept.key)[kept.weight].detach()
        for axes in itertools.permutations(range(whole.dim())):
            turned = whole.permute(axes)
            if (turned.shape, turned.stride(), turned.storage_offset()) == kept[2:]:
                return turned
        return whole.as_strided(*kept[2:])


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, axes: list[int], dtype: torch.dtype, *own: torch.Tensor) -> Any:
        ctx.parts, ctx.axes, ctx.dtypes = parts, axes, [part.dtype for part in own]
        ctx.set_materialize_grads(False)
        return tuple(parts.whole([part.to(dtype) for part in own], axes))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        found: list[torch.Tensor | None] = [None] * len(gradients)
        wanted = [
            (place, gradient)
            for place, gradient in enumerate(gradients)
            if gradient is not None and ctx.needs_input_grad[3 + place]
        ]
        for dtype, same in itertools.groupby(wanted, key=lambda pair: ctx.dtypes[pair[0]]):
            places, own = zip(*same)
            take = ctx.parts.average(own, [ctx.axes[place] for place in places], dtype)
            for place, part in zip(places, take()):
                found[place] = part.to(dtype)
        return None, None, None, *found


def _groups_of(weights: list[Any]) -> dict[int, int]:
    """Groups consecutive weights into messages. Returns the number of each weight's message, by the weight's `id`."""

    from kerasdp.keras_compat.layers import raw_value

    def num_bytes(weight: Any) -> int:
        return raw_value(weight).nbytes

    most = min(_MESSAGE_BYTES, sum(map(num_bytes, weights)) // _MESSAGES)
    return {id(weight): number for number, group in enumerate(_bucketed(weights, num_bytes, most)) for weight in group}


def _bucketed(items: list[Any], num_bytes: Callable[[Any], int], most: int) -> Iterator[list[Any]]:
    """Yields lists of consecutive items with at most `most` bytes in total. A larger item is alone in its list."""
    bucket: list[Any] = []
    for item in items:
        if bucket and sum(map(num_bytes, bucket)) + num_bytes(item) > most:
            yield bucket
            bucket = []
        bucket.append(item)
    if bucket:
        yield bucket


def _parts_of_mean(sent: torch.Tensor, size: int, shapes: list[torch.Size]) -> list[torch.Tensor]:
    """Waits for the averages of tensors. Returns this rank's shards of the averages, in the given shapes."""
    total = wait(sent)
    if dist.get_backend() != "nccl":  # the values of each rank, not yet added
        total = functools.reduce(torch.add, total.reshape(size, -1).unbind())
    found = total.div_(size).split([shape.numel() for shape in shapes])
    return [one.reshape(shape) for one, shape in zip(found, shapes)]
