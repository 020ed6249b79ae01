"""Trains one run on several workers of a Ray cluster."""

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from kerasdp import errors
from kerasdp.checkpoint.storage import file_system, is_url, require_folder
from kerasdp.config import Config, prepared_workdir
from kerasdp.errors import UserError, WorkerError, from_command_line, is_from_command_line
from kerasdp.ray.reported import train_and_report
from kerasdp.runtime.devices import choose_backend
from kerasdp.runtime.sending import sent

# What Ray keeps of a run, in the workdir or beside the checkpoints.
_FOLDER = "ray"


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
    settings = at_home(dataclasses.replace(settings or Config(), **changes))
    if not isinstance(num_workers, int):
        fewest, most = num_workers
        num_workers = fewest if fewest == most else (fewest, most)
    with prepared_workdir(settings.workdir, settings.resume), connected():
        if settings.checkpoint_dir is not None:
            require_folder(settings.checkpoint_dir, settings.resume)
        with sent(train, to_other_machines=True) as function:
            told = {"train": function, "settings": of_worker(settings)} | described()
            returned = _fit(told, settings, num_workers, cpus_per_worker)
    if "error" in returned:
        raise errors.from_name(*returned["error"]) or WorkerError(returned["error"][1])
    return returned["result"].received()


def _fit(
    told: dict[str, Any], settings: Config, num_workers: int | tuple[int, int], cpus: float | None
) -> dict[str, Any]:
    """Runs `_work(told)` on the workers; returns what the first one returns."""
    import ray.train

    # Of Ray 2.60 this is the trainer of no framework: that in ray.train.data_parallel_trainer is of before, and
    # JaxTrainer starts JAX on TPUs and GPUs alone.
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    trainer = DataParallelTrainer(
        _work,
        train_loop_config=told,
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_workers,
            use_gpu=told["settings"].device == "gpu",
            resources_per_worker=resources(told["settings"], cpus),
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
    """Trains in one worker of Ray; returns what `outcome` does."""
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

    return outcome(config, settings, report)


def outcome(config: dict[str, Any], settings: Config, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Trains, and returns the result, or the error if it is one that no restart helps.

    Args:
        config: `train`, and what `described` returned.
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
            return {"result": train_and_report(config["train"], settings, report)}
        except WorkerError:
            raise
        except errors.RunError as error:
            return {"error": (type(error).__name__, str(error))}


def described() -> dict[str, Any]:
    """Returns what `outcome` needs to know of this program."""
    return {"cwd": os.getcwd(), "path": list(sys.path), "flags": is_from_command_line()}


def at_home(settings: Config) -> Config:
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
def connected() -> Iterator[None]:
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


def of_worker(settings: Config) -> Config:
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


def resources(settings: Config, cpus: float | None) -> dict[str, float]:
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
