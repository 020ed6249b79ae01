"""Makes the figure that every chart is drawn on, and shows the curves of a run in the notebook that started it."""

import contextlib
import contextvars
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
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


# Names the folder into which rank 0, in whatever process, puts a picture for each `fit`.
FOLDER = "KERASDP_LIVE_FIGURES"
_SECONDS_BETWEEN_LOOKS = 0.3


def _is_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


@contextlib.contextmanager
def live_figures() -> Iterator[None]:
    """Shows, in a notebook, a figure for each `fit` within the `with` block, and redraws it in place.

    Training may be in this process or in others, so a thread looks into a folder for pictures.
    """
    if not _is_notebook():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
        end = threading.Event()
        # The context tells the kernel which cell the output belongs to.
        watch = threading.Thread(target=contextvars.copy_context().run, args=(_watch, folder, end), daemon=True)
        os.environ[FOLDER] = folder
        watch.start()
        try:
            yield
        finally:
            os.environ.pop(FOLDER, None)
            end.set()
            watch.join()


def _watch(folder: str, end: threading.Event) -> None:
    from IPython.display import Image, display

    shown: dict[str, int] = {}  # files, each with the time when it was written
    is_last = False
    while not is_last:
        is_last = end.wait(_SECONDS_BETWEEN_LOOKS)  # then a last look
        for name in sorted(name for name in os.listdir(folder) if name.endswith(".png")):
            path = os.path.join(folder, name)
            written = os.stat(path).st_mtime_ns
            if shown.get(name) == written:
                continue
            with open(path, "rb") as file:
                picture = Image(data=file.read(), format="png", width=620)
            display(picture, display_id=path, update=name in shown)
            shown[name] = written
