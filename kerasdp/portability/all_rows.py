"""Gathers, within a step, the rows that the other devices hold: for losses that compare samples, and for queues."""

from typing import Any

from kerasdp.data.sampling import replica_rows
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
    size = replica_rows(total, context.num_replicas)
    rows = ops.convert_to_tensor(rows)
    if size > own:  # the last devices may have fewer
        rows = ops.pad(rows, [[0, size - own], *[[0, 0]] * (len(rows.shape) - 1)])
    name = keras.backend.standardize_dtype(rows.dtype)
    if "float" not in name:  # without a gradient
        return context.gather_rows(rows) if context.gather_rows is not None else rows
    wide = ops.cast(rows, keras.backend.result_type(name, "float32"))  # TensorFlow (2.21) sums no others on the CPU
    whole = ops.reshape(context.gather(wide), (context.num_replicas * size, *rows.shape[1:]))[:total]
    return ops.cast(whole, name)
