"""Draws the charts of a study of a pipeline."""

from typing import TYPE_CHECKING

from kerasdp.reporting.figure import make_figure

if TYPE_CHECKING:
    from kerasdp.benchmark.results import Measurement

_COLOURS = {"single device": "#888888", "layer split": "#f2a541", "pipelined": "#4c78a8"}
_FORWARD, _BACKWARD, _BEST = "#4c78a8", "#e4572e", "#e4572e"


def draw_bars(measurements: list["Measurement"], path: str) -> None:
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
        color=[_COLOURS[measured.name] for measured in measurements],
    )  # fmt: skip
    for index, measured in enumerate(measurements):
        axes.annotate(
            f"{measured.mean:.2f} s", (index, measured.mean + measured.deviation), xytext=(0, 4), ha="center",
            textcoords="offset points",
        )  # fmt: skip
    axes.margins(y=0.12)
    axes.set(ylabel="seconds a repetition", title="One device, cut over several, pipelined")
    figure.savefig(path, dpi=120)


def draw_sweep(measurements: list["Measurement"], best: "Measurement", path: str) -> None:
    """Draws time by split size, the best one marked. Args as in `draw_bars`."""
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


def draw_timeline(measured: "Measurement", path: str) -> None:
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


def _label(measured: "Measurement") -> str:
    return measured.name if measured.split_size is None else f"{measured.name}\n(split size {measured.split_size})"
