"""Holds what a benchmark, and a study of a pipeline, measure of one program, and draws their charts."""

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

from kerasdp.reporting.figure import BACKEND_COLOURS, make_figure

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
        mfu: model FLOPs utilization (`kerasdp.benchmark.measure.utilization`), from 0 to 1; None where it is not known.
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


def draw_speeds(measurements: list[Measured], path: str) -> None:
    """Draws a bar for each contender: the median of its rounds, from the lowest to the highest. The kit's are full.

    Args:
        measurements: of `kerasdp.benchmark.compare`.
        path: of the PNG file.
    """
    figure, (axes,) = make_figure(7.2, 1.3 + 0.36 * len(measurements), grid="x")
    for index, measured in enumerate(measurements):
        colour = BACKEND_COLOURS[measured.backend]
        axes.barh(
            index, measured.rate, xerr=_error_bars([measured]), height=0.7, capsize=3, edgecolor=colour,
            color=colour if measured.is_kit else "white", hatch=None if measured.is_kit else "///",
        )  # fmt: skip
        axes.annotate(
            f"{measured.rate:,.0f}",
            (max(measured.rates), index),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    names = [f"{one.name} x {one.num_devices}" if one.num_devices > 1 else one.name for one in measurements]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="images a second (median; lowest and highest)", title="The kit (full) and its peers")
    figure.savefig(path, dpi=120)


def draw_scaling(measurements: list[Measured], path: str) -> None:
    """Draws images a second by number of devices, and how the fastest would scale at best. Args as in `draw_speeds`."""
    figure, (axes,) = make_figure(8.0, 4.4, grid="y")
    counts = sorted({measured.num_devices for measured in measurements})
    names = list({measured.name: None for measured in measurements})
    for index, name in enumerate(names):
        shift = 0.02 * (index - len(names) // 2)  # so that error bars stand side by side
        ways = sorted((one for one in measurements if one.name == name), key=lambda one: one.num_devices)
        axes.errorbar(
            [one.num_devices + shift for one in ways], [one.rate for one in ways], yerr=_error_bars(ways), capsize=3,
            marker="o" if ways[0].is_kit else "s^Dv"[index % 4],
            color=BACKEND_COLOURS[ways[0].backend], label=name, linestyle="-" if ways[0].is_kit else "--",
        )  # fmt: skip
    first = max((one for one in measurements if one.num_devices == counts[0]), key=lambda one: one.rate, default=None)
    if first is not None:
        ideal = [first.rate * count / counts[0] for count in counts]
        axes.plot(counts, ideal, color="#bbbbbb", linestyle=":", label="ideal")
    axes.set(xlabel="devices", ylabel="images a second", xticks=counts, ylim=(0, None), title="More devices")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120)


def _error_bars(measurements: list[Measured]) -> list[list[float]]:
    """Returns the distances from the medians down to the lowest, and up to the highest."""
    return [
        [one.rate - min(one.rates) for one in measurements],
        [max(one.rates) - one.rate for one in measurements],
    ]


_STUDY_COLOURS = {"single device": "#888888", "layer split": "#f2a541", "pipelined": "#4c78a8"}
_FORWARD, _BACKWARD, _BEST = "#4c78a8", "#e4572e", "#e4572e"


def draw_study(measurements: list[Measurement], path: str) -> None:
    """Draws a bar for each way to train, with the deviation of its repetitions.

    Args:
        measurements: of `kerasdp.benchmark.study`.
        path: of the PNG file.
    """
    figure, (axes,) = make_figure(5.4, 4.2, grid="y")
    names = [_label(measured) for measured in measurements]
    means = [measured.mean for measured in measurements]
    axes.bar(
        names, means, yerr=[measured.deviation for measured in measurements], capsize=6, width=0.6,
        color=[_STUDY_COLOURS[measured.name] for measured in measurements],
    )  # fmt: skip
    for index, measured in enumerate(measurements):
        axes.annotate(
            f"{measured.mean:.2f} s", (index, measured.mean + measured.deviation), xytext=(0, 4), ha="center",
            textcoords="offset points",
        )  # fmt: skip
    axes.margins(y=0.12)
    axes.set(ylabel="seconds a repetition", title="One device, cut over several, pipelined")
    figure.savefig(path, dpi=120)


def draw_sweep(measurements: list[Measurement], best: Measurement, path: str) -> None:
    """Draws time by split size, the best one marked. Args as in `draw_study`."""
    figure, (axes,) = make_figure(6.4, 4.2, grid="y")
    ordered = sorted(measurements, key=lambda measured: measured.split_size or 0)
    axes.errorbar(
        [measured.split_size or 0 for measured in ordered], [measured.mean for measured in ordered],
        yerr=[measured.deviation for measured in ordered], color=_FORWARD, marker="o", capsize=4,
    )  # fmt: skip
    axes.plot(
        [best.split_size or 0], [best.mean], marker="o", markersize=13, markerfacecolor="none", markeredgewidth=2,
        color=_BEST, linestyle="none", label=f"best: {best.split_size} ({best.mean:.2f} s)",
    )  # fmt: skip
    axes.set(xlabel="split size (samples a micro-batch)", ylabel="seconds a repetition", ylim=(0, None))
    axes.set_title("How large a micro-batch?")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def draw_timeline(measured: Measurement, path: str) -> None:
    """Draws which stage works on which micro-batch when, in a measurement's watched step."""
    stages = sorted({event[0] for event in measured.work})
    figure, (axes,) = make_figure(9.0, 1.4 + 0.7 * len(stages), grid="y")
    total = max(event[4] for event in measured.work)
    for stage, kind, number, begin, end in measured.work:
        colour = _FORWARD if kind == "forward" else _BACKWARD
        axes.barh(stage, end - begin, left=begin, height=0.8, color=colour, edgecolor="white", linewidth=0.8)
        if end - begin > 0.02 * total:
            axes.text((begin + end) / 2, stage, str(number), ha="center", va="center", color="white", fontsize=8)
    for kind, colour in (("forward", _FORWARD), ("backward", _BACKWARD)):
        axes.barh([stages[0]], [0], color=colour, label=kind)
    axes.set(xlabel="seconds", ylabel="stage", yticks=stages, ylim=(stages[-1] + 0.6, stages[0] - 0.6), xlim=(0, total))
    axes.set_title(
        f"A step in micro-batches of {measured.split_size}: stages wait {measured.bubble:.0%} of the time "
        f"(ideal {measured.ideal_bubble:.0%})",
        fontsize=10,
    )
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.28 if len(stages) < 3 else -0.18))
    axes.grid(visible=False)
    figure.savefig(path, dpi=120)


def _label(measured: Measurement) -> str:
    return measured.name if measured.split_size is None else f"{measured.name}\n(split size {measured.split_size})"
