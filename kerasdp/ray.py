"""Trains on a Ray cluster: one run over several workers, or many runs at a time. Needs `pip install 'kerasdp[ray]'`."""

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kerasdp import errors
from kerasdp.checkpoint.storage import file_system, is_url, require_folder
from kerasdp.config import Config, prepared_workdir
from kerasdp.errors import UserError, WorkerError, from_command_line, is_from_command_line
from kerasdp.launch import launch
from kerasdp.runtime.devices import choose_backend
from kerasdp.runtime.returning import SentResult
from kerasdp.runtime.sending import SentFunction, sent
from kerasdp.sweep import Trial, finished, in_own_process, trials_of, write_results

__all__ = ["run", "sweep"]
# What Ray keeps of a run, in the workdir or beside the checkpoints.
_FOLDER = "ray"
_ERROR = "error"


def run(
    train: Callable[..., Any],
    settings: Config | None = None,
    *,
    num_workers: int | tuple[int, int] = 1,
    cpus_per_worker: float | None = None,
    **changes: Any,
) -> Any:
    """Runs `train(runner)` on the workers of a Ray cluster, as `kerasdp.launch` does on machines.

    Each worker has `num_devices` devices. When a worker or its node is lost, all start again from the last checkpoint,
    `max_restarts` times; with a range of workers with as many as there are then. Ray gets the metrics of each epoch.

    Args:
        train: as for `kerasdp.launch`.
        settings: the choices of the run. `workdir` is in a folder that all nodes share, or `checkpoint_dir` is given.
        num_workers: how many, or the fewest and the most.
        cpus_per_worker: cores that Ray sets aside for each. None: one for each device.
        **changes: fields of `kerasdp.Config` that replace those of `settings`.

    Returns:
        What `train` returned on the first worker.

    Raises:
        UserError: if the choices cannot be had.
        RunError: if the run failed; as `kerasdp.launch`.
    """
    settings = _resolve_paths(dataclasses.replace(settings or Config(), **changes))
    if not isinstance(num_workers, int):
        fewest, most = num_workers
        num_workers = fewest if fewest == most else (fewest, most)
    with prepared_workdir(settings.workdir, settings.resume), _connected():
        if settings.checkpoint_dir is not None:
            require_folder(settings.checkpoint_dir, settings.resume)
        with sent(train, to_other_machines=True) as function:
            told = {"train": function, "settings": _settings_of_worker(settings)} | _describe_program()
            returned = _fit(told, settings, num_workers, cpus_per_worker)
    if "error" in returned:
        raise errors.from_name(*returned["error"]) or WorkerError(returned["error"][1])
    return returned["result"].received()


def sweep(
    train: Callable[..., Any],
    settings: Config | None = None,
    grid: dict[str, list[Any]] | None = None,
    *,
    cpus_per_run: float | None = None,
    **changes: Any,
) -> list[Trial]:
    """Runs `train(runner)` with each combination of some choices, as many at a time as the Ray cluster has room for.

    Each run has a folder of its own in the workdir, from whose last checkpoint it restarts when its process or node is
    lost, `max_restarts` times; with `resume` the whole sweep continues where it stopped. Prints a table of all runs,
    and leaves it as `sweep.csv`, and the curves of all as `sweep.png`, in the workdir.

    Args:
        train: as for `kerasdp.launch`.
        settings: the choices that all runs share. `workdir` must be given.
        grid: values of fields of `kerasdp.Config`, by name: `{"learning_rate": [0.01, 0.1], "batch_size": [32, 64]}`.
        cpus_per_run: cores that Ray sets aside for each. None: one for each device.
        **changes: fields of `kerasdp.Config` that replace those of `settings`.

    Returns:
        The runs, in the order of the grid.

    Raises:
        UserError: if the choices cannot be had.
    """
    settings = _resolve_paths(dataclasses.replace(settings or Config(), **changes))
    workdir = settings.workdir
    if workdir is None:
        raise UserError("a sweep needs a folder for its runs, but none is set: add --workdir=FOLDER")
    runs = trials_of(settings, workdir, grid or {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(prepared_workdir(workdir, settings.resume))
        for run in runs:
            stack.enter_context(prepared_workdir(run.settings.workdir, settings.resume))
        stack.enter_context(_connected())
        told = {"train": stack.enter_context(sent(train, to_other_machines=True))} | _describe_program()
        found = _tuned(told, runs, cpus_per_run, settings.max_restarts, workdir)
    runs = [finished(run, error) for run, error in zip(runs, found)]
    write_results(runs, workdir)
    return runs


def _fit(
    told: dict[str, Any], settings: Config, num_workers: int | tuple[int, int], cpus: float | None
) -> dict[str, Any]:
    """Runs `_work(told)` on the workers; returns what the first one returns."""
    import ray.train

    # Ray 2.60's trainer without a framework. The one in ray.train.data_parallel_trainer is older, and JaxTrainer
    # starts JAX on TPUs and GPUs alone.
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    trainer = DataParallelTrainer(
        _work,
        train_loop_config=told,
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_workers,
            use_gpu=told["settings"].device == "gpu",
            resources_per_worker=_resources(told["settings"], cpus),
        ),
        run_config=ray.train.RunConfig(
            name=_FOLDER,
            failure_config=ray.train.FailureConfig(max_failures=settings.max_restarts),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),  # it would print each report, of each worker
            **_storage(settings),
        ),
    )
    try:
        returned: dict[str, Any] = trainer.fit().return_value
    except ray.train.TrainingFailedError as error:
        raise WorkerError(_reason(error)) from None
    return returned


def _work(config: dict[str, Any]) -> dict[str, Any]:
    """Trains in one worker of Ray; returns what `_train_in_worker` does."""
    import ray.train
    import ray.util
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    own = (_free_address(ray.util.get_node_ip_address()), secrets.token_hex(16)) if rank == 0 else None
    address, os.environ["KERASDP_SECRET"] = broadcast_from_rank_zero(own)  # by Ray's own channel
    try:
        settings = dataclasses.replace(config["settings"], hosts=str(size), host_rank=rank, coordinator=address)
    except UserError as error:  # the global batch is too small for so many workers, say
        return {"error": (type(error).__name__, str(error))}
    place = settings.checkpoints_of_fit(1)

    def report(metrics: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
            checkpoint = None
            if rank == 0 and place is not None:  # where it is: Ray need not copy it
                with open(os.path.join(folder, "checkpoint.json"), "w") as file:
                    json.dump({"checkpoints": place, **metrics}, file)
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)

    return _train_in_worker(config, settings, report)


def _tuned(told: dict[str, Any], runs: list[Trial], cpus: float | None, max_failures: int, workdir: str) -> list[str]:
    """Trains all runs; returns for each what went wrong, empty if nothing did."""
    from ray import tune

    each = [_settings_of_worker(run.settings) for run in runs]

    def trial(choice: dict[str, Any]) -> None:
        run, settings = runs[choice["run"]], each[choice["run"]]
        returned = _train_in_worker(told, settings, lambda metrics: tune.report(metrics | run.choices))
        if "error" in returned:  # which no restart would help
            tune.report({_ERROR: returned["error"][1]})

    tuner = tune.Tuner(
        tune.with_resources(trial, _resources(each[0], cpus)),
        param_space={"run": tune.grid_search(list(range(len(runs))))},
        run_config=tune.RunConfig(
            name="ray", storage_path=workdir, failure_config=tune.FailureConfig(max_failures=max_failures)
        ),
    )
    found = {result.config["run"]: result for result in tuner.fit()}
    return [
        (found[number].metrics or {}).get(_ERROR) or _last_error(found[number].error) for number in range(len(runs))
    ]


def _train_in_worker(
    config: dict[str, Any], settings: Config, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Trains, and returns the result, or the error if it is one that no restart helps.

    Args:
        config: `train`, and what `_describe_program` returned.
        settings: the choices of the run.
        report: gets the metrics of each epoch.

    Raises:
        WorkerError: if a process died, here or on another worker. Ray restarts the run then.
    """
    if os.path.isdir(config["cwd"]):  # paths such as --model=my_model.py:build are meant from there
        os.chdir(config["cwd"])
    sys.path += [path for path in config["path"] if path not in sys.path]  # modules that `train` imports
    with from_command_line() if config["flags"] else contextlib.nullcontext():
        try:
            return {"result": _train_and_report(config["train"], settings, report)}
        except WorkerError:
            raise
        except errors.RunError as error:
            return {"error": (type(error).__name__, str(error))}


def _describe_program() -> dict[str, Any]:
    """Returns what `_train_in_worker` needs to know of this program."""
    return {"cwd": os.getcwd(), "path": list(sys.path), "flags": is_from_command_line()}


def _resolve_paths(settings: Config) -> Config:
    """Returns the choices as they are meant here, for processes on other machines.

    Raises:
        UserError: if one has no meaning on Ray.
    """
    for name in ("hosts", "host_rank", "coordinator"):
        if getattr(settings, name) is not None:
            raise UserError(f"--{name} has no effect on Ray, which starts the workers: use --workers=NUMBER")
    if settings.device == "tpu":
        raise UserError("--device=tpu: Ray is asked for CPUs and GPUs alone; use --hosts on TPUs, or --device=cpu")
    paths = {}
    for name in ("workdir", "checkpoint_dir", "data_dir", "export"):
        path = getattr(settings, name)
        if path is not None and not is_url(path):
            paths[name] = os.path.abspath(path)
    return dataclasses.replace(settings, backend=choose_backend(settings.backend), **paths)


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Connects with the Ray cluster that this machine is part of, or that $RAY_ADDRESS names; else starts one."""
    # A cluster that is gone is still the one that this machine remembers. Ray (2.60) tries 20 times, for 40 seconds.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    try:
        import ray
    except ImportError as error:
        raise UserError("Ray is not installed: pip install 'kerasdp[ray]'") from error
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # Ray's workers (2.60) would leave the folder of the script
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"cannot connect with the Ray cluster at {os.environ.get('RAY_ADDRESS', 'this machine')} "
            f"({' '.join(str(error).split()):.300}); RAY_ADDRESS=local starts one of this machine"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _settings_of_worker(settings: Config) -> Config:
    """Returns the choices of a run as a worker of the connected cluster gets them, which resumes what it finds."""
    import ray

    device = settings.device
    if device == "auto":
        device = "gpu" if ray.cluster_resources().get("GPU", 0) else "cpu"
    return dataclasses.replace(
        settings,
        device=device,
        num_devices=settings.num_devices or 1,
        max_restarts=0,
        resume=settings.keeps_checkpoints,
    )


def _resources(settings: Config, cpus: float | None) -> dict[str, float]:
    """Returns what Ray sets aside for a worker."""
    num_devices = settings.num_devices or 1
    return {"CPU": cpus or num_devices} | ({"GPU": num_devices} if settings.device == "gpu" else {})


def _storage(settings: Config) -> dict[str, Any]:
    """Returns where Ray writes what it keeps of a run, as arguments of its `RunConfig`."""
    if settings.checkpoint_dir is None or not is_url(settings.checkpoint_dir):
        folder = settings.checkpoint_dir or settings.workdir
        return {} if folder is None else {"storage_path": folder}
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    system, path = file_system(settings.checkpoint_dir)
    return {"storage_path": path, "storage_filesystem": PyFileSystem(FSSpecHandler(system))}


def _free_address(host: str) -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def _reason(error: Any) -> str:
    """Returns the first line of what a worker said when it failed; the whole of it has been printed."""
    failures = getattr(error, "worker_failures", {})
    texts = [f"worker {rank}: {failure}" for rank, failure in sorted(failures.items())] or [str(error)]
    print(*texts, sep="\n", file=sys.stderr)
    lines = [line for line in texts[0].splitlines() if line.strip()]
    told = [line.partition("Error: ")[2] for line in lines if "WorkerError: " in line]
    return (told or lines)[-1].strip()


_SECONDS_BETWEEN_LOOKS = 0.1


def _train_and_report(train: SentFunction, settings: Config, report: Callable[[dict[str, Any]], None]) -> SentResult:
    """Runs `kerasdp.launch(train, settings)` in a new process; returns what `train` returned.

    Ray (2.60) calls a worker's function in a thread, where no signal is handled. And Ray's `report` does not exist in
    the processes that train.

    Args:
        train: the user-defined function.
        settings: the choices of the run.
        report: called after each epoch, in a thread of this process, with its number from 1 and its metrics.

    Raises:
        RunError: as `kerasdp.launch`.
    """
    with tempfile.TemporaryDirectory(prefix="kerasdp-", ignore_cleanup_errors=True) as folder:
        path = os.path.join(folder, "epochs.jsonl")

        def reporting(runner: Any) -> Any:
            if runner.strategy.processes.local[0] == 0:
                runner.state.epoch_listeners.append(lambda epoch, logs: _report(path, {"epoch": epoch + 1, **logs}))
            return train(runner)

        with _followed(path, report):
            return SentResult(launch(reporting, in_own_process(settings)))


def _report(path: str, line: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def _followed(path: str, report: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Calls `report` for each line of a file that grows within the context, in a thread."""
    open(path, "w").close()
    is_over, failures = threading.Event(), list[BaseException]()

    def follow() -> None:
        try:
            with open(path) as file:
                for line in _lines(file, is_over):
                    report(json.loads(line))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=follow, daemon=True, name="reports")
    thread.start()
    yield  # after an error the thread is not joined: a report may wait for workers that are gone
    is_over.set()
    thread.join()
    if failures:
        raise failures[0]


def _lines(file: Any, is_over: threading.Event) -> Iterator[str]:
    begun = ""
    while True:
        is_last = is_over.wait(_SECONDS_BETWEEN_LOOKS)
        while text := file.readline():
            begun += text
            if begun.endswith("\n"):
                yield begun
                begun = ""
        if is_last:
            return


def _last_error(error: Any) -> str:
    lines = [line for line in str(error or "").splitlines() if line.strip()]
    told = [line for line in lines if "Error: " in line]
    return (told or lines or [""])[-1].strip()
