"""Runs kerasdp as a contender: `python -m kerasdp.benchmark.kerasdp_program CONFIG STEPS`, with a `Config` as JSON.

`benchmarks/kit_loop.py` does so with models and data that no `Config` names.

It is asked for repetitions as `benchmarks/protocol.py` tells. With torch on several devices each rank has a named
pipe, into which the first process writes what it reads: so no rank waits for the others in a collective, which could
time out.
"""

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import kerasdp

STARTED = time.time()
WARM_UP_STEPS = 3


# Makes, of a config, all inputs and targets, and a function that builds the model, without compiling it.
Task = Callable[["kerasdp.Config"], tuple[Any, Any, Callable[[], Any]]]


def of_config(config: "kerasdp.Config") -> tuple[Any, Any, Callable[[], Any]]:
    """Loads the data set and builds the model of the config."""
    import numpy as np

    data = kerasdp.load_data(config)
    indices = np.arange(data.train.num_samples // config.batch_size * config.batch_size)  # full batches only
    if not len(indices):
        raise kerasdp.UserError(f"--batch_size: expected at most {data.train.num_samples}, the samples there are")
    x, (y, _) = data.train.inputs(indices), data.train.targets(indices)
    return x, y, functools.partial(kerasdp.build_model, config, data.input_shape, data.num_classes)


# Takes a function that trains a number of steps; returns the bytes that a device sends in a step.
Traffic = Callable[[Callable[[int], Any]], int]


def train(
    task: Task, traffic: Traffic | None, steps: int, started: float, folder: str | None, runner: "kerasdp.Runner"
) -> None:
    """Trains for a step, warms up, and repeats as it is asked to."""
    import keras
    import numpy as np

    config = runner.config
    x, y, build = task(config)
    with runner.scope():
        model = build()
        model.compile(
            kerasdp.make_optimizer(config),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    before = memory_now()

    def repeat(steps: int) -> dict[str, float]:
        begin = time.perf_counter()
        history = runner.fit(
            model, x, y, steps_per_epoch=steps, initial_epoch=runner.num_fits, epochs=runner.num_fits + 1
        ).history
        seconds = time.perf_counter() - begin
        growth = runner.strategy.processes.all_gather_object(memory_peak() - before)
        memory = runner.strategy.processes.all_gather_object(runner.strategy.peak_memory_bytes())
        return {
            "seconds": runner.epoch_seconds[-1],
            "loss": history["loss"][0],
            "accuracy": history["accuracy"][0],
            "peak_memory_bytes": max(memory) if runner.devices.is_accelerator else sum(memory),
            "growth_bytes": max(growth),
            "fit_seconds": seconds,
        }

    repeat(1)
    seconds = time.time() - started
    repeat(WARM_UP_STEPS)
    forget_memory_peak()  # that of compiling
    repeat(WARM_UP_STEPS)
    parameters = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    sent = {} if traffic is None else {"bytes_a_step": traffic(repeat)}
    _say(
        runner, ready=True, seconds_to_first_step=seconds, parameters=parameters, flops=_forward_flops(model),
        device=_device_name(runner), **sent,
    )  # fmt: skip
    for _ in _lines(folder, runner.strategy.processes.rank):
        runner.strategy.processes.any_rank(False)  # all ranks begin together
        _say(runner, **repeat(steps))


def _forward_flops(model: Any) -> float | None:
    """Operations of a sample's forward pass; None where the layers' calls are not known."""
    from kerasdp.keras_compat.models import as_functional
    from kerasdp.pipeline.graph import graph_of
    from kerasdp.pipeline.partition import costs_of

    known = as_functional(model)
    return None if known is None else sum(costs_of(graph_of(known), "flops", 1))


def _device_name(runner: "kerasdp.Runner") -> str:
    backend = importlib.import_module(f"kerasdp.backends.{runner.config.backend}.devices")
    return backend.device_name() if runner.devices.is_accelerator else "cpu"


def _say(runner: "kerasdp.Runner", **values: Any) -> None:
    if runner.is_chief:
        print(json.dumps(values), flush=True)


def _lines(folder: str | None, rank: int) -> Iterable[str]:
    return sys.stdin if folder is None else open(os.path.join(folder, str(rank)))  # noqa: SIM115


def _pass_on(folder: str, count: int) -> None:
    """Writes each line into the ranks' pipes."""
    pipes = [open(os.path.join(folder, str(rank)), "w", buffering=1) for rank in range(count)]  # noqa: SIM115
    for line in sys.stdin:
        for pipe in pipes:
            pipe.write(line)
    for pipe in pipes:
        pipe.close()


def memory_now() -> int:
    """Returns the memory that this process has now, in bytes; 0 where the system does not say (not Linux)."""
    return _status("VmRSS")


def memory_peak() -> int:
    """Returns the most that it had since `forget_memory_peak`, in bytes."""
    return _status("VmHWM")


def forget_memory_peak() -> None:
    """Resets the peak."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # man 5 proc


def _status(name: str) -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def run(config: "kerasdp.Config", steps: int, task: Task = of_config, traffic: Traffic | None = None) -> None:
    """Starts the run.

    Args:
        config: how it trains; its model and data set are read by `of_config` alone.
        steps: of a repetition.
        task: what it trains; it is sent to the worker processes.
        traffic: counts what is sent, in each worker process; None: nobody does.
    """
    num_ranks = config.num_devices or 1 if config.backend == "torch" else 1
    try:
        if num_ranks == 1:
            kerasdp.launch(functools.partial(train, task, traffic, steps, STARTED, None), config)
            return
        with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
            for rank in range(num_ranks):
                os.mkfifo(os.path.join(folder, str(rank)))
            threading.Thread(target=_pass_on, args=(folder, num_ranks), daemon=True).start()
            kerasdp.launch(functools.partial(train, task, traffic, steps, STARTED, folder), config)
    except kerasdp.RunError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    run(kerasdp.Config(**json.loads(sys.argv[1])), int(sys.argv[2]))
