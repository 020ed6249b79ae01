"""Tells a layer which rows of the global batch its replica holds, and where a tensor has them; gathers those of all."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np

from kerasdp.data.sampling import ReplicaRows
from kerasdp.errors import UserError
from kerasdp.keras_compat.patches import current_step, step_with


class RowAxis(NamedTuple):
    """Where the rows of a batch are in a tensor.

    Attributes:
        axis: that holds them, alone or folded with others.
        is_inner: whether they are folded as `(others, rows)`; else as `(rows, others)`.
    """

    axis: int = 0
    is_inner: bool = False

    def rows_first(self, tensor: Any, num_rows: int) -> Any:
        """Moves the rows to axis 0, as `(rows, others)` where they are folded.

        Args:
            tensor: any.
            num_rows: in the tensor.
        """
        from keras import ops

        if self.axis:
            tensor = ops.moveaxis(tensor, self.axis, 0)
        return self._refolded(tensor, tensor.shape[0] // num_rows, num_rows) if self.is_inner else tensor

    def rows_back(self, tensor: Any, num_rows: int) -> Any:
        """Undoes `rows_first`; there may be more or fewer rows by now."""
        from keras import ops

        if self.is_inner:
            tensor = self._refolded(tensor, num_rows, tensor.shape[0] // num_rows)
        return ops.moveaxis(tensor, 0, self.axis) if self.axis else tensor

    def joined(self, tensors: list[Any], counts: list[int]) -> Any:
        """Joins tensors of some rows each to one of all rows; `counts`: rows of each tensor."""
        from keras import ops

        whole = ops.concatenate([self.rows_first(tensor, count) for tensor, count in zip(tensors, counts)])
        return self.rows_back(whole, sum(counts))

    @staticmethod
    def _refolded(tensor: Any, outer: int, inner: int) -> Any:
        from keras import ops

        shape = tensor.shape[1:]
        return ops.reshape(ops.swapaxes(ops.reshape(tensor, (outer, inner, *shape)), 0, 1), (outer * inner, *shape))

    def indices(self, size: int, num_rows: int, first_row: Any, total_rows: int) -> Any:
        """Returns where the numbers of a shard are in the whole tensor, along the axis; int32, shape `(size,)`.

        Args:
            size: of the shard's axis.
            num_rows: in the shard. Some may be padding, beyond the end of the whole tensor: they get its last row.
            first_row: of the shard, in the whole; may be a scalar tensor.
            total_rows: in the whole.

        Returns:
            A tensor; of numbers that are Python's an array.
        """
        from keras import ops

        made_by: Any = np if isinstance(first_row, int) else ops
        others = size // num_rows
        rows = made_by.minimum(made_by.arange(num_rows, dtype="int32") + first_row, total_rows - 1)
        if self.is_inner:
            whole = made_by.expand_dims(made_by.arange(others, dtype="int32") * total_rows, 1) + rows
        else:
            whole = made_by.expand_dims(rows * others, 1) + made_by.arange(others, dtype="int32")
        return made_by.reshape(whole, (size,))


FIRST = RowAxis()


class RowAxes:
    """Where the rows are in all that needs to know: random draws, batch statistics, activity penalties, outputs.

    A tensor goes by what asks for it (a seed, a layer, the number of an output) and by how often that has asked in
    this forward pass.

    Attributes:
        adding: the layers that add losses, by `id`.
        keeping: by `id`, of each layer that may assign to variables what it sees of the rows, these variables.
        mixing: layers that mix the samples of a batch, by `id`.
        checked: what was compared with the whole batch, with these: `"outputs"`, and `"loss"` of these.
        assigning: the layers that assign to variables, each with these.
        outputs: of the model, as it gives them in training: `KerasTensor`s; None if it was not called.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[RowAxis | None]] = {}
        self.adding: dict[int, Any] = {}
        self.keeping: dict[int, list[Any]] = {}
        self.mixing: dict[int, Any] = {}
        self.checked: set[str] = set()
        self.assigning: list[tuple[Any, list[Any]]] = []
        self.outputs: Any = None

    def couples(self, layer: Any) -> bool:
        """Returns whether what a layer gives, adds or keeps depends on rows taken together."""
        return any(id(layer) in layers for layers in (self.adding, self.keeping, self.mixing))

    def find(self, key: Any, number: int, shape: tuple[int, ...], tensor: Any, name: str) -> RowAxis | None:
        """Returns where the rows are in a tensor; None if nowhere: it is the same for all of them.

        Args:
            key: what asks; hashable.
            number: of calls with this key before, in this forward pass.
            shape: of the tensor.
            tensor: with values of the rows in the same places; None if there is none.
            name: for messages.

        Raises:
            UserError: if there was no such tensor when the model was looked at.
        """
        known = self._known.get(key, [])
        if number >= len(known) and len(set(known)) != 1:  # a layer that is computed again, for its gradient
            raise UserError(
                f"{name} works on a tensor of shape {shape} that it did not have when the model was first called on a "
                "few rows, so it is not known where the rows of the batch are in it: call the same layers in each step "
                "of training, or train on one device"
            )
        return known[number] if number < len(known) else known[0]

    def add(self, key: Any, axis: RowAxis | None) -> None:
        """Takes where the rows are, for the next call with this key."""
        self._known.setdefault(key, []).append(axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaContext:
    """Which replica a forward pass belongs to, and which rows of the global batch it sees.

    Args:
        num_replicas: how many replicas work on the global batch.
        num_rows: rows of this replica's input that are real, the rest is padding at the end; a number or a scalar
            tensor. None where a layer sees the whole global batch at once, without padding (jax).
        rows: rows of this replica's input, padding included; None on jax.
        first_row: index of this replica's first row in the global batch; may be a scalar tensor.
        total_rows: of the global batch, without padding; None where a layer sees all of it.
        replicas: the rows that all replicas have of the batch, or of the micro-batch; empty on jax.
        row_axes: where the rows are in the tensors of the model. None: on axis 0 of all that has `rows` there.
        is_trial: whether this pass only finds that out: batch norm then takes its moving statistics, for other
            rows' would tell nothing.
        gather: stacks the same tensor of all replicas along a new first axis; differentiable: the gradient of a
            replica's tensor is the sum of its gradients on all replicas. None on jax.
        weight: of this replica's gradients where they are averaged over the replicas; the mean of all weights is 1.
        gather_rows: the rows of all replicas, padding removed: a tensor of the global batch. None on jax, and in a
            whole micro-batch, without padding, that one program computes.
        found: takes what layers add and assign in a trial; None outside of one.
        is_own_step: whether this is a user-defined step, whose losses are its own affair.
        is_whole: whether this is the call of a layer on the global batch.
        is_micro_batch: whether these rows are some of a micro-batch: no layer sees more than that.
        calling: the layers that are being called, the innermost one last.
        regularized: by `id` of a layer that was just called, what Keras is to add for its activity regularizer.
        moving: what batch norms with statistics of each replica leave to be summed over the replicas once the pass
            is over: the layer, and a tensor for `layers.move_together`. None: they gather it at once.
    """

    num_replicas: int
    num_rows: Any = None
    rows: int | None = None
    first_row: Any = 0
    total_rows: int | None = None
    replicas: tuple[ReplicaRows, ...] = ()
    row_axes: RowAxes | None = None
    is_trial: bool = False
    gather: Callable[[Any], Any] | None = None
    weight: float = 1.0
    gather_rows: Callable[[Any], Any] | None = None
    found: Any = None
    is_own_step: bool = False
    is_whole: bool = False
    is_micro_batch: bool = False
    calling: list[Any] = dataclasses.field(default_factory=list)
    regularized: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    moving: list[tuple[Any, Any]] | None = None
    _calls: dict[Any, int] = dataclasses.field(default_factory=dict)

    @property
    def has_empty_replica(self) -> bool:
        """Returns whether some replica has padding alone."""
        return not all(each.num_rows for each in self.replicas)

    def row_axis(self, key: Any, tensor: Any, name: str, shape: tuple[int, ...] | None = None) -> RowAxis | None:
        """Returns where the rows are in a tensor; None if nowhere: it is the same on all replicas.

        Args:
            key: what asks; hashable. It is asked in the same order in each forward pass.
            tensor: with the rows in the same places; may be None where `shape` is given.
            name: for messages.
            shape: of the tensor in question. None: that of `tensor`.

        Raises:
            UserError: if it is not known.
        """
        if shape is None:
            shape = tuple(tensor.shape)
        if self.row_axes is None:
            return FIRST if shape[:1] == (self.rows,) else None
        number = self._calls.get(key, 0)
        self._calls[key] = number + 1
        return self.row_axes.find(key, number, shape, tensor, name)

    def of_whole(self) -> "ReplicaContext":
        """Returns the context in which a layer of this pass is called on the global batch."""
        return dataclasses.replace(
            self,
            num_replicas=1,
            num_rows=self.total_rows,
            rows=self.total_rows,
            first_row=0,
            replicas=(),
            gather=alone,
            gather_rows=None,
            is_whole=True,
            moving=None,
        )

    def once_more(self) -> "ReplicaContext":
        """Returns the context in which a layer is computed again: as it is now, and nothing comes into this one."""
        return dataclasses.replace(
            self,
            calling=[*self.calling],
            regularized={},
            moving=None if self.moving is None else [],
            _calls=dict(self._calls),
        )

    def of_tensor(self, axis: RowAxis | None, num_rows: int) -> "ReplicaContext":
        """Returns the context for a tensor with so many entries on axis 0, each row's together and in order."""
        if axis is not None and num_rows == self.rows:
            return self
        if self.rows is None or axis is None or self.num_rows == self.rows:
            real = num_rows
        else:
            real = self.num_rows * (num_rows // self.rows)
        return dataclasses.replace(self, num_rows=real, rows=num_rows)

    def of_real_rows(self) -> "ReplicaContext":
        """Returns the context of a step on the real rows alone; on one of padding where there is none."""
        weight = self.num_rows * self.num_replicas / (self.total_rows or 1)
        rows = max(self.num_rows, 1)
        gather: Any = self.gather and functools.partial(cast(Any, self.gather), weight=weight)
        return dataclasses.replace(self, rows=rows, weight=weight, gather=gather, moving=None)

    def whole_outputs(self, outputs: Any) -> Any:
        """Gathers a model's outputs of the global batch; a structure of tensors."""
        import keras

        leaves = keras.tree.flatten(outputs)
        whole = [self.whole(leaf, self.output_axis(number, leaf)) for number, leaf in enumerate(leaves)]
        return keras.tree.pack_sequence_as(outputs, whole)

    def is_by_rows(self, output: Any, number: int) -> bool:
        """Returns whether axis 0 of the model's output of that number is its rows, one entry each."""
        return self.output_axis(number, output) == FIRST and output.shape[0] == self.rows

    def output_axis(self, number: int, output: Any) -> RowAxis | None:
        """Returns where the rows are in the model's output of that number."""
        return self.row_axis(("output", number), output, f"output {number} of the model")

    def rows_of_all(self, rows: Any) -> Any:
        """Gathers rows, whose gradient is the sum of those that all replicas have for them.

        `rows`: a tensor with one or several entries a row on axis 0.
        """
        import keras
        from keras import ops

        others = rows.shape[0] // cast(int, self.rows)
        rows = ops.convert_to_tensor(rows)
        name = keras.backend.standardize_dtype(rows.dtype)
        is_float = "float" in name
        if not is_float and self.gather_rows is None:
            return rows
        # Of a replica with padding there are the real rows alone.
        missing = self.replicas[0].size * others - rows.shape[0]
        rows = ops.pad(rows, [[0, missing], *[[0, 0]] * (len(rows.shape) - 1)]) if missing else rows
        if not is_float:  # without a gradient
            return cast(Any, self.gather_rows)(rows)
        wide = ops.cast(rows, keras.backend.result_type(name, "float32"))  # TensorFlow (2.21) sums no others on the CPU
        whole = ops.reshape(cast(Any, self.gather)(wide), (self.num_replicas * rows.shape[0], *rows.shape[1:]))
        return ops.cast(whole[: sum(each.num_rows for each in self.replicas) * others], name)

    def whole(self, tensor: Any, axis: RowAxis | None, gather_rows: Callable[[Any], Any] | None = None) -> Any:
        """Gathers the tensor of the global batch from the replicas' shards of it, with its mask if it carries one.

        `gather_rows`: None: its gradient is right for a loss of the global batch, which each replica computes.
        """
        from kerasdp.keras_compat.layers import with_mask

        gather_rows, rows = gather_rows or self.gather_rows, self.rows
        if axis is None or gather_rows is None or rows is None:
            return tensor

        def gather(part: Any) -> Any:
            own = axis.rows_first(part, rows)
            whole = gather_rows(own)
            return axis.rows_back(whole, whole.shape[0] // (own.shape[0] // rows))

        return with_mask(gather, tensor)

    def own_part(self, whole: Any, axis: RowAxis) -> Any:
        """Returns this replica's shard of a tensor of the global batch, with its mask; padding repeats the last row."""
        from keras import ops

        from kerasdp.keras_compat.layers import with_mask

        rows, total = self.rows or 0, self.total_rows or 0

        def take(tensor: Any) -> Any:
            size = tensor.shape[axis.axis] // total * rows
            return ops.take(tensor, axis.indices(size, rows, self.first_row, total), axis=axis.axis)

        return with_mask(take, whole)


@contextlib.contextmanager
def attributes_kept() -> Iterator[None]:
    """Gives the layers that are being called the attributes back that they had.

    For where this replica waits while others, in threads of their own, call the same layers: some keep lists or tensors
    of a call in attributes (keras-tcn 3.5 its skip connections).
    """
    context = current()
    layers = () if context is None else tuple(context.calling)
    kept = [dict(vars(layer)) for layer in layers]
    yield
    for layer, attributes in zip(layers, kept):
        vars(layer).update(attributes)  # past Keras, which would track them anew


def alone(statistics: Any) -> Any:
    """Returns a tensor as `ReplicaContext.gather` does where there is one replica."""
    return statistics[None]


def current() -> ReplicaContext | None:
    """Returns the context of the running step; None outside of one, or with a single replica."""
    return current_step().replica


@contextlib.contextmanager
def use(context: ReplicaContext | None) -> Iterator[ReplicaContext | None]:
    """Makes `context` the current one within a `with` block."""
    with step_with(replica=context):
        yield context


def all_rows(rows: Any) -> Any:
    """Returns the rows of the global batch, on every device, in the order of one device.

    For losses that compare each sample with all others (contrastive ones), and for what a step keeps of a batch (a
    queue), in a user-defined `train_step` or layer. Gradients are those of one device, whether each device takes the
    loss of all rows, or that of its own rows compared with all. Outside of a run, on one device, and with jax, whose
    program has the whole batch, it returns what it is given.

    Args:
        rows: a tensor whose axis 0 is the samples of this device, one entry each: `(rows, ...)`.

    Returns:
        A tensor of shape `(rows of the global batch, ...)`.

    Raises:
        UserError: if axis 0 is not the samples, or there are micro-batches.
    """
    context = current()
    if context is None or context.rows is None or context.is_trial or context.is_whole:
        return rows
    if context.is_micro_batch:
        raise UserError(
            "all_rows: a micro-batch does not know the rows of the others: train with --strategy=data and without "
            "--accumulate"
        )
    if context.gather is None:
        return rows
    if not len(rows.shape) or rows.shape[0] != context.rows:
        raise UserError(
            f"all_rows: expected a tensor whose axis 0 is the {context.rows} samples of this device. Received: shape "
            f"{tuple(rows.shape)}; give it one entry a sample, each of several views by itself"
        )
    return context.rows_of_all(rows)


def gather_shards(rows: Any, own: ReplicaRows, replicas: tuple[ReplicaRows, ...], gather: Callable[[Any], Any]) -> Any:
    """Gathers the rows of all replicas, without padding.

    Args:
        rows: of this replica, padding included, of shape `(size * others, ...)`.
        own: which rows they are.
        replicas: see `Split.replicas`.
        gather: concatenates equally many rows of all replicas.
    """
    others = rows.shape[0] // own.size
    return gather(rows)[: sum(each.num_rows for each in replicas) * others]
