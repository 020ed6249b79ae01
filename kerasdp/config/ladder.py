"""Says which other choices of a run spare memory and leave its losses as they are, the fastest first."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from kerasdp.errors import UserError

_SHARDS = ("none", "optimizer", "weights")
_MOST_PARTS = 64
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?)B", re.IGNORECASE)


def bytes_in(text: str) -> int | None:
    """Returns the bytes of a size as `24GB`, in powers of 1,000; None of anything else."""
    found = _SIZE.fullmatch(text.strip())
    return None if found is None else round(float(found[1]) * 1000 ** ("KMGT".find(found[2].upper() or "-") + 1))


def rungs(config: Any, num_replicas: int, remats: Sequence[str] = ("none", "blocks")) -> Iterator[tuple[str, Any]]:
    """Yields the ladder of a run: flags beside those that were given, and the `Config` with them; first as asked.

    Args:
        config: what was asked.
        num_replicas: of the run.
        remats: the values of `Config.remat`, from the fastest on.
    """
    rows = config.replica_batch_size(num_replicas)
    parts = [config.accumulate * 2**number for number in range(_MOST_PARTS.bit_length())]
    # Choices from what costs most time to what costs least; of each, the values from the fastest on.
    sparing = {"shard": _SHARDS, "remat": remats, "accumulate": [count for count in parts if rows % count == 0]}
    values: dict[str, Sequence[Any]] = {}
    for name, each in sparing.items():
        asked = getattr(config, name)
        values[name] = each[each.index(asked) :] if asked in each else (asked,)
    for chosen in itertools.product(*values.values()):
        changes = {name: value for name, value in zip(values, chosen) if value != getattr(config, name)}
        try:
            rung = dataclasses.replace(config, **changes)
            rung.check_replicas(num_replicas)
        except UserError:
            continue
        yield " ".join(f"--{name}={value}" for name, value in changes.items()), rung


def next_flags(config: Any, num_replicas: int) -> str:
    """Returns the flags of the first rung that is not chosen yet; empty if there is none."""
    return next((flags for flags, _ in rungs(config, num_replicas) if flags), "")
