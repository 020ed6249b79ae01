"""Makes the figure that every chart is drawn on."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BACKEND_COLOURS = {"torch": "#e4572e", "jax": "#4c78a8", "tensorflow": "#f2a541"}


def make_figure(
    width: float, height: float, *, rows: int = 1, columns: int = 1, grid: str = "both"
) -> tuple["Figure", list["Axes"]]:
    """Makes an empty figure that is not pyplot's, so that the user's plots and display are left alone.

    Args:
        width: in inches.
        height: in inches.
        rows: of axes, one below the other, which share their x axis.
        columns: of axes, side by side.
        grid: along which axis: `"x"`, `"y"` or `"both"`.

    Returns:
        The figure and its axes, row by row.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex="col").flat)
    for each in axes:
        each.grid(alpha=0.25, axis=grid)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes
