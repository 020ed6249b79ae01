"""The pictures of a study of a pipeline."""

from typing import Any

_COLOURS = {"single device": "#888888", "layer split": "#f2a541", "pipelined": "#4c78a8"}
_FORWARD, _BACKWARD, _BEST = "#4c78a8", "#e4572e", "#e4572e"


def draw_bars(measurements: list[Any], path: str) -> None:
    """A bar a way, with the deviation of its repetitions.

    Args:
        measurements: of `kerasdp.pipeline.study`.
        path: of the PNG file.
    """
    figure, axes = _figure(5.4, 4.2)
    names = [_label(measured) for measured in measurements]
    means = [measured.mean for measured in measurements]
    axes.bar(
        names, means, yerr=[measured.deviation for measured in measurements], capsize=6, width=0.6,
        color=[_COLOURS[measured.name] for measured in measurements],
    )  # fmt: skip
    for place, measured in enumerate(measurements):
        axes.annotate(
            f"{measured.mean:.2f} s", (place, measured.mean + measured.deviation), xytext=(0, 4), ha="center",
            textcoords="offset points",
        )  # fmt: skip
    axes.margins(y=0.12)
    axes.set(ylabel="seconds a repetition", title="One device, cut over several, pipelined")
    figure.savefig(path, dpi=120)


def draw_sweep(measurements: list[Any], best: Any, path: str) -> None:
    """Time by split size, the best one marked. Args as in `draw_bars`."""
    figure, axes = _figure(6.4, 4.2)
    ordered = sorted(measurements, key=lambda measured: measured.split_size)
    axes.errorbar(
        [measured.split_size for measured in ordered], [measured.mean for measured in ordered],
        yerr=[measured.deviation for measured in ordered], color=_FORWARD, marker="o", capsize=4,
    )  # fmt: skip
    axes.plot(
        [best.split_size], [best.mean], marker="o", markersize=13, markerfacecolor="none", markeredgewidth=2,
        color=_BEST, linestyle="none", label=f"best: {best.split_size} ({best.mean:.2f} s)",
    )  # fmt: skip
    axes.set(xlabel="split size (samples a micro-batch)", ylabel="seconds a repetition", ylim=(0, None))
    axes.set_title("How large a micro-batch?")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def draw_timeline(measured: Any, path: str) -> None:
    """Which stage works on which micro-batch when. Args as in `draw_bars`."""
    stages = sorted({event[0] for event in measured.work})
    figure, axes = _figure(9.0, 1.4 + 0.7 * len(stages))
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


def _label(measured: Any) -> str:
    return measured.name if measured.split_size is None else f"{measured.name}\n(split size {measured.split_size})"


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
