"""What may be chosen for a run, and which choices go together."""

import dataclasses
import importlib.util
import math
import numbers
import os
import typing
from collections.abc import Callable
from typing import Any

from kerasdp.config import sharing, spec
from kerasdp.errors import FIELDS_OF_FLAGS, UserError

BACKENDS = ("torch", "jax", "tensorflow")
DEVICES = ("auto", "gpu", "tpu", "cpu")
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
_CHOICES: dict[str, tuple[Any, ...]] = {
    "backend": (None, *BACKENDS),
    "device": DEVICES,
    "strategy": STRATEGIES,
    "pipeline_schedule": SCHEDULES,
    "balance": BALANCES,
    "batch_norm": BATCH_NORMS,
    "precision": PRECISIONS,
    "compile": SWITCHES,
    "check": CHECKS,
    "data_on_device": SWITCHES,
    "gradient_precision": GRADIENT_PRECISIONS,
    "reduce": sharing.REDUCES,
    "verbose": (None, 0, 1, 2, 3),
}
_COUNTS = (
    "num_devices", "batch_size", "accumulate", "epochs", "max_steps", "lr_base_batch", "log_every", "keep",
    "num_stages", "micro_batches", "early_stopping",
)  # fmt: skip
_NAMES = ("model", "dataset", "optimizer", "kernel_initializer", "schedule")
RATE_SCHEDULES = ("constant", "cosine", "linear", "step")
AUGMENTATIONS = ("flip", "translate", "rotate", "zoom", "brightness", "contrast")
# The package of each; tensorboardX comes with kerasdp, the others with an extra of the tracker's name.
TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
CHECKPOINT_TIMES = "epoch, never, steps (as 50) or minutes (as 10m)"


def _is_split_size(size: int | str) -> bool:
    return size == "auto" or (str(size).isdecimal() and int(size) > 0)


def _is_count_or_range(text: str) -> bool:
    numbers = [int(number) if number.isdecimal() else 0 for number in text.split(":")]
    return len(numbers) <= 2 and numbers[0] >= 1 and numbers[-1] >= numbers[0]


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


# What the other fields may be: in words, and as a question to a value of the field's type that is not None.
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_COUNTS, ("a whole number of at least 1", lambda number: number >= 1)),
    "split_size": ("auto, or a whole number of at least 1", _is_split_size),
    "max_restarts": ("a whole number of at least 0", lambda number: number >= 0),
    "seed": ("a whole number from 0 to 4294967295", lambda number: 0 <= number < 2**32),
    "learning_rate": ("a number above 0", lambda number: math.isfinite(number) and number > 0),
    "hang_timeout": ("a number of seconds, or 0 for never", lambda number: math.isfinite(number) and number >= 0),
    "export": (
        "a file name that ends in .keras or .weights.h5", lambda name: name.endswith((".keras", ".weights.h5"))
    ),
    # What else these must be is checked where they are parsed.
    **dict.fromkeys(_NAMES, ("a name, or a name with arguments such as sgd(momentum=0.9)", lambda text: True)),
    "hosts": ("a number of machines, or the least and the most of them as 1:3", _is_count_or_range),
    "host_rank": ("a whole number from 0", lambda number: number >= 0),
    "coordinator": ("the address and port of host 0, as 10.0.0.1:29500", _is_address),
    "interface": ("a network interface, as eth0", lambda name: True),
    "device_shares": ("auto, or a whole number of at least 1 for each device, as 3,1", sharing.are_shares),
    "warmup": ("a whole number of updates, from 0", lambda number: number >= 0),
    "ema": ("a number above 0 and below 1, as 0.99", lambda number: 0 < number < 1),
    "label_smoothing": ("a number from 0, below 1, as 0.1", lambda number: 0 <= number < 1),
    "augment": (f"some of {', '.join(AUGMENTATIONS)}, with arguments such as rotate(factor=0.1)", bool),
    "tracker": (
        f"some of {', '.join(TRACKERS)}", lambda text: {name.strip() for name in text.split(",")} <= {*TRACKERS}
    ),
    "profile": ("a step, or the first and the last one as 5:8", _is_count_or_range),
    "cut_at": ("names of layers in one string, comma-separated", lambda text: True),
    "checkpoint_every": (CHECKPOINT_TIMES, lambda text: True),
    "workdir": ("a folder", lambda path: True),
    "checkpoint_dir": ("a folder, or a URL as s3://bucket/folder", bool),
    "data_dir": ("a folder", lambda path: True),
    **dict.fromkeys(("deterministic", "dry_run", "resume"), ("True or False", lambda switch: True)),
}  # fmt: skip
_PATHS = ("workdir", "checkpoint_dir", "data_dir", "export")
# Fields that data parallelism has no use for.
_OF_PIPELINES = ("num_stages", "cut_at", "balance", "split_size", "micro_batches", "pipeline_schedule")


def normalized(config: Any) -> dict[str, Any]:
    """Returns the fields of a `Config` as the types that JSON can hold, where people in Python have others.

    Those are paths, NumPy's numbers, the numbers of `checkpoint_every` and `hosts`, and True or False as `verbose`.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in values.items():
        if name in _PATHS and isinstance(value, os.PathLike):
            values[name] = os.fspath(value)
        elif isinstance(value, bool):
            values[name] = int(value) if name == "verbose" else value
        elif isinstance(value, numbers.Integral):
            values[name] = str(int(value)) if name in ("checkpoint_every", "hosts") else int(value)
        elif isinstance(value, numbers.Real):
            values[name] = float(value)
    return values


def check(config: Any) -> None:
    """Raises `UserError` if a choice is out of its range, or choices do not go together."""
    _check_values(config)
    config.checkpoint_interval()
    for flag, needs_workdir in (
        ("tracker", config.tracker),
        ("profile", config.profile),
        ("resume", config.resume and config.checkpoint_dir is None),
        ("max_restarts", config.max_restarts and config.checkpoint_dir is None),
    ):
        if needs_workdir and config.workdir is None:
            raise UserError(f"--{flag} needs the files of a run, but no folder is set: add --workdir=FOLDER")
    if config.checkpoint_every == "never" and config.checkpoint_dir is not None:
        raise UserError("--checkpoint_dir has no effect with --checkpoint_every=never: leave out one of them")
    if config.checkpoint_every == "never" and (config.resume or config.max_restarts):
        flag = "resume" if config.resume else "max_restarts"
        raise UserError(f"--{flag} resumes from a checkpoint, but --checkpoint_every=never keeps none")
    for flag in _NAMES:
        if getattr(config, flag) is not None:
            name, _ = spec.parse(getattr(config, flag), flag)
            known = {"model": MODELS, "dataset": DATASETS, "schedule": RATE_SCHEDULES}.get(flag)
            if known and name not in known and (flag == "schedule" or not spec.is_user_function(name)):
                instead = "" if flag == "schedule" else ", or file.py:function"
                raise UserError(f"--{flag}: expected one of {', '.join(known)}{instead}. Received: {name!r}")
    if config.ema is not None and config.early_stopping is not None:
        # Keras' EarlyStopping (3.15) brings back the weights of the best epoch, not the averages that were evaluated.
        raise UserError("--ema and --early_stopping do not go together: leave out one of them")
    for name, _ in spec.parse_list(config.augment or "", "augment"):
        if name not in AUGMENTATIONS:
            raise UserError(f"--augment: expected some of {', '.join(AUGMENTATIONS)}. Received: {name!r}")
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
    if config.device == "tpu" and config.backend not in (None, "jax"):
        raise UserError(
            f"--device=tpu: there for --backend=jax only. Received: {config.backend}; use --backend=jax, or another "
            "--device"
        )
    _check_hosts(config)
    _check_gradients(config)
    sharing.check(config)
    if config.data_on_device == "on" and config.engine != "data":
        raise UserError(f"--data_on_device=on: not together with {_engine_flag(config)}; leave out one of them")
    if config.compile != "auto" and (config.backend in ("jax", "tensorflow") or config.engine == "pipeline"):
        raise UserError(
            f"--compile: has an effect on torch alone, and not on a model in stages or --accumulate. Received: "
            f"{config.compile}; leave it out (on jax and tensorflow the model's jit_compile decides)"
        )
    if config.num_devices is not None:
        config.check_replicas(config.num_replicas(config.num_devices * config.host_range[1]))


def check_installed(config: Any) -> None:
    """Raises `UserError` if the package of one of the trackers is not installed."""
    for name in config.trackers:
        if importlib.util.find_spec(TRACKERS[name]) is None:
            raise UserError(f"--tracker={name}: {name} is not installed; add it: pip install 'kerasdp[{name}]'")


def _check_values(config: Any) -> None:
    """Raises if a field is not of its type, or out of its range."""
    flags = {field: flag for flag, field in FIELDS_OF_FLAGS.items()}
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        kinds = typing.get_args(field.type) or (field.type,)
        is_of_type = isinstance(value, (*kinds, int) if float in kinds else kinds)
        is_of_type = is_of_type and (bool in kinds or not isinstance(value, bool))
        if name in _CHOICES:
            expected = f"one of {', '.join(str(choice) for choice in _CHOICES[name] if choice is not None)}"
            is_right = is_of_type and value in _CHOICES[name]
        else:
            expected, is_in_range = _RANGES[name]
            is_right = is_of_type and (value is None or is_in_range(value))
        if not is_right:
            received = " ".join(repr(value).split())  # an array has several lines
            raise UserError(f"--{flags.get(name, name)}: expected {expected}. Received: {received:.200}")


def _check_pipeline(config: Any) -> None:
    if config.split_size is not None and config.micro_batches is not None:
        raise UserError("--split_size and --micro_batches say the same in two ways: give one of them")
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
    is_interleaved = config.pipeline_schedule == "interleaved1f1b"
    if is_interleaved and config.backend not in (None, "torch"):
        raise UserError(
            f"--pipeline_schedule=interleaved1f1b: there for --backend=torch only. Received: {config.backend}"
        )


def _check_hosts(config: Any) -> None:
    fewest, most = config.host_range
    if config.hosts is None and config.host_rank is not None:
        raise UserError("--host_rank says which of several machines this is: add --hosts=NUMBER")
    if config.host_rank is not None and config.host_rank >= most:
        raise UserError(f"--host_rank: expected a number below --hosts={config.hosts}. Received: {config.host_rank}")
    if fewest < most and config.backend not in (None, "torch"):
        raise UserError(
            f"--hosts={config.hosts}: hosts leave and join with --backend=torch only. Received: {config.backend}; give "
            "one number"
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
