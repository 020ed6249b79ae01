"""PyTorch: weights and variables of the optimizer of which each rank holds a part, and no rank the whole."""

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

# Bytes of several weights that travel in one message; what is larger travels alone.
_MESSAGE_BYTES = 25 * 2**20
# A message holds at most this part of all weights, or a small model would be gathered at once.
_MESSAGES = 8
# Optimizers of Keras (3.15) that update each number of a weight by itself.
_BY_NUMBER = [
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "ScheduleFreeAdamW", "SGD",
]  # fmt: skip


class Parts:
    """What this rank holds of the variables of one model that are cut, by `cut_axis`.

    A variable that is cut holds this rank's part while steps run, and the whole in between, where callbacks and
    checkpoints read it: `cut` and `gather` change from one to the other.

    Attributes:
        model: built.
        size: how many ranks hold a part each.
        holds_weights: whether the weights are cut, too.
        cut_weights: each with the axis along which it is cut, or what the optimizer keeps for it.
        axes: of these, by the `id` of the weight.
        is_cut: whether steps run.
    """

    def __init__(self, model: Any, config: Config):
        """`config`: `shard` is read."""
        from kerasdp.keras_compat.layers import is_next_value

        self.model, self.size, self._rank = model, dist.get_world_size(), dist.get_rank()
        self.holds_weights = config.shard == "weights"
        self._optimizer = getattr(model, "optimizer", None)
        weights = model.variables if self.holds_weights else model.trainable_variables
        # A constraint looks at all of its weight, and a maximum is taken over all replicas.
        self.cut_weights = [
            (weight, axis)
            for weight in weights
            if weight.constraint is None
            and not is_next_value(weight)
            and (axis := cut_axis(weight.shape, self.size)) is not None
        ]
        self.axes = {id(weight): axis for weight, axis in self.cut_weights}
        # What was cut, with its axis and the tensor of this rank's part, which compiled steps know.
        self._held: dict[int, tuple[Any, int, torch.Tensor]] = {}
        self.is_cut = False
        self._groups: dict[int, int] = {}

    @property
    def is_stale(self) -> bool:
        """Returns whether the model was compiled again since, so that other variables are cut."""
        return getattr(self.model, "optimizer", None) is not self._optimizer

    def require_steps_of_keras(self, own: Iterable[str]) -> None:
        """Raises `UserError` if there are user-defined steps, by their names: they know nothing of parts."""
        if names := ", ".join(sorted(own)):
            raise UserError(
                f"--shard={'weights' if self.holds_weights else 'optimizer'}: --backend=torch knows the steps of fit, "
                f"evaluate and predict as Keras has them. Received: {names} of {self.model.name}; use --backend=jax"
            )

    def cut(self) -> None:
        """Lets each variable hold a part of it; what was assigned to the whole is kept."""
        from kerasdp.keras_compat.layers import held_in_parts, raw_value

        if self.is_cut:
            return
        for variable, axis in self.to_cut():
            value = raw_value(variable)
            if tuple(value.shape) != tuple(variable.shape):
                raise UserError(f"--shard: {variable.path} is held in parts by the training of another model just now")
            part, known = part_of(value.detach(), axis, self._rank, self.size), self._held.get(id(variable))
            kept = part.clone(memory_format=torch.contiguous_format) if known is None else known[2].copy_(part)
            # Of the parameter itself, which Keras (3.15) holds in modules, too: there the whole would stay.
            value.data = kept
            self._held[id(variable)] = variable, axis, kept
            held_in_parts(variable, True)
        self.is_cut = True
        if self.holds_weights and not self._groups:
            self._groups = _groups_of([weight for weight, _ in self.cut_weights])

    def gather(self) -> None:
        """Lets each variable hold all of it, one after the other. Called by all processes together."""
        from kerasdp.keras_compat.layers import held_in_parts, raw_value

        for variable, axis, kept in self._held.values() if self.is_cut else ():
            raw_value(variable).data = self.whole([kept], [axis])[0]
            held_in_parts(variable, False)
        self.is_cut = False

    def read(self, variable: Any) -> Any:
        """Returns the whole value of a variable, which stays as it is. Called by all processes together."""
        if not self.is_cut or id(variable) not in self._held:
            return variable
        _, axis, kept = self._held[id(variable)]
        return self.whole([kept], [axis])[0]

    def to_cut(self) -> list[tuple[Any, int]]:
        """Returns the variables that are to be cut, each with its axis.

        Raises:
            UserError: if the optimizer cannot update parts.
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
                f"--shard: {kind.__name__} may look at all numbers of a weight, of which a rank holds a part with "
                f"--backend=torch; use --backend=jax, or an --optimizer of {', '.join(_BY_NUMBER)}"
            )
        of_weight = slots_by_weight(optimizer)
        for slot in optimizer.variables:
            _, weight = of_weight.get(id(slot), ("", None))
            if id(weight) in self.axes and tuple(slot.shape) == tuple(weight.shape):
                found.append((slot, self.axes[id(weight)]))
        return found

    def whole(self, parts: Sequence[torch.Tensor], axes: Sequence[int]) -> list[torch.Tensor]:
        """Returns the wholes of some parts of one type, by one message."""
        return [one.movedim(0, axis).flatten(axis, axis + 1) for one, axis in zip(self._of_all_ranks(parts), axes)]

    def _of_all_ranks(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns these parts of all ranks, each `(ranks, ...)`, by one message."""
        own = [part.reshape(-1) for part in parts]
        gathered = gather_by_group(torch.cat(own) if len(own) > 1 else own[0])
        found = gathered.split([part.numel() for part in parts], dim=1)
        return [one.reshape(self.size, *part.shape) for one, part in zip(found, parts)]

    def average(
        self, wholes: Sequence[torch.Tensor], axes: Sequence[int], dtype: torch.dtype
    ) -> Callable[[], list[torch.Tensor]]:
        """Starts to average tensors over the ranks, of which each gets its parts; by one message.

        Args:
            wholes: on this rank.
            axes: along which they are cut.
            dtype: in which they are sent.

        Returns:
            A function that waits for this rank's parts.
        """
        rows = [whole.unflatten(axis, (self.size, -1)).movedim(axis, 0) for whole, axis in zip(wholes, axes)]
        shapes = [row.shape[1:] for row in rows]
        if is_being_captured(rows[0]):
            sent = torch.cat([row.to(dtype).reshape(self.size, -1) for row in rows], dim=1)
        else:  # each is copied once
            sizes = [shape.numel() for shape in shapes]
            sent = rows[0].new_empty((self.size, sum(sizes)), dtype=dtype)
            for row, place in zip(rows, sent.split(sizes, dim=1)):
                place.unflatten(1, row.shape[1:]).copy_(row)
        return functools.partial(_parts_of_mean, reduce_scatter_async(sent.reshape(-1)), self.size, shapes)

    def whole_gradients(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the whole gradients of the trained weights, for what is recorded of them."""
        return [
            gradient if gradient is None or axis is None else self.whole([gradient], [axis])[0]
            for gradient, axis in zip(gradients, [self.axes.get(id(weight)) for weight in self.model.trainable_weights])
        ]

    def take(self, changed: list[tuple[Any, torch.Tensor, torch.Tensor]]) -> list[Any]:
        """Gives weights that are whole on each rank what all ranks have made of their parts; returns the others.

        `changed`: variables, each with what it holds and with its new value, which may be this rank's part alone.
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
        """Returns this rank's part of a value of a weight; the value itself if it is the part, or there are none."""
        axis = self.axes.get(id(variable))
        if axis is None or value.shape[axis] != variable.shape[axis]:
            return value
        return part_of(value, axis, self._rank, self.size)

    @contextlib.contextmanager
    def updating(self, optimizer: Any) -> Iterator[None]:
        """Returns the context in which an optimizer updates this rank's parts, as if it saw the wholes."""
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
        """Returns a `keras.StatelessScope` in which weights are gathered where they are read.

        Those of a message are there until others are read. For the backward pass none is kept: see `unkept`.
        """
        from kerasdp.keras_compat.layers import ScopeOfParts

        reading = _Reading(self, self._groups, values)
        with (
            torch.autograd.graph.saved_tensors_hooks(reading.unkept, reading.again),
            ScopeOfParts(values, reading.value) as scope,
        ):
            yield scope


class ShardedDataParallel(DataParallel):
    """A replica of the model in each process, which holds some of its variables in parts between two steps."""

    def __init__(self, devices: Devices, config: Config):
        super().__init__(devices, config)
        self._parts: ModelCache[Parts] = ModelCache()

    def parts_of(self, model: Any) -> Parts | None:
        """Returns what is cut of a model, found once more when it is compiled again; None on one device."""
        if self.split.num_replicas == 1:
            return None
        if (parts := self._parts.get(model)) is None or parts.is_stale:
            parts = Parts(model, self.config)
            self._parts.put(model, parts)
        return parts

    def gather_variables(self, model: Any) -> None:
        """See `Strategy`."""
        if (parts := self._parts.get(model)) is not None:
            parts.gather()

    def read(self, model: Any, variables: list[Any], take: Callable[[Any], Any] | None) -> list[Any]:
        """See `Strategy`."""
        parts = self._parts.get(model)
        wholes = variables if parts is None else map(parts.read, variables)
        return [take(whole) if take else None for whole in wholes]

    def diverged_variables(self, model: Any, state_only: bool = False) -> list[str]:
        """See `Strategy`."""
        parts = self._parts.get(model)
        cut = parts.axes if parts is not None and parts.is_cut and parts.holds_weights else ()
        return self.differing([each for each in compared_variables(model, state_only) if id(each) not in cut])

    def step_functions(self, model: Any, run_state: RunState) -> StepFunctions:
        """See `Strategy`."""
        functions = super().step_functions(model, run_state)
        held = held_in_words(model, self.config.shard, self.split.num_replicas)
        return dataclasses.replace(functions, description=held)


class _Saved(NamedTuple):
    """Stands for a tensor that a backward pass needs, and that is gathered again for it."""

    key: tuple[int, torch.dtype]
    weight: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Reading:
    """Gathers weights where one pass reads them, and again where its backward pass needs them.

    Args:
        parts: of the model.
        groups: the number of the message of each weight that is cut, by its `id`.
        values: what variables hold.
    """

    def __init__(self, parts: Parts, groups: dict[int, int], values: list[tuple[Any, torch.Tensor]]):
        self._parts, self._groups = parts, groups
        self._members: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        for variable, value in values:
            if id(variable) in groups:
                self._members.setdefault(groups[id(variable)], []).append((variable, value))
        # Of each message and type: the weights that layers read so, and what they hold.
        self._read: dict[tuple[int, torch.dtype], list[tuple[Any, torch.Tensor]]] = {}
        # Of the message that came last: its number and type, the weights by `id`, and whose memory is whose.
        self._key: Any = None
        self._wholes: dict[int, torch.Tensor] = {}
        self._storages: dict[int, int] = {}

    def value(self, variable: Any, value: torch.Tensor) -> torch.Tensor:
        """Returns the whole of a weight, in the type that its layer computes in; else the value itself."""
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
            self._wholes, self._storages = {}, {}  # before others come
            own = self._read[key]
            axes = [self._parts.axes[id(weight)] for weight, _ in own]
            found = _Whole.apply(self._parts, axes, key[1], *(part for _, part in own))
            self._key, self._wholes = key, {id(weight): whole for (weight, _), whole in zip(own, found)}
            self._storages = {storage_of(whole): weight for weight, whole in self._wholes.items()}
        return self._wholes

    def unkept(self, tensor: torch.Tensor) -> Any:
        """Returns what is kept in place of a tensor: of a weight that was gathered, only which one it is."""
        weight = self._storages.get(storage_of(tensor))
        if weight is None:
            return tensor
        return _Saved(self._key, weight, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def again(self, kept: Any) -> torch.Tensor:
        """Returns the tensor for which `unkept` has kept something."""
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
    """Returns the number of the message in which each of some weights travels, by its `id`: neighbours together."""

    from kerasdp.keras_compat.layers import raw_value

    def num_bytes(weight: Any) -> int:
        return raw_value(weight).nbytes

    most = min(_MESSAGE_BYTES, sum(map(num_bytes, weights)) // _MESSAGES)
    return {id(weight): number for number, group in enumerate(_bucketed(weights, num_bytes, most)) for weight in group}


def _bucketed(items: list[Any], num_bytes: Callable[[Any], int], most: int) -> Iterator[list[Any]]:
    """Yields items in lists of so many bytes together at most; one that has more is alone."""
    bucket: list[Any] = []
    for item in items:
        if bucket and sum(map(num_bytes, bucket)) + num_bytes(item) > most:
            yield bucket
            bucket = []
        bucket.append(item)
    if bucket:
        yield bucket


def _parts_of_mean(sent: torch.Tensor, size: int, shapes: list[torch.Size]) -> list[torch.Tensor]:
    """Waits for averages of tensors; returns the parts of this rank, by their shapes."""
    total = wait(sent)
    if dist.get_backend() != "nccl":  # what each rank has given, not added yet
        total = functools.reduce(torch.add, total.reshape(size, -1).unbind())
    found = total.div_(size).split([shape.numel() for shape in shapes])
    return [one.reshape(shape) for one, shape in zip(found, shapes)]
