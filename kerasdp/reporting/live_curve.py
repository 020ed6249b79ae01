"""Shows the curves of a run while it trains: a figure in a notebook, a line of text in a terminal."""

import os
import sys
from typing import Any

import keras

from kerasdp.reporting import report
from kerasdp.reporting.live_figure import FOLDER
from kerasdp.reporting.run_files import draw_curves

_HEIGHTS = "▁▂▃▄▅▆▇█"


class LiveCurve(keras.callbacks.Callback):
    """Draws the curves again after each epoch, in the notebook that started the run, or else in a terminal."""

    def __init__(self, facts: report.Facts, *, fit: int, history: list[dict[str, Any]] | None = None):
        """Starts with what is known.

        Args:
            facts: what is known of the run.
            fit: its number of this `fit`, from 1.
            history: rows of the epochs before a resume, as in history.csv.
        """
        super().__init__()
        self.facts, self.fit, self.history = facts, fit, list(history or [])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Draws, where somebody can see it."""
        self.history.append({"epoch": epoch + 1, **report.plain(logs)})
        folder = os.environ.get(FOLDER)
        if folder is not None:
            path = os.path.join(folder, f"fit-{self.fit:04d}.png")
            draw_curves(self.history, f"{path}.new", self.facts.title)
            if os.path.exists(f"{path}.new"):
                os.replace(f"{path}.new", path)
        elif sys.stdout.isatty():
            print(curve_line(self.history), flush=True)


def curve_line(history: list[dict[str, Any]], width: int = 40) -> str:
    """Draws the losses of the last epochs as a line of text, high ones as high blocks.

    Args:
        history: a dictionary per epoch, as the rows of history.csv.
        width: the most epochs that are shown.

    Returns:
        As `loss 2.31 █▅▂▁ 0.12 - val_loss 2.01 █▃▁▁ 0.25`.
    """
    parts = []
    for name in ("loss", "val_loss"):
        values = [row[name] for row in history if isinstance(row.get(name), float)][-width:]
        if values:
            low, high = min(values), max(values)
            steps = (len(_HEIGHTS) - 1) / (high - low) if high > low else 0.0
            blocks = "".join(_HEIGHTS[round((value - low) * steps)] for value in values)
            parts.append(f"{name} {values[0]:.4g} {blocks} {values[-1]:.4g}")
    return " - ".join(parts)
