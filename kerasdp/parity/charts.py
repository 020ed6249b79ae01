"""The chart of a comparison: loss curves on top of one another, and how far they are apart."""

from typing import TYPE_CHECKING, Any

import numpy as np

from kerasdp.reporting.figure import BACKEND_COLOURS, make_figure

if TYPE_CHECKING:
    from kerasdp.parity.divergence import Tolerance
    from kerasdp.parity.outcome import Outcome

_DASHES = ("-", "--", ":", "-.")


def draw_comparison(outcomes: list["Outcome"], tolerance: "Tolerance", path: str, title: str) -> None:
    """Draws losses, and their relative differences from the reference's with the tolerance, by step.

    Args:
        outcomes: of `kerasdp.parity.compare`.
        tolerance: that they were judged by.
        path: of the PNG file.
        title: says what was trained.
    """
    figure, (upper, lower) = make_figure(7.6, 6.4, rows=2)
    trained = [outcome for outcome in outcomes if len(outcome.losses)]
    counts = list(dict.fromkeys(outcome.way.num_devices for outcome in trained))
    for index, outcome in enumerate(trained):
        style: dict[str, Any] = {
            "color": BACKEND_COLOURS.get(outcome.way.backend),
            "linestyle": _DASHES[counts.index(outcome.way.num_devices) % len(_DASHES)],
        }
        # Wide below, narrow on top: curves that coincide stay visible.
        width = 1.2 + 5.0 * (len(trained) - 1 - index) / max(len(trained) - 1, 1)
        steps = np.arange(len(outcome.losses))
        upper.plot(steps, outcome.losses, linewidth=width, label=str(outcome.way), **style)
        apart = np.asarray(outcome.differences, float)
        if (apart > 0).any():  # a logarithm has no place for equal
            lower.plot(
                steps[: len(apart)], np.where(apart > 0, apart, np.nan), marker=".", markersize=4, linewidth=1, **style
            )
    longest = max((len(outcome.losses) for outcome in trained), default=1)
    lower.plot(
        range(longest),
        [tolerance.after(step) for step in range(longest)],
        color="#888888",
        linewidth=1,
        label="tolerance",
    )
    upper.set(ylabel="loss", title=title)
    lower.set(xlabel="step", ylabel="relative difference", yscale="log")
    upper.legend(frameon=False, ncols=3, fontsize=8)
    lower.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
