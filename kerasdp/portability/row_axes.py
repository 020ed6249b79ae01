"""Says where the rows of a batch are in a tensor that a layer works on."""

import dataclasses
from typing import Any, NamedTuple

from kerasdp.errors import UserError


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
        """
        from keras import ops

        others = size // num_rows
        rows = ops.minimum(ops.arange(num_rows, dtype="int32") + first_row, total_rows - 1)
        if self.is_inner:
            whole = ops.expand_dims(ops.arange(others, dtype="int32") * total_rows, 1) + rows
        else:
            whole = ops.expand_dims(rows * others, 1) + ops.arange(others, dtype="int32")
        return ops.reshape(whole, (size,))


FIRST = RowAxis()


@dataclasses.dataclass(frozen=True)
class Adding:
    """A layer that adds losses (`add_loss`).

    Args:
        layer: that is meant.
        is_mean: whether what it adds surely is a mean over the rows.
    """

    layer: Any
    is_mean: bool


class RowAxes:
    """Where the rows are in all that needs to know: random draws, batch statistics, activity penalties, outputs.

    A tensor goes by what asks for it (a seed, a layer, the number of an output) and by how often that has asked in
    this forward pass.

    Attributes:
        adding: the layers that add losses, by `id`.
        outputs: of the model, as it gives them in training: `KerasTensor`s; None if it was not called.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[RowAxis | None]] = {}
        self.adding: dict[int, Adding] = {}
        self.outputs: Any = None

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

    def of(self, key: Any) -> list[RowAxis | None]:
        """Returns what is known for a key, in the order of the calls."""
        return self._known.get(key, [])

    def add(self, key: Any, axis: RowAxis | None) -> None:
        """Takes where the rows are, for the next call with this key."""
        self._known.setdefault(key, []).append(axis)
