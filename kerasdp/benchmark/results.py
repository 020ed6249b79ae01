"""Holds what a benchmark, and a study of a pipeline, measure of one program."""

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

FASHION_MNIST = 60_000  # training images


@dataclasses.dataclass(kw_only=True)
class Measured:
    """What a contender took.

    Args:
        name: of the contender.
        backend: its framework.
        num_devices: that it trained on.
        seconds: of each round; of one in which it failed, none, and it took no part any more.
        ready: what it said of itself: `seconds_to_first_step`, `parameters`, `device`; the kit also `flops`.
        last: what its last repetition said: `loss`, `accuracy`, `peak_memory_bytes`.
        rates: samples a second, of each round.
        mfu: model FLOPs utilization (`kerasdp.benchmark.peaks`), from 0 to 1; None where it is not known.
        error: why it could not be measured; empty if it could.
    """

    name: str
    backend: str
    num_devices: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    ready: dict[str, Any] = dataclasses.field(default_factory=dict)
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    mfu: float | None = None
    error: str = ""

    @property
    def is_kit(self) -> bool:
        """Returns whether it is this package."""
        return self.name.startswith("kerasdp-")

    @property
    def rate(self) -> float:
        """Samples a second, the median of the rounds."""
        return statistics.median(self.rates)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        found = dataclasses.asdict(self)
        if self.rates:
            found |= {"images_per_second": spread(self.rates), "seconds_an_epoch_of_60000": FASHION_MNIST / self.rate}
        return found

    def __str__(self) -> str:
        name = self.name if self.num_devices == 1 else f"{self.name} x {self.num_devices}"
        if self.error:
            return f"{name:28} {self.error}"
        low, high = min(self.rates), max(self.rates)
        share = f" {self.mfu:8.1%}" if self.mfu is not None else ""
        return (
            f"{name:28} {self.rate:10,.1f} {f'{low:,.1f} .. {high:,.1f}':>23} "
            f"{self.ready['seconds_to_first_step']:11.1f} s {self.last['peak_memory_bytes'] / 2**20:9,.0f}"
            f" {FASHION_MNIST / self.rate:10,.1f} s{share}"
        )


def spread(values: Iterable[float]) -> dict[str, float]:
    """Returns the median, the lowest and the highest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one way to train took.

    Args:
        name: `"single device"`, `"layer split"` or `"pipelined"`.
        split_size: samples a micro-batch; None where there are none.
        seconds: of each repetition.
        memory: most bytes that each device has used; empty where devices share a process, so that nobody knows.
        work: of a watched step: `(stage, "forward" or "backward", micro-batch, begin, end)`.
        table: the cut, in words.
        error: why it could not be trained; empty if it could.
    """

    name: str
    split_size: int | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)
    work: list[tuple[int, str, int, float, float]] = dataclasses.field(default_factory=list)
    table: str = ""
    error: str = ""

    @property
    def mean(self) -> float:
        """Seconds of a repetition."""
        return statistics.mean(self.seconds)

    @property
    def deviation(self) -> float:
        """Returns the standard deviation of the repetitions' seconds."""
        return statistics.stdev(self.seconds)

    @property
    def bubble(self) -> float:
        """Returns the share of the watched step in which stages wait, from 0 to 1."""
        stages = {event[0] for event in self.work}
        span = max(event[4] for event in self.work) - min(event[3] for event in self.work)
        # Pieces of a stage's work may overlap where its device runs several at once: that time is not idle twice.
        busy = 0.0
        for stage in stages:
            until = float("-inf")
            for begin, end in sorted(event[3:] for event in self.work if event[0] == stage):
                busy += max(end - max(begin, until), 0.0)
                until = max(until, end)
        return 1.0 - busy / (len(stages) * span)

    @property
    def ideal_bubble(self) -> float:
        """Returns `bubble` for equally long stages and free transport (Huang et al. 2019, arXiv:1811.06965)."""
        stages, micro_batches = (len({event[place] for event in self.work}) for place in (0, 2))
        return (stages - 1) / (micro_batches + stages - 1)

    def __str__(self) -> str:
        name = self.name if self.split_size is None else f"{self.name}, split size {self.split_size}"
        if self.error:
            return f"{name:28} {self.error}"
        memory = ", ".join(f"{number / 2**20:,.0f}" for number in self.memory)
        overlap = f"   bubble {self.bubble:4.0%} (ideal {self.ideal_bubble:4.0%})" if self.work else ""
        return f"{name:28} {self.mean:8.3f} s +- {self.deviation:.3f}{overlap}" + (
            f"   peak MiB a device {memory}" if memory else ""
        )
