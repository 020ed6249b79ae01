"""Tells a layer which rows of the global batch its replica holds, and where a tensor has them; gathers those of all."""

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from kerasdp.data.sampling import ReplicaRows
from kerasdp.errors import UserError
from kerasdp.keras_compat.patches import current_step, step_with


class RowOrder(enum.Enum):
    """How axis 0 of a tensor holds the rows of a batch, alone or folded with others: windows, tokens, views.

    `FIRST`: as `(rows, others)`, where the entries of a row are side by side. `LAST`: as `(others, rows)`, as in
    `concatenate([real, made])`.
    """

    FIRST = "first"
    LAST = "last"

    def rows_first(self, tensor: Any, num_rows: int) -> Any:
        """Puts the entries of each row side by side; `num_rows`: in the tensor."""
        return self._refolded(tensor, tensor.shape[0] // num_rows, num_rows)

    def rows_back(self, tensor: Any, num_rows: int) -> Any:
        """Undoes `rows_first`; there may be more or fewer rows by now."""
        return self._refolded(tensor, num_rows, tensor.shape[0] // num_rows)

    def _refolded(self, tensor: Any, outer: int, inner: int) -> Any:
        from keras import ops

        if self is RowOrder.FIRST:
            return tensor
        shape = tensor.shape[1:]
        return ops.reshape(ops.swapaxes(ops.reshape(tensor, (outer, inner, *shape)), 0, 1), (outer * inner, *shape))

    def indices(self, size: int, num_rows: int, first_row: Any, total_rows: int) -> Any:
        """Returns where the entries of a shard are in the whole tensor; int32, shape `(size,)`.

        Args:
            size: of the shard's axis 0.
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
        if self is RowOrder.LAST:
            whole = made_by.expand_dims(made_by.arange(others, dtype="int32") * total_rows, 1) + rows
        else:
            whole = made_by.expand_dims(rows * others, 1) + made_by.arange(others, dtype="int32")
        return made_by.reshape(whole, (size,))


class RowLayout:
    """Where the rows of a batch are in the tensors of a model, and which of its layers need the rows of all replicas.

    A tensor goes by what asks for it (a seed, a layer, the number of an output) and by how often that has asked in
    this forward pass.

    Attributes:
        adding: the layers that add losses, by `id`.
        assigning: the layers that assign to variables of the model, by `id`, each with these.
        mixing: the layers that mix the samples of a batch, by `id`.
        checked: what was compared with the whole batch, with these: `"outputs"`, and `"loss"` of these.
        outputs: of the model, as it gives them in training: `KerasTensor`s; None if it was not called.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[RowOrder | str | None]] = {}
        self.adding: dict[int, Any] = {}
        self.assigning: dict[int, tuple[Any, list[Any]]] = {}
        self.mixing: dict[int, Any] = {}
        self.checked: set[str] = set()
        self.outputs: Any = None

    def couples(self, layer: Any) -> bool:
        """Returns whether what a layer gives, adds or keeps depends on rows taken together."""
        return id(layer) in self.adding or id(layer) in self.mixing or self.keeps(layer)

    def keeps(self, layer: Any) -> bool:
        """Returns whether a layer assigns to variables what may depend on the rows."""
        import keras

        # Spectral normalization assigns what depends on weights alone.
        return id(layer) in self.assigning and not isinstance(layer, keras.layers.SpectralNormalization)

    def find(self, key: Any, number: int, shape: tuple[int, ...], tensor: Any, name: str) -> RowOrder | None:
        """Returns where the rows are in a tensor; None if nowhere: it is the same for all of them.

        Args:
            key: what asks; hashable.
            number: of calls with this key before, in this forward pass.
            shape: of the tensor.
            tensor: with values of the rows in the same places; None if there is none.
            name: for messages.

        Raises:
            UserError: if that is not known.
        """
        known = self._known.get(key, [])
        if number < len(known):
            found = known[number]
        elif len(set(known)) == 1:  # a layer that is computed again, for its gradient
            found = known[0]
        else:
            found = (
                f"works on a tensor of shape {shape} that it did not have when the model was first called on a few "
                "rows, so it is not known where the rows of the batch are in it: call the same layers in each step of "
                "training, or train on one device"
            )
        if isinstance(found, str):
            raise UserError(f"{name} {found}")
        return found

    def add(self, key: Any, found: RowOrder | str | None) -> None:
        """Takes where the rows are, for the next call with this key, or in words why that is not known."""
        self._known.setdefault(key, []).append(found)

    def can_call_with_all_rows(self, layer: Any) -> bool:
        """Returns whether it is known where the rows are in what a layer gets and gives."""
        known = [found for kind in ("arguments", "outputs") for found in self._known.get((kind, id(layer)), [])]
        return bool(known) and not any(isinstance(found, str) for found in known)


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
        row_layout: where the rows are in the tensors of the model. None: on axis 0 of all that has `rows` there.
        is_trial: whether this is a call on a few rows that only finds something out: batch norm then takes its moving
            statistics, for other rows' would tell nothing.
        gather: stacks the same tensor of all replicas along a new first axis; differentiable: the gradient of a
            replica's tensor is the sum of its gradients on all replicas. None on jax.
        weight: of this replica's gradients where they are averaged over the replicas; the mean of all weights is 1.
        gather_rows: the rows of all replicas, padding removed: a tensor of the global batch. None on jax, and in a
            whole micro-batch, without padding, that one program computes.
        is_custom_step: whether this is a user-defined step, whose losses are its own affair.
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
    row_layout: RowLayout | None = None
    is_trial: bool = False
    gather: Callable[[Any], Any] | None = None
    weight: float = 1.0
    gather_rows: Callable[[Any], Any] | None = None
    is_custom_step: bool = False
    is_micro_batch: bool = False
    calling: list[Any] = dataclasses.field(default_factory=list)
    regularized: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    moving: list[tuple[Any, Any]] | None = None
    _calls: dict[Any, int] = dataclasses.field(default_factory=dict)

    def row_order(self, key: Any, tensor: Any, name: str, shape: tuple[int, ...] | None = None) -> RowOrder | None:
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
        if self.row_layout is None:
            return RowOrder.FIRST if shape[:1] == (self.rows,) else None
        number = self._calls.get(key, 0)
        self._calls[key] = number + 1
        return self.row_layout.find(key, number, shape, tensor, name)

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

    def of_tensor(self, order: RowOrder | None, num_rows: int) -> "ReplicaContext":
        """Returns the context for a tensor with so many entries on axis 0, each row's together and in order."""
        is_padded = order is not None and self.num_rows != self.rows
        real = self.num_rows * (num_rows // cast(int, self.rows)) if is_padded else num_rows
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
        whole = [self.whole(leaf, self.output_order(number, leaf)) for number, leaf in enumerate(leaves)]
        return keras.tree.pack_sequence_as(outputs, whole)

    def output_order(self, number: int, output: Any) -> RowOrder | None:
        """Returns where the rows are in the model's output of that number."""
        return self.row_order(("output", number), output, f"output {number} of the model")

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

    def whole(self, tensor: Any, order: RowOrder | None, gather_rows: Callable[[Any], Any] | None = None) -> Any:
        """Gathers the tensor of the global batch from the replicas' shards of it, with its mask if it carries one.

        `gather_rows`: None: its gradient is right for a loss of the global batch, which each replica computes.
        """
        from kerasdp.keras_compat.layers import with_mask

        gather_rows, rows = gather_rows or self.gather_rows, self.rows
        if order is None or gather_rows is None or rows is None:
            return tensor

        def gather(part: Any) -> Any:
            own = order.rows_first(part, rows)
            whole = gather_rows(own)
            return order.rows_back(whole, whole.shape[0] // (own.shape[0] // rows))

        return with_mask(gather, tensor)

    def own_part(self, whole: Any, order: RowOrder) -> Any:
        """Returns this replica's shard of a tensor of the global batch, with its mask; padding repeats the last row."""
        from keras import ops

        from kerasdp.keras_compat.layers import with_mask

        rows, total = self.rows or 0, self.total_rows or 0

        def take(tensor: Any) -> Any:
            size = tensor.shape[0] // total * rows
            return ops.take(tensor, order.indices(size, rows, self.first_row, total), axis=0)

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
        vars(layer).update(attributes)  # past Keras, which would track them again


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
    """Returns the rows of the global batch on every device, in the order of the batch.

    Use it in a user-defined `train_step`, in a function of `Runner.step` or in a layer: for a loss that compares each
    sample with all others (a contrastive loss), and for a queue that keeps the rows of past batches. Each device may
    compute the loss of all rows, or the loss of its own rows compared with all rows. The gradients are the same as on
    one device in both cases.

    It returns `rows` unchanged outside of a run, on one device, and with jax, which computes the global batch as one
    program.

    Args:
        rows: a tensor of shape `(rows, ...)`. Axis 0 has one entry for each sample of this device.

    Returns:
        A tensor of shape `(rows of the global batch, ...)`.

    Raises:
        UserError: if axis 0 is not the samples of this device, or the run has micro-batches.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        def train(runner):
            encoder = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])

            @runner.step
            def contrast(batch):
                own = encoder(batch)
                scores = own @ keras.ops.transpose(kerasdp.all_rows(own))
                return keras.ops.mean(keras.ops.logsumexp(scores, axis=-1))

            print(float(contrast(np.random.default_rng(0).random((64, 8)))))

        kerasdp.launch(train, num_devices=2, device="cpu")
        ```
    """
    context = current()
    if context is None or context.rows is None or context.is_trial:
        return rows
    if context.is_micro_batch:
        raise UserError(
            "all_rows: a micro-batch does not know the rows of the others: train with --strategy=data and without "
            "--accumulate"
        )
    if context.num_replicas == 1:
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
