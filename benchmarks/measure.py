"""Runs contenders in turn, compares them, and draws the comparison."""

import contextlib
import dataclasses
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Iterable
from typing import Any

from contenders import SHAPES, Contender, Program, Task, Way, choose

from kerasdp.config import BACKENDS, Config, versions
from kerasdp.errors import RunError
from kerasdp.processes.devices import is_installed
from kerasdp.reporting.run_files import BACKEND_COLOURS, make_figure

FASHION_MNIST = 60_000  # training images
SETTLE_SECONDS = 0.2  # threads of the last one may look for work for so long


@dataclasses.dataclass(kw_only=True)
class Measured(Way):
    """What a contender took.

    Args:
        seconds: of each round; of one in which it failed, none, and it took no part any more.
        ready: what it said of itself: `seconds_to_first_step`, `parameters`, `device`; the kit also `flops`.
        last: what its last repetition said: `loss`, `accuracy`, `peak_memory_bytes`.
        rates: samples a second, of each round.
        mfu: model FLOPs utilization (`utilization`), from 0 to 1; None where it is not known.
        error: why it could not be measured; empty if it could.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    ready: dict[str, Any] = dataclasses.field(default_factory=dict)
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    mfu: float | None = None
    error: str = ""

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
        if self.error:
            return f"{self.title:28} {self.error}"
        low, high = min(self.rates), max(self.rates)
        share = f" {self.mfu:8.1%}" if self.mfu is not None else ""
        return (
            f"{self.title:28} {self.rate:10,.1f} {f'{low:,.1f} .. {high:,.1f}':>23} "
            f"{self.ready['seconds_to_first_step']:11.1f} s {self.last['peak_memory_bytes'] / 2**20:9,.0f}"
            f" {FASHION_MNIST / self.rate:10,.1f} s{share}"
        )


def spread(values: Iterable[float]) -> dict[str, float]:
    """Returns the median, the lowest and the highest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(measured: list[Measured]) -> list[dict[str, Any]]:
    """Compares kerasdp with each peer of its framework, and with those of frameworks on which it did not run.

    Returns:
        A dictionary a pair on equally many devices: names, `of_medians`, the ratio of the medians of samples a second,
        and `paired`, the spread of the ratios within each round. Above 1 the kit is faster.
    """
    done = [one for one in measured if one.rates and not one.error]
    backends = {one.backend for one in done if one.is_kit}
    return [
        {
            "kit": kit.name, "peer": peer.name, "num_devices": kit.num_devices, "of_medians": kit.rate / peer.rate,
            "paired": spread(ours / theirs for ours, theirs in zip(kit.rates, peer.rates)),
        }
        for kit in done
        for peer in done
        if kit.is_kit and not peer.is_kit and kit.num_devices == peer.num_devices
        and (peer.backend == kit.backend or peer.backend not in backends)
    ]  # fmt: skip


def speedups(measured: list[Measured]) -> dict[str, dict[int, dict[str, float]]]:
    """Returns, by name and number of devices, the speed relative to the fewest devices, as spread over the rounds."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for name in {one.name: None for one in measured}:
        ways = [one for one in measured if one.name == name and one.rates and not one.error]
        if len(ways) > 1:
            first = min(ways, key=lambda one: one.num_devices)
            found[name] = {
                one.num_devices: spread(rate / alone for rate, alone in zip(one.rates, first.rates)) for one in ways
            }
    return found


def utilization(measured: Measured, flops: float | None, precision: str) -> float | None:
    """Returns the model FLOPs utilization (MFU), from 0 to 1; None where it is not known.

    As in Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B): the operations that the model needs, a
    multiplication and an addition counted as two, over what the devices could do in that time.

    Args:
        measured: of a contender.
        flops: operations of a sample's forward pass. A training step has three times as many.
        precision: in which it trained.
    """
    peak = peak_of(measured.ready.get("device", "cpu"), precision)
    if flops is None or peak is None or not measured.rates:
        return None
    return 3 * flops * measured.rate / (peak * measured.num_devices)


def run(contenders: list[Contender], rounds: int, steps: int, batch_size: int) -> list[Measured]:
    """Starts them one after the other, then lets each repeat in turn, round after round; says so as it goes.

    One that fails takes no part any more.
    """
    found = [Measured(name=one.name, backend=one.backend, num_devices=one.num_devices) for one in contenders]
    with contextlib.ExitStack() as stack:
        running = []
        for contender, measured in zip(contenders, found):
            program = Program(contender)
            stack.callback(program.end)
            try:
                measured.ready = program.answer()
                running.append((program, measured))
                print(f"{contender}: first step after {measured.ready['seconds_to_first_step']:.1f} s", flush=True)
            except RunError as error:
                measured.error = str(error)
                print(f"{contender}: {error}", flush=True)
        for number in range(rounds):
            start = time.perf_counter()
            # To and fro, so that nobody has always the same one before it.
            for program, measured in running if number % 2 == 0 else running[::-1]:
                time.sleep(SETTLE_SECONDS)
                try:
                    measured.last = program.repeat()
                except RunError as error:
                    measured.error = str(error)
                    print(f"{program.contender}: {error}", flush=True)
                    continue
                measured.seconds.append(measured.last["seconds"])
                measured.rates.append(steps * batch_size / measured.last["seconds"])
            running = [(program, measured) for program, measured in running if not measured.error]
            print(f"round {number + 1}/{rounds}: {time.perf_counter() - start:.1f} s", flush=True)
    return found


def compare(
    config: Config,
    task: Task,
    backends: list[str] | None,
    device_counts: list[int],
    peers: list[str] | None,
    rounds: int,
    steps: int,
) -> list[Measured]:
    """Measures the kit and its peers side by side; prints a table, and writes JSON and pictures into the workdir.

    Args:
        config: how it is trained; `workdir` may be None.
        task: what is trained.
        backends: of the kit; None: all that are installed.
        device_counts: numbers of devices.
        peers: names in `PEERS`; None: all that fit; empty: the kit alone.
        rounds: how often each is measured.
        steps: training steps of each round.

    Returns:
        A measurement a contender.

    Raises:
        UserError: if a peer cannot take part.
        RunError: if nothing could be measured.
    """
    backends = backends or [name for name in BACKENDS if is_installed(name)]
    contenders = choose(config, task, backends, device_counts, peers, steps)
    found = run(contenders, rounds, steps, config.batch_size)
    if all(measured.error for measured in found):
        raise RunError(f"none of the contenders could be measured: {found[0].error}")
    flops = next((one.ready["flops"] for one in found if one.ready.get("flops")), None)
    named = (one.ready.get("device", "cpu") for one in found)
    gpu = next((name for name in named if name != "cpu"), "")
    for measured in found:
        measured.mfu = utilization(measured, flops, config.precision)
    print("\n".join(table(config, task, found, rounds, steps, gpu)), flush=True)
    if config.workdir is not None:
        write(config.workdir, config, task, found, rounds, steps, gpu)
    return found


def table(config: Config, task: Task, measured: list[Measured], rounds: int, steps: int, gpu: str) -> list[str]:
    """Returns the table that is printed."""
    model = task.model if task.model in SHAPES else f"{task.model} on {task.dataset}"
    norm = f" | batch norm {config.batch_norm}" if any(one.num_devices > 1 for one in measured) else ""
    lines = [
        "",
        f"{model} | batch {config.batch_size} | {config.precision}{norm} | {gpu or f'{os.cpu_count()} CPU cores'} | "
        f"{rounds} rounds of {steps} steps",
        f"{'':28} {'images/s':>10} {'lowest .. highest':>23} {'to 1st step':>13} {'peak MiB':>9} {'60,000 in':>12}"
        + (f"{'MFU':>9}" if gpu else ""),
        *map(str, measured),
    ]
    compared = ratios(measured)
    if compared:
        lines += ["", "images/s of the kit over the peer's (median of the rounds' ratios, lowest .. highest)"]
    for pair in compared:
        names = f"{pair['kit']} / {pair['peer']}" + (f" x {pair['num_devices']}" if pair["num_devices"] > 1 else "")
        median, low, high = pair["paired"].values()
        lines.append(f"{names:52} {pair['of_medians']:5.2f}   ({median:.2f}, {low:.2f} .. {high:.2f})")
    for name, by_count in speedups(measured).items():
        parts = [f"{found['median']:.2f} on {count}" for count, found in by_count.items()]
        lines.append(f"{name}: times as fast as on {min(by_count)}: {', '.join(parts)}")
    lines += ["", *fastest(measured)]
    return lines


def fastest(measured: list[Measured]) -> list[str]:
    """Returns the fastest of all, and of kerasdp's backends, for each number of devices."""
    lines = []
    for count in sorted({one.num_devices for one in measured}):
        done = [one for one in measured if one.num_devices == count and one.rates and not one.error]
        devices = f"{count} device{'s' if count > 1 else ''}"
        for title, group in (("fastest", done), ("fastest backend of the kit", [one for one in done if one.is_kit])):
            if len(group) > 1:
                best = max(group, key=lambda one: one.rate)
                name = best.backend if group is not done else best.name
                lines.append(f"{title} on {devices}: {name}, {best.rate:,.1f} images/s")
    return lines


def write(
    workdir: str, config: Config, task: Task, measured: list[Measured], rounds: int, steps: int, gpu: str
) -> None:
    """Writes benchmark.json and the charts."""
    os.makedirs(workdir, exist_ok=True)
    machine = {"gpu": gpu, "cores": os.cpu_count(), "platform": platform.platform(), "versions": versions()}
    content = {
        "config": config.as_dict() | task._asdict(), "rounds": rounds, "steps_per_round": steps, "machine": machine,
        "contenders": [one.as_dict() for one in measured], "ratios": ratios(measured), "speedups": speedups(measured),
    }  # fmt: skip
    with open(os.path.join(workdir, "benchmark.json"), "w") as file:
        json.dump(content, file, indent=2)
    done = [one for one in measured if one.rates and not one.error]
    draw_speeds(done, os.path.join(workdir, "bars.png"))
    several = speedups(measured)
    if several:
        scaling = [one for one in done if one.name in several]
        draw_scaling(scaling, os.path.join(workdir, "scaling.png"))
    print(f"pictures and benchmark.json in {workdir}")


# Operations a second in float32 without TF32, and in bfloat16 with dense matrices (None: not known, or not there), by
# all words that a device's name has. NVIDIA's data sheets give twice as much in bfloat16 where they count sparsity.
# TPUs: one chip, from cloud.google.com/tpu/docs/system-architecture-tpu-vm; their float32 is made of several bfloat16.
PEAKS: dict[str, tuple[float | None, float | None]] = {
    "GB200": (80e12, 2500e12), "B200": (75e12, 2250e12), "GH200": (67e12, 989e12), "H200 NVL": (60e12, 835e12),
    "H200": (67e12, 989e12), "H100 PCIe": (51e12, 756e12), "H100 NVL": (60e12, 835e12), "H100": (67e12, 989e12),
    "A100": (19.5e12, 312e12), "L40S": (91.6e12, 362e12), "L40": (90.5e12, 181e12), "L4": (30.3e12, 121e12),
    "A10": (31.2e12, 125e12), "A10G": (31.5e12, 70e12), "A40": (37.4e12, 149.7e12), "A30": (10.3e12, 165e12),
    "RTX A6000": (38.7e12, 154.8e12), "RTX 4090": (82.6e12, 165.2e12), "RTX 3090": (35.6e12, 71e12),
    "T4": (8.1e12, None), "V100 SXM2": (15.7e12, None), "V100 PCIE": (14e12, None),
    "TPU v6 lite": (None, 918e12), "TPU v5 lite": (None, 197e12), "TPU v5p": (None, 459e12), "TPU v5": (None, 459e12),
    "TPU v4": (None, 275e12),
}  # fmt: skip
# Words in the name of a part of a GPU, or of another chip with the same name.
_OTHERS = {"MIG", "Laptop", "Max", "Ti", "D"}


def peak_of(device: str, precision: str) -> float | None:
    """Returns the most operations a second of a device in a precision; None where that is not known.

    Args:
        device: its name, as a framework gives it: `"NVIDIA H100 80GB HBM3"`, `"TPU v4"`.
        precision: `"float32"` or `"bfloat16"`.
    """
    words = set(re.findall(r"\w+", device))
    if words & _OTHERS or precision not in ("float32", "bfloat16"):
        return None
    known = [name for name in PEAKS if set(name.split()) <= words]
    best = max(known, key=lambda name: len(name.split()), default=None)
    return None if best is None else PEAKS[best][precision == "bfloat16"]


def draw_speeds(measurements: list[Measured], path: str) -> None:
    """Draws a bar for each contender: the median of its rounds, from the lowest to the highest. The kit's are full.

    Args:
        measurements: of `compare`.
        path: of the PNG file.
    """
    figure, (axes,) = make_figure(7.2, 1.3 + 0.36 * len(measurements), grid="x")
    for index, measured in enumerate(measurements):
        colour = BACKEND_COLOURS[measured.backend]
        axes.barh(
            index, measured.rate, xerr=_error_bars([measured]), height=0.7, capsize=3, edgecolor=colour,
            color=colour if measured.is_kit else "white", hatch=None if measured.is_kit else "///",
        )  # fmt: skip
        text, place = f"{measured.rate:,.0f}", (max(measured.rates), index)
        axes.annotate(text, place, xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(measurements)), [one.title for one in measurements])
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
