"""What may be chosen for a run, and which choices go together."""

import math
from typing import Any

from kerasdp.config import spec
from kerasdp.errors import UserError

BACKENDS = ("torch", "jax", "tensorflow")
DEVICES = ("auto", "gpu", "cpu")
STRATEGIES = ("data", "pipeline", "tensor")
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b")
BALANCES = ("time", "flops", "parameters")
BATCH_NORMS = ("sync", "replica")
CHECKS = ("first", "off")
SWITCHES = ("auto", "on", "off")
PRECISIONS = ("float32", "bfloat16", "float16", "float64")
GRADIENT_PRECISIONS = ("float32", "bfloat16")
MODELS = ("mlp", "lenet", "convnet", "resnet18", "resnet50")
DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "synthetic", "images")
# Fields that data parallelism has no use for.
_OF_PIPELINES = ("num_stages", "cut_at", "balance", "split_size", "micro_batches", "schedule")


def check(config: Any) -> None:
    """Raises `UserError` if a choice is out of its range, or choices do not go together."""
    _one_of("backend", config.backend, (None, *BACKENDS))
    _one_of("device", config.device, DEVICES)
    _one_of("strategy", config.strategy, STRATEGIES)
    _one_of("schedule", config.schedule, SCHEDULES)
    _one_of("balance", config.balance, BALANCES)
    _one_of("batch_norm", config.batch_norm, BATCH_NORMS)
    _one_of("precision", config.precision, PRECISIONS)
    _one_of("compile", config.compile, SWITCHES)
    _one_of("check", config.check, CHECKS)
    _one_of("data_on_device", config.data_on_device, SWITCHES)
    _one_of("gradient_precision", config.gradient_precision, GRADIENT_PRECISIONS)
    _one_of("verbose", config.verbose, (None, 0, 1, 2))
    _check_numbers(config)
    if config.export is not None and not config.export.endswith((".keras", ".weights.h5")):
        raise UserError(
            f"--export: expected a file name that ends in .keras or .weights.h5. Received: {config.export!r}"
        )
    config.checkpoint_interval()
    for flag, needs_workdir in (
        ("tensorboard", config.tensorboard),
        ("resume", config.resume),
        ("max_restarts", config.max_restarts),
    ):
        if needs_workdir and config.workdir is None:
            raise UserError(f"--{flag} needs the files of a run, but no folder is set: add --workdir=FOLDER")
    if config.checkpoint_every == "never" and (config.resume or config.max_restarts):
        flag = "resume" if config.resume else "max_restarts"
        raise UserError(f"--{flag} resumes from a checkpoint, but --checkpoint_every=never keeps none")
    for flag in ("model", "dataset", "optimizer", "kernel_initializer"):
        if getattr(config, flag) is not None:
            name, _ = spec.parse(getattr(config, flag), flag)
            known = {"model": MODELS, "dataset": DATASETS}.get(flag)
            if known and name not in known and not spec.is_user_function(name):
                raise UserError(
                    f"--{flag}: expected one of {', '.join(known)}, or file.py:function. Received: {name!r}"
                )
    if config.strategy == "pipeline":
        _check_pipeline(config)
    elif any(getattr(config, name) != getattr(type(config), name) for name in _OF_PIPELINES):
        flags = ", ".join(f"--{name.removeprefix('num_')}" for name in _OF_PIPELINES)
        raise UserError(f"{flags} have an effect only with --strategy=pipeline")
    if config.strategy == "tensor" and config.backend not in (None, "jax"):
        raise UserError(
            f"--strategy=tensor: there for --backend=jax only. Received: {config.backend}; use --backend=jax, or "
            "--strategy=data or pipeline"
        )
    _check_gradients(config)
    if config.data_on_device == "on" and config.engine != "data":
        raise UserError(f"--data_on_device=on: not together with {_engine_flag(config)}; leave out one of them")
    if config.compile != "auto" and (config.backend in ("jax", "tensorflow") or config.engine == "pipeline"):
        raise UserError(
            f"--compile: has an effect on torch alone, and not on a model in stages or --accumulate. Received: "
            f"{config.compile}; leave it out (jax and tensorflow compile by themselves)"
        )
    if config.num_devices is not None:
        config.check_replicas(config.num_replicas(config.num_devices))


def _check_numbers(config: Any) -> None:
    for flag, value in (
        ("gpus", config.num_devices),
        ("batch_size", config.batch_size),
        ("accumulate", config.accumulate),
        ("epochs", config.epochs),
        ("max_steps", config.max_steps),
        ("lr_base_batch", config.lr_base_batch),
        ("log_every", config.log_every),
        ("keep", config.keep),
        ("stages", config.num_stages),
        ("micro_batches", config.micro_batches),
    ):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError(f"--{flag}: expected a whole number of at least 1. Received: {value}")
    if config.learning_rate is not None and not (math.isfinite(config.learning_rate) and config.learning_rate > 0):
        raise UserError(f"--learning_rate: expected a number above 0. Received: {config.learning_rate}")
    if not 0 <= config.seed < 2**32:
        raise UserError(f"--seed: expected a whole number from 0 to 4294967295. Received: {config.seed}")
    if not isinstance(config.max_restarts, int) or config.max_restarts < 0:
        raise UserError(f"--max_restarts: expected a whole number of at least 0. Received: {config.max_restarts}")
    if config.hang_timeout is not None and not config.hang_timeout > 0:
        raise UserError(f"--hang_timeout: expected a number of seconds above 0. Received: {config.hang_timeout}")


def _check_pipeline(config: Any) -> None:
    if config.split_size is not None and config.micro_batches is not None:
        raise UserError("--split_size and --micro_batches say the same in two ways: give one of them")
    size = str(config.split_size)  # a number in Python is one, too
    if config.split_size is not None and size != "auto" and not (size.isdecimal() and int(size) > 0):
        raise UserError(
            f"--split_size: expected auto, or a whole number of at least 1. Received: {config.split_size!r}"
        )
    if config.split_size == "auto" and (config.resume or config.max_restarts):
        flag = "resume" if config.resume else "max_restarts"
        raise UserError(
            f"--split_size=auto may find another size each time, and --{flag} must resume with the same one; give the "
            "size that was found, which the first lines of a run say"
        )
    if config.cut_at is not None:
        named = len(config.cut_at.split(",")) + 1
        if config.num_stages not in (None, named):
            raise UserError(f"--stages: --cut_at makes {named} of them. Received: {config.num_stages}; leave it out")
    is_interleaved = config.schedule == "interleaved1f1b"
    if is_interleaved and config.backend not in (None, "torch"):
        raise UserError(f"--schedule=interleaved1f1b: there for --backend=torch only. Received: {config.backend}")
    if config.schedule == "1f1b" and config.backend == "tensorflow":
        raise UserError(
            "--schedule=1f1b: TensorFlow's runtime orders the work by itself; leave out --schedule, or use "
            "--backend=torch or jax"
        )


def _check_gradients(config: Any) -> None:
    if config.accumulate > 1 and config.strategy != "data":
        instead = "use --micro_batches" if config.strategy == "pipeline" else "leave one of them out"
        raise UserError(f"--accumulate: there for --strategy=data only. Received: {config.strategy}; {instead}")
    if config.gradient_precision == "float32":
        return
    if config.backend == "jax":
        raise UserError(
            f"--gradient_precision={config.gradient_precision}: there for --backend=torch and tensorflow. Received: "
            "jax, where XLA adds up the gradients within a step's program; use one of those, or leave it out"
        )
    if config.engine != "data":
        raise UserError(
            f"--gradient_precision={config.gradient_precision}: not together with {_engine_flag(config)}; "
            "leave out one of them"
        )


def _engine_flag(config: Any) -> str:
    """What on the command line asks for the engine."""
    return f"--accumulate={config.accumulate}" if config.accumulate > 1 else f"--strategy={config.strategy}"


def _one_of(flag: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        names = ", ".join(str(name) for name in allowed if name is not None)
        raise UserError(f"--{flag}: expected one of {names}. Received: {value!r}")
