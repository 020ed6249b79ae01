"""What a run did: lines for people, files for programs, a picture."""

import contextlib
import csv
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from kerasdp.config import Config

PACKAGES = ("kerasdp", "keras", "torch", "jax", "tensorflow", "numpy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run before it starts.

    Args:
        config: its choices.
        devices: the devices in words.
        device_kind: `"gpu"` or `"cpu"`.
        num_devices: over all processes.
        num_replicas: of the model.
        num_processes: worker processes.
        model: the model's name.
        global_batch_size: samples a step, over all devices.
    """

    config: Config
    devices: str
    device_kind: str
    num_devices: int
    num_replicas: int
    num_processes: int
    model: str
    global_batch_size: int


def plain(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Logs as numbers; a metric of several values (a score a class, say) as a list of them."""
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in (logs or {}).items()}
    return {name: value if isinstance(value, list) else float(value) for name, value in values.items()}


def warn(text: str) -> None:
    """A line that people must see, whatever --verbose says."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@functools.cache  # a checkpoint asks, too
def versions() -> dict[str, str]:
    """Python's version, and that of every package that plays a part and is installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def start_line(facts: Facts, learning_rate: float) -> str:
    """One line on what is about to run."""
    replica_batch = facts.config.replica_batch_size(facts.num_replicas)
    share = f" ({replica_batch} a replica)" if facts.num_replicas > 1 else ""
    return (
        f"{facts.config.backend} on {facts.devices} | {facts.model} | batch {facts.global_batch_size}{share} | "
        f"learning rate {learning_rate:.6g} | {facts.config.precision}"
    )


def resume_line(step: int, epoch: int, saved_by: dict[str, Any], *, is_over: bool) -> str:
    """One line on what a run goes on from; `epoch` counts from 0."""
    plural = "" if saved_by["devices"] == 1 else "s"
    came = f"from where {saved_by['backend']} on {saved_by['devices']} device{plural} came"
    if is_over:
        return f"had ended behind step {step}, {came}: nothing is left to train"
    return f"goes on behind step {step}, in epoch {epoch + 1}, {came}"


def epoch_line(epoch: int, epochs: int, logs: dict[str, Any], seconds: float, rate: float) -> str:
    """One line on an epoch that is over."""
    values = " - ".join(f"{name} {value:.4f}" for name, value in logs.items() if isinstance(value, float))
    return f"epoch {epoch + 1}/{epochs} - {seconds:.1f} s - {rate:,.0f} images/s - {values}"


def result(
    facts: Facts,
    *,
    steps: int,
    final: dict[str, float],
    epoch_seconds: list[float],
    epoch_rates: list[float],
    peak_memory_bytes: int,
) -> dict[str, Any]:
    """The content of report.json.

    Args:
        facts: what was known before.
        steps: updates made.
        final: loss and metrics of the last epoch.
        epoch_seconds: seconds of the training part of each epoch. The first, with compilation in it, is left out of
            the median where there are others.
        epoch_rates: images a second of each epoch, likewise.
        peak_memory_bytes: of the first process, or of its device that used most.
    """
    config = facts.config
    return {
        "backend": config.backend,
        "device_kind": facts.device_kind,
        "num_devices": facts.num_devices,
        "num_processes": facts.num_processes,
        "model": facts.model,
        "dataset": config.dataset,
        "global_batch_size": facts.global_batch_size,
        "epochs": len(epoch_seconds),
        "steps": steps,
        "final": final,
        "seconds_per_epoch": statistics.median(epoch_seconds[1:] or epoch_seconds),
        "images_per_second": statistics.median(epoch_rates[1:] or epoch_rates),
        "peak_memory_bytes": peak_memory_bytes,
        "versions": versions(),
    }


def end_line(facts: Facts, result: dict[str, Any]) -> str:
    """One line on how the run went."""
    final = result["final"]
    name = next((name for name in ("val_accuracy", "accuracy", "val_loss", "loss") if name in final), None)
    words = {"val_accuracy": "test accuracy", "accuracy": "training accuracy", "val_loss": "test loss"}
    score = f"{words.get(name, name)} {final[name]:.4f}, " if name else ""
    return (
        f"{score}{result['seconds_per_epoch']:.2f} s/epoch, {result['images_per_second']:,.0f} images/s "
        f"on {facts.devices}" + (f"; files in {facts.config.workdir}" if facts.config.workdir else "")
    )


class RunFiles:
    """The files that a run leaves in its workdir. Those of an earlier run there are replaced.

    A run goes on without them: that the disk is full must not cost what was learned.

    Attributes:
        history: the rows of history.csv.
    """

    def __init__(
        self,
        workdir: str,
        facts: Facts,
        *,
        tensorboard: bool = False,
        last_step: int = 0,
        history: list[dict[str, Any]] | None = None,
    ):
        """With `last_step` and `history` the files of a run go on behind that step."""
        self.workdir = workdir
        self.history = list(history or [])
        self._reported: set[str] = set()
        self._steps: TextIO | None = None
        os.makedirs(workdir, exist_ok=True)
        for name in ("report.json", "history.csv", "curves.png"):  # a run that fails must not keep another's result
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path(name))
        self._write_json("config.json", facts.config.as_dict() | {"versions": versions()})
        with self._tolerated("steps.jsonl"):
            path = self._path("steps.jsonl")
            with open(f"{path}.tmp", "w") as file:
                file.writelines(_lines_until(last_step, path))
            os.replace(f"{path}.tmp", path)  # a run that is killed here has lost nothing
            self._steps = open(path, "a", buffering=1)  # noqa: SIM115 (closed in `close`)
        self._events = _event_writer(self._path("tensorboard"), last_step) if tensorboard else None
        if self.history:
            self._write_history()

    def add_step(self, step: int, epoch: int, loss: float, learning_rate: float, images_per_second: float) -> None:
        """Writes a line of steps.jsonl; `step` and the epochs in the files count from 1, the argument from 0."""
        line = {
            "step": step,
            "epoch": epoch + 1,
            "loss": loss,
            "learning_rate": learning_rate,
            "images_per_second": images_per_second,
        }
        if self._steps is not None:
            with self._tolerated("steps.jsonl"):
                self._steps.write(json.dumps(line) + "\n")
        if self._can_write_events():
            for name in ("loss", "learning_rate", "images_per_second"):
                self._events.add_scalar(f"step/{name}", line[name], step)

    def add_epoch(self, epoch: int, logs: dict[str, float], seconds: float, images_per_second: float) -> None:
        """Writes a row of history.csv and draws curves.png anew."""
        self.history.append({"epoch": epoch + 1, **logs, "seconds": seconds, "images_per_second": images_per_second})
        self._write_history()
        if self._can_write_events():
            for name, value in logs.items():
                self._events.add_scalar(f"epoch/{name}", value, epoch + 1)

    def _write_history(self) -> None:
        # Anew each time: with validation_freq a column may first come in a later epoch.
        names = list(dict.fromkeys(name for row in self.history for name in row))
        with self._tolerated("history.csv"), open(self._path("history.csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.history)
        with self._tolerated("curves.png"):
            draw_curves(self.history, self._path("curves.png"))

    def add_result(self, result: dict[str, Any]) -> None:
        """Writes report.json."""
        self._write_json("report.json", result)

    def close(self) -> None:
        """Closes what is open."""
        if self._steps is not None:
            with self._tolerated("steps.jsonl"):
                self._steps.close()
        if self._can_write_events():
            self._events.close()

    def _can_write_events(self) -> bool:
        # The library writes in a thread, which a full disk ends; then its queue fills, and its users wait for ever.
        if self._events and not self._events.file_writer.event_writer._worker.is_alive():
            warn(f"cannot write into {self._path('tensorboard')}; training goes on")
            self._events = None
        return self._events is not None

    def _path(self, name: str) -> str:
        return os.path.join(self.workdir, name)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        with self._tolerated(name), open(self._path(name), "w") as file:
            json.dump(content, file, indent=2)
            file.write("\n")

    @contextlib.contextmanager
    def _tolerated(self, name: str) -> Iterator[None]:
        """Says once that a file cannot be written, and lets the training go on."""
        try:
            yield
        except OSError as error:
            if name not in self._reported:
                self._reported.add(name)
                reason = error.strerror or error
                warn(f"cannot write {self._path(name)} ({reason}); training goes on")


def _lines_until(last_step: int, path: str) -> list[str]:
    """The lines of steps.jsonl up to a step; a run that was killed may have left half of one."""
    kept = []
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= last_step:
                    kept.append(line.rstrip("\n") + "\n")
    return kept


def _event_writer(folder: str, last_step: int) -> Any:
    from tensorboardX import SummaryWriter  # writes event files without TensorFlow

    return SummaryWriter(folder, purge_step=last_step + 1 if last_step else None)


def draw_curves(history: list[dict[str, Any]], path: str) -> None:
    """Draws loss and accuracy by epoch.

    Args:
        history: a dictionary an epoch, as the rows of history.csv.
        path: of the PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = [name for name in ("loss", "accuracy") if any(name in row for row in history)]
    if not names:
        return
    # A figure of its own, not pyplot: the user's plots and display are left alone.
    figure = Figure(figsize=(5.2 * len(names), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        ends = {key: row[key] for row in history for key in (name, f"val_{name}") if key in row}
        for key, label, colour in ((name, "training", "#4c78a8"), (f"val_{name}", "test", "#f58518")):
            points = [(row["epoch"], row[key]) for row in history if key in row]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=label)
                axes.annotate(
                    f"{points[-1][1]:.3f}",
                    points[-1],
                    xytext=(6, 0),
                    textcoords="offset points",
                    # Apart from one another, however close the curves end.
                    va="bottom" if ends[key] == max(ends.values()) else "top",
                    fontsize=8,
                    color=colour,
                )
        axes.set(xlabel="epoch", title=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.12)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
