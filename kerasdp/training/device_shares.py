"""Measures how fast each device is, for shares of the batch that all compute in the same time."""

import heapq
from collections.abc import Callable, Sequence

import keras

from kerasdp.backends.base import Strategy
from kerasdp.checkpoint.files import Checkpoint
from kerasdp.data.batch import batch_of
from kerasdp.data.feed import Reader
from kerasdp.data.sampling import Split
from kerasdp.errors import UserError
from kerasdp.keras_compat.models import own_steps

# The least time for one more row, as a fraction of the time of a pass divided by its rows: timings are not exact.
_LEAST_SLOPE = 0.2
# Unequal shards are taken if they need less than this fraction of the time of equal ones.
_CLEARLY = 0.9


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
        say(f"device shares: {shares_text(known)}, as in the checkpoint")
        return
    if "train_step" in own_steps(model):
        raise UserError(
            f"--device_shares=auto measures Keras' own train_step. Received: that of {type(model).__name__}; give "
            "numbers, as --device_shares=3,1"
        )
    num_rows = len(reader.first().indices)
    # With equal shards; with shares by the speed found then; and with those by what a pass costs at all, and a row.
    tried = [_seconds(model, strategy, reader)]
    for _ in range(2):
        split.shares = shares_by_time(tried[0], tried[-1], num_rows)
        tried.append(_seconds(model, strategy, reader))
    first, split.shares = tried[0], fastest(tried, num_rows)
    why = "" if resumed is None else "; the checkpoint has none for so many devices"
    rates = ", ".join(f"{rows / seconds:,.0f}" for rows, seconds in first)
    say(f"device shares: {shares_text(split.shares)} of {num_rows} samples; measured: {rates} samples/s{why}")


# The rows of a device, and the seconds of a pass with them.
Timed = tuple[int, float]


def _seconds(model: keras.Model, strategy: Strategy, reader: Reader) -> list[Timed]:
    """Returns the rows of each device, and the seconds of a pass with them, as the batch is split now."""
    x, y, weights = reader.sample(num_rows := len(reader.first().indices))
    batch = batch_of((x, y, weights), strategy.split, strategy.shard)
    own = strategy.pass_seconds(model, strategy.shard_batch(batch))
    seconds = [each for of_process in strategy.processes.all_gather_object(own) for each in of_process]
    return [(rows.size, each) for rows, each in zip(strategy.split.replicas(num_rows), seconds, strict=True)]


def fastest(tried: Sequence[Sequence[Timed]], num_rows: int) -> tuple[int, ...]:
    """Returns the rows of each device with which the slowest was fastest; equal ones unless others clearly were.

    Timings of short passes are mostly noise: devices that are alike must not get what that says.

    Args:
        tried: the first with equal shards.
        num_rows: of the batch.
    """
    equal, *others = tried
    best = min(others, key=_slowest)
    if _slowest(best) > _CLEARLY * _slowest(equal):
        return tuple(each.num_rows for each in Split(len(equal), (1,) * len(equal)).replicas(num_rows))
    return tuple(rows for rows, _ in best)


def _slowest(timed: Sequence[Timed]) -> float:
    return max(seconds for _, seconds in timed)


def shares_by_time(first: Sequence[Timed], second: Sequence[Timed], num_rows: int) -> tuple[int, ...]:
    """Returns each device's rows of a batch, at least 1, with which all need about the same time.

    A pass takes a time of its own, and one for each row, as far as the two measurements tell; else all is for rows.
    """
    lines = []
    for (rows, seconds), (other_rows, other_seconds) in zip(first, second, strict=True):
        most = seconds / rows
        slope = (other_seconds - seconds) / (other_rows - rows) if other_rows != rows else most
        slope = min(max(slope, _LEAST_SLOPE * most), most)
        lines.append((seconds - slope * rows, slope))
    shares = [1] * len(lines)
    # The next row goes where it is done first.
    ahead = [(begin + 2 * slope, place) for place, (begin, slope) in enumerate(lines)]
    heapq.heapify(ahead)
    for _ in range(num_rows - len(lines)):
        end, place = heapq.heappop(ahead)
        shares[place] += 1
        heapq.heappush(ahead, (end + lines[place][1], place))
    return tuple(shares)


def shares_text(shares: Sequence[int]) -> str:
    """Returns the shares as `--device_shares` takes them."""
    return ",".join(map(str, shares))
