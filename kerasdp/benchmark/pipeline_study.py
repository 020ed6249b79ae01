"""Measures a model on one device, cut over several, and pipelined with many sizes of micro-batches."""

import dataclasses
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kerasdp.benchmark.results import Measurement, draw_study, draw_sweep, draw_timeline
from kerasdp.config import Config
from kerasdp.errors import RunError, UserError
from kerasdp.launch import launch
from kerasdp.runtime.workers import call_in_new_process

if TYPE_CHECKING:
    import keras

    from kerasdp.training.runner import Runner


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
