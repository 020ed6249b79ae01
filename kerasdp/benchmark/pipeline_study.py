"""Measures a model on one device, cut over several, and pipelined with many sizes of micro-batches; draws charts."""

import dataclasses
import json
import os
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kerasdp.config import Config
from kerasdp.errors import RunError, UserError
from kerasdp.launch import launch
from kerasdp.reporting.figure import make_figure
from kerasdp.runtime.workers import call_in_new_process

if TYPE_CHECKING:
    import keras

    from kerasdp.training.runner import Runner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one way to train took.

    Args:
        name: `"single device"`, `"layer split"` or `"pipelined"`.
        split_size: samples a micro-batch; None where there are none.
        seconds: of each repetition.
        memory: most bytes that each device has used; empty where devices share a process, so that nobody knows.
        work: of a watched step: `(stage, "forward" or "backward", micro-batch, begin, end)`.
        table: the cut, in words.
        error: why it could not be trained; empty if it could.
    """

    name: str
    split_size: int | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)
    work: list[tuple[int, str, int, float, float]] = dataclasses.field(default_factory=list)
    table: str = ""
    error: str = ""

    @property
    def mean(self) -> float:
        """Seconds of a repetition."""
        return statistics.mean(self.seconds)

    @property
    def deviation(self) -> float:
        """Returns the standard deviation of the repetitions' seconds."""
        return statistics.stdev(self.seconds)

    @property
    def bubble(self) -> float:
        """Returns the share of the watched step in which stages wait, from 0 to 1."""
        stages = {event[0] for event in self.work}
        span = max(event[4] for event in self.work) - min(event[3] for event in self.work)
        # Pieces of a stage's work may overlap where its device runs several at once: that time is not idle twice.
        busy = 0.0
        for stage in stages:
            until = float("-inf")
            for begin, end in sorted(event[3:] for event in self.work if event[0] == stage):
                busy += max(end - max(begin, until), 0.0)
                until = max(until, end)
        return 1.0 - busy / (len(stages) * span)

    @property
    def ideal_bubble(self) -> float:
        """Returns `bubble` for equally long stages and free transport (Huang et al. 2019, arXiv:1811.06965)."""
        stages, micro_batches = (len({event[place] for event in self.work}) for place in (0, 2))
        return (stages - 1) / (micro_batches + stages - 1)

    def __str__(self) -> str:
        name = self.name if self.split_size is None else f"{self.name}, split size {self.split_size}"
        if self.error:
            return f"{name:28} {self.error}"
        memory = ", ".join(f"{number / 2**20:,.0f}" for number in self.memory)
        overlap = f"   bubble {self.bubble:4.0%} (ideal {self.ideal_bubble:4.0%})" if self.work else ""
        return f"{name:28} {self.mean:8.3f} s +- {self.deviation:.3f}{overlap}" + (
            f"   peak MiB a device {memory}" if memory else ""
        )


def measured(runner: "Runner", model: "keras.Model", x: Any = None, y: Any = None) -> dict[str, Any]:
    """Returns what the last `fit` took, for `study`; a pipeline is then trained for two more steps.

    Args as in `stage_work`.

    Returns:
        The `seconds` of each epoch but the first, which compiles; `memory`, most bytes that each device has used
        (empty where devices share a process); the `table` of stages and their `work`, if it is a pipeline.
    """
    is_pipeline = runner.config.strategy == "pipeline"
    return {
        "seconds": runner.epoch_seconds[1:],
        "memory": runner.strategy.peak_memory_by_device(),
        "table": runner.strategy.description(model),
        "work": stage_work(runner, model, x, y) if is_pipeline else [],
    }


def stage_work(
    runner: "Runner", model: "keras.Model", x: Any = None, y: Any = None
) -> list[tuple[int, str, int, float, float]]:
    """Records which stage worked on which micro-batch when, in one training step.

    To watch costs time: each piece of work is waited for. The model is trained on.

    Args:
        runner: that of the run.
        model: one that `runner.fit` has trained as a pipeline.
        x: as for `fit`, of at least one batch.
        y: as for `fit`.

    Returns:
        `(stage, "forward" or "backward", micro-batch, begin, end)` of each piece of work, by its begin, in seconds
        from that of the first.

    Raises:
        UserError: if the run is no pipeline.
    """
    if runner.strategy.stages is None:
        raise UserError("stage_work: needs a model that was trained with --strategy=pipeline")
    pipeline = runner.strategy.stages.engine_of(model)
    pipeline.timeline = []
    try:
        runner.fit(model, x, y, epochs=2, steps_per_epoch=1, verbose=0)  # the first step may compile
        events = [event for part in runner.strategy.processes.all_gather_object(pipeline.timeline) for event in part]
    finally:
        pipeline.timeline = None
    last = {event[:3]: event for event in sorted(events, key=lambda event: event[3])}
    first = min(event[3] for event in last.values())
    return sorted(((*event[:3], event[3] - first, event[4] - first) for event in last.values()), key=lambda e: e[3])


def study(
    train: Callable[..., dict[str, Any]], config: Config, split_sizes: list[int], repetitions: int
) -> list[Measurement]:
    """Trains in all ways, each in a process of its own; prints, and writes into the workdir, what they took.

    Args:
        train: gets a `kerasdp.Runner` whose `config.epochs` are the repetitions and one before them, which is not
            measured, and returns what `Measurement` holds of `seconds`, `memory` and `work`; a function of a module.
        config: `num_devices` and `num_stages` are those of the pipeline (None for both: 2).
        split_sizes: samples a micro-batch; those above the batch are left out.
        repetitions: at least 2.

    Returns:
        A measurement a way: one device, the layer split, then one a split size.

    Raises:
        RunError: if none but the single device could be trained.
    """
    config = dataclasses.replace(config, epochs=repetitions + 1, checkpoint_every="never", verbose=0)
    workdir, config = config.workdir, dataclasses.replace(config, workdir=None, checkpoint_dir=None)
    whole = dataclasses.replace(
        config, strategy="data", num_devices=1, num_stages=None, cut_at=None, balance="time", pipeline_schedule="gpipe"
    )
    is_open = not (config.num_stages or config.cut_at or config.num_devices)
    cut = dataclasses.replace(config, strategy="pipeline", num_stages=2 if is_open else config.num_stages)
    size = config.batch_size
    in_turn = dataclasses.replace(cut, micro_batches=1, pipeline_schedule="gpipe")  # one has nothing to overlap with
    if cut.pipeline_schedule == "interleaved1f1b":
        in_turn = dataclasses.replace(in_turn, num_stages=None)
    ways: list[tuple[str, int | None, Config]] = [("single device", None, whole), ("layer split", None, in_turn)]
    ways += [("pipelined", n, dataclasses.replace(cut, split_size=str(n))) for n in split_sizes if n <= size]
    found = []
    for name, split_size, settings in ways:
        try:
            result = call_in_new_process(launch, train, settings, name=name)
            found.append(Measurement(name=name, split_size=split_size, **result))
        except RunError as error:
            found.append(Measurement(name=name, split_size=split_size, error=str(error)))
        if name == "layer split" and found[-1].table:
            print(found[-1].table.rpartition("\n")[0])
        print(found[-1], flush=True)
    pipelined = [measured for measured in found if measured.name == "pipelined" and measured.seconds]
    if not pipelined:
        raise RunError(f"no pipeline could be trained: {found[-1].error}")
    best = min(pipelined, key=lambda measured: measured.mean)
    print(f"best split size: {best.split_size}")
    if workdir is not None:
        os.makedirs(workdir, exist_ok=True)
        with open(os.path.join(workdir, "pipeline.json"), "w") as file:
            json.dump({"config": config.as_dict(), "ways": [dataclasses.asdict(way) for way in found]}, file, indent=2)
        draw_study([way for way in (*found[:2], best) if way.seconds], os.path.join(workdir, "bars.png"))
        draw_sweep(pipelined, best, os.path.join(workdir, "sweep.png"))
        draw_timeline(best, os.path.join(workdir, "timeline.png"))
        print(f"pictures and pipeline.json in {workdir}")
    return found


_COLOURS = {"single device": "#888888", "layer split": "#f2a541", "pipelined": "#4c78a8"}
_FORWARD, _BACKWARD, _BEST = "#4c78a8", "#e4572e", "#e4572e"


def draw_study(measurements: list[Measurement], path: str) -> None:
    """Draws a bar for each way to train, with the deviation of its repetitions.

    Args:
        measurements: of `kerasdp.benchmark.study`.
        path: of the PNG file.
    """
    figure, (axes,) = make_figure(5.4, 4.2, grid="y")
    names = [one.name + (f"\n(split size {one.split_size})" if one.split_size else "") for one in measurements]
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


def draw_sweep(measurements: list[Measurement], best: Measurement, path: str) -> None:
    """Draws time by split size, the best one marked. Args as in `draw_study`."""
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


def draw_timeline(measured: Measurement, path: str) -> None:
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
