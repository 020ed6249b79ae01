"""Gathers, within a step, the rows that the other devices hold: for losses that compare samples, and for queues."""

from collections.abc import Callable
from typing import Any

from kerasdp.data.split import ReplicaRows, Split
from kerasdp.errors import UserError
from kerasdp.portability import replica_context


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
    import keras
    from keras import ops

    context = replica_context.current()
    if context is None or context.rows is None or context.gather is None or context.is_trial or context.is_repeat:
        return rows
    if context.adds is None:
        raise UserError(
            "all_rows: a micro-batch does not know the rows of the others: train with --strategy=data and without "
            "--accumulate"
        )
    total, own = context.total_rows or 0, context.rows
    if not len(rows.shape) or rows.shape[0] != own:
        raise UserError(
            f"all_rows: expected a tensor whose axis 0 is the {own} samples of this device. Received: shape "
            f"{tuple(rows.shape)}; give it one entry a sample, each of several views by itself"
        )
    replicas = context.replicas or Split(context.num_replicas).replicas(total)
    largest = max(each.size for each in replicas)
    rows = ops.convert_to_tensor(rows)
    name = keras.backend.standardize_dtype(rows.dtype)
    if "float" not in name:  # without a gradient
        if context.gather_rows is None:
            return rows
        # What it takes: with equal shards their size, of which the last may have fewer rows here.
        return context.gather_rows(pad_to(rows, largest) if len({each.size for each in replicas}) == 1 else rows)
    wide = ops.cast(rows, keras.backend.result_type(name, "float32"))  # TensorFlow (2.21) sums no others on the CPU
    whole = context.gather(pad_to(wide, largest))
    whole = ops.reshape(whole, (context.num_replicas * largest, *rows.shape[1:]))
    return ops.cast(without_padding(whole, replicas), name)


def without_padding(whole: Any, replicas: tuple[ReplicaRows, ...], others: int = 1) -> Any:
    """Removes the padding from rows gathered of all replicas.

    Args:
        whole: a tensor or array of shape `(replicas * largest size * others, ...)`: each replica's rows, padded to as
            many as the largest size.
        replicas: see `Split.replicas`.
        others: entries on axis 0 for each row.
    """
    largest = max(each.size for each in replicas)
    if all(each.size == largest for each in replicas):  # all padding is at the end
        return whole[: sum(each.num_rows for each in replicas) * others]
    from keras import ops

    firsts = [rank * largest * others for rank in range(len(replicas))]
    return ops.concatenate([whole[first : first + each.num_rows * others] for first, each in zip(firsts, replicas)])


def gather_shards(rows: Any, own: ReplicaRows, replicas: tuple[ReplicaRows, ...], gather: Callable[[Any], Any]) -> Any:
    """Gathers the rows of all replicas, without padding.

    Args:
        rows: of this replica, padding included, of shape `(size * others, ...)`.
        own: which rows they are.
        replicas: see `Split.replicas`.
        gather: concatenates equally many rows of all replicas.
    """
    others, largest = rows.shape[0] // own.size, max(each.size for each in replicas)
    return without_padding(gather(pad_to(rows, largest * others)), replicas, others)


def pad_to(rows: Any, size: int) -> Any:
    """Adds rows of zeros until there are `size`."""
    if rows.shape[0] == size:
        return rows
    from keras import ops

    return ops.pad(rows, [[0, size - rows.shape[0]], *[[0, 0]] * (len(rows.shape) - 1)])
