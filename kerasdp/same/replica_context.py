"""Describes the rows of the global batch that a replica holds, and gathers the rows of all replicas."""

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
    """The order of the rows of a batch on axis 0 of a tensor.

    Axis 0 may hold several entries (windows, tokens, views) for each row. `FIRST`: the entries of a row are adjacent,
    so axis 0 is `(rows, entries)`. `LAST`: axis 0 is `(entries, rows)`, as in `concatenate([real, made])`.
    """

    FIRST = "first"
    LAST = "last"

    def rows_first(self, tensor: Any, num_rows: int) -> Any:
        """Reorders axis 0 so that the entries of a row are adjacent; `num_rows` is the number of rows in `tensor`."""
        return self._refolded(tensor, tensor.shape[0] // num_rows, num_rows)

    def rows_back(self, tensor: Any, num_rows: int) -> Any:
        """Undoes `rows_first`. The number of rows may have changed since `rows_first`."""
        return self._refolded(tensor, num_rows, tensor.shape[0] // num_rows)

    def _refolded(self, tensor: Any, outer: int, inner: int) -> Any:
        from keras import ops

        if self is RowOrder.FIRST:
            return tensor
        shape = tensor.shape[1:]
        return ops.reshape(ops.swapaxes(ops.reshape(tensor, (outer, inner, *shape)), 0, 1), (outer * inner, *shape))

    def indices(self, size: int, num_rows: int, first_row: Any, total_rows: int) -> Any:
        """Returns the index in the full tensor of each entry of a shard, as int32 of shape `(size,)`.

        Args:
            size: the length of the shard's axis 0.
            num_rows: the number of rows in the shard. Padding rows, beyond the end of the full tensor, get the indices
                of the last row of the full tensor.
            first_row: the index of the shard's first row in the full tensor: an int or a scalar tensor.
            total_rows: the number of rows in the full tensor.

        Returns:
            A NumPy array if `first_row` is an int, else a tensor.
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
    """Records where the rows of a batch are in each tensor of a model, and which layers need the rows of all replicas.

    Two values identify a tensor: a key and a number. The key identifies the caller (a seed, a layer, the index of an
    output). The number counts earlier calls with this key in the forward pass.

    Attributes:
        adding: the layers that add losses, by `id`.
        assigning: the layers that assign to variables of the model, by `id`: pairs of the layer and these variables.
        mixing: the layers that mix the samples of a batch, by `id`.
        checked: the names of results that were compared with the results of an unsplit batch: `"outputs"`, `"loss"`.
        outputs: `KerasTensor`s of the model's outputs in training; None if the model was not called.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[RowOrder | str | None]] = {}
        self.adding: dict[int, Any] = {}
        self.assigning: dict[int, tuple[Any, list[Any]]] = {}
        self.mixing: dict[int, Any] = {}
        self.checked: set[str] = set()
        self.outputs: Any = None

    def couples(self, layer: Any) -> bool:
        """Returns whether a layer's outputs, added losses or variables depend on several rows together."""
        return id(layer) in self.adding or id(layer) in self.mixing or self.keeps(layer)

    def keeps(self, layer: Any) -> bool:
        """Returns whether a layer stores values in variables that may depend on the rows."""
        import keras

        # The values that spectral normalization assigns depend on weights alone.
        return id(layer) in self.assigning and not isinstance(layer, keras.layers.SpectralNormalization)

    def find(self, key: Any, number: int, shape: tuple[int, ...], tensor: Any, name: str) -> RowOrder | None:
        """Returns where the rows are in a tensor; None if the tensor is the same for all rows.

        Args:
            key: a hashable object that identifies the caller.
            number: the number of earlier calls with this key in this forward pass.
            shape: the shape of the tensor.
            tensor: the tensor, or another tensor with the rows at the same positions; None if there is none.
            name: the name of the caller, for error messages.

        Raises:
            UserError: if the positions of the rows are unknown.
        """
        known = self._known.get(key, [])
        if number < len(known):
            found = known[number]
        elif len(set(known)) == 1:  # rematerialization computes a layer again
            found = known[0]
        else:
            found = (
                f"works on a tensor of shape {shape}. The trial call before the first step had no such tensor, so "
                "kerasdp cannot find the samples of the batch in this tensor; call the same layers in each training "
                "step, or train on one device"
            )
        if isinstance(found, str):
            raise UserError(f"{name} {found}")
        return found

    def add(self, key: Any, found: RowOrder | str | None) -> None:
        """Records where the rows are in a tensor, for the next call with this key.

        Args:
            key: a hashable object that identifies the caller.
            found: the positions of the rows; None if the tensor is the same for all rows. If the positions are unknown:
                the second half of an error message, after the name of the caller.
        """
        self._known.setdefault(key, []).append(found)

    def can_call_with_all_rows(self, layer: Any) -> bool:
        """Returns whether the positions of the rows are known in all arguments and outputs of a layer."""
        known = [found for kind in ("arguments", "outputs") for found in self._known.get((kind, id(layer)), [])]
        return bool(known) and not any(isinstance(found, str) for found in known)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaContext:
    """Describes the replica that runs a forward pass, and the rows of the global batch in this pass.

    Args:
        num_replicas: the number of replicas that share the global batch.
        num_rows: the number of real rows in this replica's input, without the padding at the end: an int or a scalar
            tensor. None if a layer sees the whole global batch at once, without padding (jax).
        rows: the number of rows in this replica's input, with padding; None on jax.
        first_row: the index of this replica's first row in the global batch: an int or a scalar tensor.
        total_rows: the number of rows in the global batch, without padding; None if a layer sees the whole batch.
        replicas: the rows of each replica in the batch, or in the micro-batch; empty on jax.
        row_layout: the positions of the rows in tensors of the model. None: the rows are on axis 0 of all tensors whose
            axis 0 has the length `rows`.
        is_trial: whether this is the trial call on a few rows, in which batch norm uses its moving statistics.
        gather: a function that stacks the tensors of all replicas along a new first axis. It is differentiable: the
            gradient of a replica's tensor is the sum of the tensor's gradients on all replicas. None on jax.
        weight: the weight of this replica's gradients in the average over the replicas. The mean of all weights is 1.
        gather_rows: a function that gathers the rows of all replicas, without padding, as a tensor of the global batch.
            None on jax, and if one program computes a whole micro-batch without padding.
        is_custom_step: whether this is a user-defined step, which computes its losses itself.
        is_micro_batch: whether these rows belong to a micro-batch. Then no layer sees rows outside of the micro-batch.
        calling: the layers whose calls are running. The innermost layer is the last one.
        regularized: the losses of the activity regularizer of a layer that was just called, by `id` of the layer.
        moving: collects the statistics of batch norms with `statistics="replica"`, as pairs of the layer and a tensor
            for `layers.move_together`. After the pass, these tensors are summed over the replicas. None: the layers
            gather the statistics at once.
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
        """Returns where the rows are in a tensor; None if the tensor is the same on all replicas.

        Args:
            key: a hashable object that identifies the caller. Calls with the same key come in the same order in each
                forward pass.
            tensor: the tensor, or another tensor with the rows at the same positions. None is allowed if `shape` is
                given.
            name: the name of the caller, for error messages.
            shape: the shape of the tensor. None: the shape of `tensor`.

        Raises:
            UserError: if the positions of the rows are unknown.
        """
        if shape is None:
            shape = tuple(tensor.shape)
        if self.row_layout is None:
            return RowOrder.FIRST if shape[:1] == (self.rows,) else None
        number = self._calls.get(key, 0)
        self._calls[key] = number + 1
        return self.row_layout.find(key, number, shape, tensor, name)

    def of_whole(self) -> "ReplicaContext":
        """Returns the context for a layer that is called on the global batch within this pass."""
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
        """Returns a copy of this context for recomputing a layer. The recomputation does not change this context."""
        return dataclasses.replace(
            self,
            calling=[*self.calling],
            regularized={},
            moving=None if self.moving is None else [],
            _calls=dict(self._calls),
        )

    def of_tensor(self, order: RowOrder | None, num_rows: int) -> "ReplicaContext":
        """Returns the context for a tensor with `num_rows` entries on axis 0, with the entries of a row adjacent."""
        is_padded = order is not None and self.num_rows != self.rows
        real = self.num_rows * (num_rows // cast(int, self.rows)) if is_padded else num_rows
        return dataclasses.replace(self, num_rows=real, rows=num_rows)

    def of_real_rows(self) -> "ReplicaContext":
        """Returns the context of a step without padding. A replica without real rows keeps one row of padding."""
        weight = self.num_rows * self.num_replicas / (self.total_rows or 1)
        rows = max(self.num_rows, 1)
        gather: Any = self.gather and functools.partial(cast(Any, self.gather), weight=weight)
        return dataclasses.replace(self, rows=rows, weight=weight, gather=gather, moving=None)

    def whole_outputs(self, outputs: Any) -> Any:
        """Gathers a model's outputs for the global batch. `outputs` is a structure of this replica's tensors."""
        import keras

        leaves = keras.tree.flatten(outputs)
        whole = [self.whole(leaf, self.output_order(number, leaf)) for number, leaf in enumerate(leaves)]
        return keras.tree.pack_sequence_as(outputs, whole)

    def output_order(self, number: int, output: Any) -> RowOrder | None:
        """Returns where the rows are in the model's output with the index `number`."""
        return self.row_order(("output", number), output, f"output {number} of the model")

    def rows_of_all(self, rows: Any) -> Any:
        """Gathers the rows of all replicas. The gradient of a row is the sum of its gradients on all replicas.

        Args:
            rows: a tensor whose axis 0 has one or several entries for each row.
        """
        import keras
        from keras import ops

        others = rows.shape[0] // cast(int, self.rows)
        rows = ops.convert_to_tensor(rows)
        name = keras.backend.standardize_dtype(rows.dtype)
        is_float = "float" in name
        if not is_float and self.gather_rows is None:
            return rows
        # A replica with padding passes only its real rows.
        missing = self.replicas[0].size * others - rows.shape[0]
        rows = ops.pad(rows, [[0, missing], *[[0, 0]] * (len(rows.shape) - 1)]) if missing else rows
        if not is_float:  # without a gradient
            return cast(Any, self.gather_rows)(rows)
        wide = ops.cast(rows, keras.backend.result_type(name, "float32"))  # TensorFlow (2.21) sums only these on CPUs
        whole = ops.reshape(cast(Any, self.gather)(wide), (self.num_replicas * rows.shape[0], *rows.shape[1:]))
        return ops.cast(whole[: sum(each.num_rows for each in self.replicas) * others], name)

    def whole(self, tensor: Any, order: RowOrder | None, gather_rows: Callable[[Any], Any] | None = None) -> Any:
        """Gathers the tensor of the global batch from the replicas' shards, with its mask if it has one.

        Args:
            tensor: this replica's shard.
            order: where the rows are in the shard. None: the tensor is returned unchanged.
            gather_rows: a function that gathers the rows. None: the `gather_rows` of this context. Its gradient is
                correct if each replica computes the loss of the global batch.
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
        """Returns this replica's shard of a tensor of the global batch, with the mask of the tensor.

        Padding repeats the last row.
        """
        from keras import ops

        from kerasdp.keras_compat.layers import with_mask

        rows, total = self.rows or 0, self.total_rows or 0

        def take(tensor: Any) -> Any:
            size = tensor.shape[0] // total * rows
            return ops.take(tensor, order.indices(size, rows, self.first_row, total), axis=0)

        return with_mask(take, whole)


@contextlib.contextmanager
def attributes_kept() -> Iterator[None]:
    """Restores the attributes of the layers whose calls are running, at the end of the context.

    While this replica waits in the context, other replicas call the same layers in other threads. Some layers store
    lists or tensors of a call in attributes. For example, keras-tcn 3.5 stores its skip connections.
    """
    context = current()
    layers = () if context is None else tuple(context.calling)
    kept = [dict(vars(layer)) for layer in layers]
    yield
    for layer, attributes in zip(layers, kept):
        vars(layer).update(attributes)  # not `setattr`, with which Keras would track them again


def alone(statistics: Any) -> Any:
    """Adds a first axis of length 1, like `ReplicaContext.gather` for a single replica."""
    return statistics[None]


def current() -> ReplicaContext | None:
    """Returns the context of the running step; None outside of a step, or with a single replica."""
    return current_step().replica


@contextlib.contextmanager
def use(context: ReplicaContext | None) -> Iterator[ReplicaContext | None]:
    """Makes `context` the current context within a `with` block."""
    with step_with(replica=context):
        yield context


def all_rows(rows: Any) -> Any:
    """Returns the rows of the global batch on every device, in the order of the batch.

    Use `all_rows` in a user-defined `train_step`, in a function of `Runner.step` or in a layer. For example, a
    contrastive loss compares each sample with all other samples. Another example is a queue that stores the rows of
    past batches. Each device may compute the loss of all rows, or a loss that compares its rows with all rows. In both
    cases, the gradients are the same as on one device.

    Outside of a run, on one device, and with jax, `all_rows` returns `rows` unchanged. jax computes the global batch as
    one program.

    Args:
        rows: a tensor of shape `(rows, ...)`. Axis 0 has one entry for each sample of this device.

    Returns:
        A tensor of shape `(rows of the global batch, ...)`.

    Raises:
        UserError: if axis 0 does not have one entry for each sample of this device, or if the run has micro-batches.

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
            "all_rows: not available with micro-batches, because a micro-batch has only some rows of the batch; train "
            "with --strategy=data and without --accumulate"
        )
    if context.num_replicas == 1:
        return rows
    if not len(rows.shape) or rows.shape[0] != context.rows:
        raise UserError(
            f"all_rows: expected a tensor with one entry on axis 0 for each of the {context.rows} samples of this "
            f"device. Received: shape {tuple(rows.shape)}; with several views of a sample, call all_rows for each view"
        )
    return context.rows_of_all(rows)


def gather_shards(rows: Any, own: ReplicaRows, replicas: tuple[ReplicaRows, ...], gather: Callable[[Any], Any]) -> Any:
    """Gathers the rows of all replicas, without padding.

    Args:
        rows: this replica's rows, with padding, of shape `(size * others, ...)`. Each row has `others` entries.
        own: the size of this replica's shard, with and without padding.
        replicas: the sizes of all shards: see `Split.replicas`.
        gather: a function that concatenates tensors of all replicas that have the same number of rows.
    """
    others = rows.shape[0] // own.size
    return gather(rows)[: sum(each.num_rows for each in replicas) * others]
