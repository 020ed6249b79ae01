"""Draws the charts of a benchmark."""

from typing import TYPE_CHECKING

from kerasdp.reporting.figure import BACKEND_COLOURS, make_figure

if TYPE_CHECKING:
    from kerasdp.benchmark.results import Measured


def draw_bars(measurements: list["Measured"], path: str) -> None:
    """Draws a bar for each contender: the median of its rounds, from the lowest to the highest. The kit's are full.

    Args:
        measurements: of `kerasdp.benchmark.compare`.
        path: of the PNG file.
    """
    figure, (axes,) = make_figure(7.2, 1.3 + 0.36 * len(measurements), grid="x")
    for index, measured in enumerate(measurements):
        colour = BACKEND_COLOURS[measured.backend]
        axes.barh(
            index, measured.rate, xerr=_errors([measured]), height=0.7, capsize=3, edgecolor=colour,
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


def draw_scaling(measurements: list["Measured"], path: str) -> None:
    """Draws images a second by number of devices, and how the fastest would scale at best. Args as in `draw_bars`."""
    figure, (axes,) = make_figure(8.0, 4.4, grid="y")
    counts = sorted({measured.num_devices for measured in measurements})
    names = list({measured.name: None for measured in measurements})
    for index, name in enumerate(names):
        shift = 0.02 * (index - len(names) // 2)  # so that error bars stand side by side
        ways = sorted((one for one in measurements if one.name == name), key=lambda one: one.num_devices)
        axes.errorbar(
            [one.num_devices + shift for one in ways], [one.rate for one in ways], yerr=_errors(ways), capsize=3,
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


def _errors(measurements: list["Measured"]) -> list[list[float]]:
    """Returns the distances from the medians down to the lowest, and up to the highest."""
    return [
        [one.rate - min(one.rates) for one in measurements],
        [max(one.rates) - one.rate for one in measurements],
    ]
