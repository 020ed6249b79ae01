"""Formats the lines that a run prints, and builds the content of report.json."""

import dataclasses
import importlib
import os
import statistics
import sys
from collections.abc import Collection
from typing import Any

from kerasdp.config import Config, versions
from kerasdp.errors import addressed, redacted
from kerasdp.run_state import RunState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Describes a run before it starts.

    Args:
        config: configuration of the run.
        devices: text that describes the devices.
        device_kind: `"gpu"`, `"tpu"`, `"cpu"`, or the name that a JAX plug-in uses.
        num_devices: number of devices of all processes.
        num_processes: number of worker processes.
        model: name of the model.
        data: name of the data set, or an empty string.
        epochs: number of epochs.
        folder: folder for the files of this `fit`; None: no files.
        chance_loss: cross-entropy of a model that predicts all classes with equal probability; None if not known.
    """

    config: Config
    devices: str
    device_kind: str
    num_devices: int
    num_processes: int
    model: str
    data: str = ""
    epochs: int = 1
    folder: str | None = None
    chance_loss: float | None = None

    @property
    def title(self) -> str:
        """Returns the title of the run's pictures: model, data, backend, devices and batch size."""
        of = f" on {self.data}" if self.data else ""
        return f"{self.model}{of} | {self.config.backend} on {self.devices} | batch {self.config.batch_size}"

    @property
    def choices(self) -> dict[str, Any]:
        """Returns the configuration of the run as JSON values, with the flags that the user's program defines."""
        found = {"model": self.model, "dataset": self.data or None, "epochs": self.epochs} | self.config.as_dict()
        if "absl.flags" in sys.modules:
            found["flags"] = importlib.import_module("kerasdp.flags").of_program()
        return found


def plain(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Converts logs to floats. A metric with several values, such as a score per class, becomes a list of floats."""
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in (logs or {}).items()}
    return {name: value if isinstance(value, list) else float(value) for name, value in values.items()}


def warn(text: str) -> None:
    """Prints a warning to stderr. The value of --verbose has no effect on warnings."""
    print(f"warning: {redacted(addressed(text))}", file=sys.stderr, flush=True)


def say(*lines: str) -> None:
    """Prints lines to stdout.

    If the program that reads the output has ended (`head -1`, for example), the training continues without output.
    """
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        drop_stdout()
        warn("the program that read this output has ended; training continues")


def drop_stdout() -> None:
    """Redirects stdout to /dev/null, so that later output raises no error, also when Python exits."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def in_columns(lines: list[list[str]], right: Collection[int] = ()) -> str:
    """Formats rows of texts as a table. The columns with the indices in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if number in right else text.ljust(width)
            for number, (text, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def start_line(facts: Facts, learning_rate: float, schedule: str = "constant") -> str:
    """Formats the first line of a run: backend, devices, model, batch size, learning rate and precision.

    With a schedule, the learning rate is the value for the next update. It may be 0 during warm-up.
    """
    of_schedule = "" if schedule == "constant" else f" now, by {schedule}"
    num_replicas = facts.config.num_replicas(facts.num_devices)
    share = f" ({facts.config.replica_batch_size(num_replicas)} a replica)" if num_replicas > 1 else ""
    return (
        f"{facts.config.backend} on {facts.devices} | {facts.model} | batch {facts.config.batch_size}{share} | "
        f"learning rate {learning_rate:.6g}{of_schedule} | {_precision(facts)}"
    )


def _precision(facts: Facts) -> str:
    """Returns the precision as text.

    With the default precision, the text also says whether GPUs may use TF32.
    """
    if facts.config.precision != "auto":
        return facts.config.precision
    is_exact = facts.device_kind != "gpu" or not facts.config.may_use_tf32
    return "float32" if is_exact else "float32, in TF32 where the GPU has it (--precision=float32: exact)"


def resume_line(saved: dict[str, Any], *, is_over: bool) -> str:
    """Formats the line that says from which checkpoint a run resumes.

    Args:
        saved: the state in the checkpoint.
        is_over: whether the run had already ended.
    """
    backend, devices = saved["saved_by"]["backend"], saved["saved_by"]["devices"]
    origin = f"saved by {backend} on {devices} device{'' if devices == 1 else 's'}"
    if is_over:
        return f"had ended after step {saved['step']}, {origin}: nothing is left to train"
    return f"resumes after step {saved['step']}, in epoch {saved['epoch'] + 1}; {origin}"


def epoch_line(epoch: int, epochs: int, logs: dict[str, Any], seconds: float, rate: float) -> str:
    """Formats the line of a finished epoch."""
    values = " - ".join(f"{name} {value:.4f}" for name, value in logs.items() if isinstance(value, float))
    return f"epoch {epoch + 1}/{epochs} - {seconds:.1f} s - {rate:,.0f} samples/s - {values}"


def result(
    facts: Facts, state: RunState, update_rule: dict[str, Any], final: dict[str, float], peak_memory_bytes: int
) -> dict[str, Any]:
    """Returns the content of report.json.

    Args:
        facts: description of the run.
        state: state of the run. If there are several epochs, the medians exclude the first epoch, which includes
            compilation.
        update_rule: dictionary with `optimizer`, `learning_rate` (of the first update) and `schedule`.
        final: loss and metrics of the last epoch.
        peak_memory_bytes: largest peak memory of a device of this process; on the CPU, the peak memory of this process.
    """
    config = facts.config
    return {
        "backend": config.backend,
        "device_kind": facts.device_kind,
        "num_devices": facts.num_devices,
        "num_processes": facts.num_processes,
        "model": facts.model,
        "dataset": facts.data or None,
        **update_rule,
        "global_batch_size": config.batch_size,
        "epochs": len(state.epoch_seconds),
        "steps": state.step,
        "final": final,
        "seconds_per_epoch": _usual(state.epoch_seconds, state.num_restored),
        "images_per_second": _usual(state.epoch_rates, state.num_restored),
        "peak_memory_bytes": peak_memory_bytes,
        "versions": versions(),
    }


def _usual(values: list[float], num_restored: int) -> float:
    """Returns the median over the epochs of this process, without its first epoch, in which a step is compiled."""
    own = values[num_restored:] or values
    return statistics.median(own[1:] or own)


def end_line(facts: Facts, result: dict[str, Any]) -> str:
    """Formats the last line of a run, with the result and the speed."""
    final = result["final"]
    name = next((name for name in ("val_accuracy", "accuracy", "val_loss", "loss") if name in final), None)
    words = {"val_accuracy": "validation accuracy", "accuracy": "training accuracy", "val_loss": "validation loss"}
    score = f"{words.get(name, name)} {final[name]:.4f}, " if name else ""
    return (
        f"{score}{result['seconds_per_epoch']:.2f} s/epoch, {result['images_per_second']:,.0f} samples/s "
        f"on {facts.devices}" + (f"; files in {facts.folder}" if facts.folder else "")
    )
