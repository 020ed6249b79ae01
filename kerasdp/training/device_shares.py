"""Measures how fast each device is, for shares of the batch that all compute in the same time."""

from collections.abc import Callable, Sequence

import keras

from kerasdp.backends.base import Strategy
from kerasdp.checkpoint.files import Checkpoint
from kerasdp.data.feed import Reader
from kerasdp.errors import UserError
from kerasdp.keras_compat import own_steps


def choose_shares(
    model: keras.Model, strategy: Strategy, reader: Reader, resumed: Checkpoint | None, say: Callable[[str], None]
) -> None:
    """Gives the strategy the shares of its devices: those of a checkpoint, or measured, by a few passes on each.

    Nothing is left of the passes in any variable. A later `fit` of the run keeps the shares.

    Args:
        model: built and compiled.
        strategy: that splits batches.
        reader: of the training data.
        resumed: the checkpoint from which the run resumes, or None.
        say: prints a line.

    Raises:
        UserError: if the model has a `train_step` of its own.
    """
    split = strategy.split
    if split.shares is not None:
        return
    known = resumed and resumed.state["saved_by"].get("device_shares")
    if known and len(known) == split.num_replicas:
        split.shares = tuple(known)
        say(f"device shares: {in_words(known)}, as in the checkpoint")
        return
    if "train_step" in own_steps(model):
        raise UserError(
            f"--device_shares=auto measures Keras' own train_step. Received: that of {type(model).__name__}; give "
            "numbers, as --device_shares=3,1"
        )
    batch = reader.first()
    num_rows = len(batch.indices)
    own = strategy.pass_seconds(model, strategy.shard_batch(batch))
    seconds = [each for of_process in strategy.processes.all_gather_object(own) for each in of_process]
    speeds = [each.size / time for each, time in zip(split.replicas(num_rows), seconds, strict=True)]
    split.shares = shares_by_speed(speeds, num_rows)
    anew = "" if resumed is None else "; the checkpoint has none for so many devices"
    rates = ", ".join(f"{speed:,.0f}" for speed in speeds)
    say(f"device shares: {in_words(split.shares)} of {num_rows} samples; measured: {rates} samples/s{anew}")


def shares_by_speed(speeds: Sequence[float], num_rows: int) -> tuple[int, ...]:
    """Returns each device's rows of a batch, at least 1, in proportion to its speed.

    The rows that are left by rounding down go where they add least to the time of the slowest.
    """
    rows = [max(1, int(num_rows * speed / sum(speeds))) for speed in speeds]
    while sum(rows) < num_rows:
        place = min(range(len(rows)), key=lambda index: (rows[index] + 1) / speeds[index])
        rows[place] += 1
    while sum(rows) > num_rows:  # some got their one row
        rows[rows.index(max(rows))] -= 1
    return tuple(rows)


def in_words(shares: Sequence[int]) -> str:
    """Returns the shares as `--device_shares` takes them."""
    return ",".join(map(str, shares))
