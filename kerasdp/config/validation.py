"""What may be chosen for a run by name, which versions there are of it, and which choices go together."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
from typing import Any

from kerasdp.config import spec
from kerasdp.config.choices import choices_of
from kerasdp.errors import UserError

BACKENDS = ("torch", "jax", "tensorflow")
BATCH_NORMS = ("sync", "replica")
PRECISIONS = ("auto", "float32", "tf32", "bfloat16", "float16", "float64")
MODELS = ("mlp", "lenet", "convnet", "resnet18", "resnet50")
DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "synthetic", "images")
# The package of each, which comes with an extra of the tracker's name.
TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
# Choices that have no effect with one device, and why.
_OF_SEVERAL_DEVICES = {
    "shard": "holds all of the model",
}
# The group of the choices that data parallelism has no use for, but for `strategy` itself.
CUT = "Models cut over several devices"


def check(config: Any) -> None:
    """Raises `UserError` if choices of a `Config` do not go together."""
    _check_files(config)
    _check_names(config)
    _check_strategy(config)
    _check_where(config)
    if config.num_devices is not None:
        config.check_replicas(config.num_replicas(config.num_devices))


def check_installed(config: Any) -> None:
    """Raises `UserError` if the package of one of the trackers, or the optimizer, is not installed."""
    name, _ = spec.parse(config.optimizer, "optimizer")
    if (known := _optimizers()) and name.lower() not in known:
        raise UserError(f"--optimizer: expected one of {', '.join(known)}. Received: {name!r}")
    for name in config.trackers:
        if importlib.util.find_spec(TRACKERS[name]) is None:
            raise UserError(f"--tracker={name}: {name} is not installed; add it: pip install 'kerasdp[{name}]'")


@functools.cache
def _optimizers() -> list[str]:
    """Returns the names of Keras' optimizers, as the file says that exports them: importing it takes seconds."""
    found = importlib.util.find_spec("keras")
    for folder in (found and found.submodule_search_locations) or ():
        with contextlib.suppress(OSError), open(os.path.join(folder, "optimizers", "__init__.py")) as file:
            names = re.findall(r" as ([A-Z]\w*)", file.read())
            return [name.lower() for name in names if "Optimizer" not in name]
    return []


@functools.cache  # each reads a file
def version_of(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of every package that trains, if it is installed."""
    packages = {package: version_of(package) for package in ("kerasdp", "keras", *BACKENDS, "numpy")}
    return {"python": platform.python_version()} | {name: found for name, found in packages.items() if found}


def _check_files(config: Any) -> None:
    """Raises if what is to be written or resumed from has no folder."""
    resumes = _flag_that_resumes(config)
    for flag, needs_workdir in (
        ("tracker", config.tracker),
        (resumes, resumes and config.checkpoint_dir is None),
    ):
        if needs_workdir and config.workdir is None:
            raise UserError(f"--{flag} needs the files of a run, but no folder is set: add --workdir=FOLDER")
    if config.checkpoint_every == "never" and config.checkpoint_dir is not None:
        raise UserError("--checkpoint_dir has no effect with --checkpoint_every=never: leave out one of them")
    if config.checkpoint_every == "never" and resumes:
        raise UserError(f"--{resumes} resumes from a checkpoint, but --checkpoint_every=never keeps none")


def _flag_that_resumes(config: Any) -> str | None:
    return "resume" if config.resume else "max_restarts" if config.max_restarts else None


def _check_names(config: Any) -> None:
    """Raises if a name with arguments cannot be parsed, or there is nothing of that name."""
    known = {"model": MODELS, "dataset": DATASETS}
    for flag in (*known, "optimizer"):
        name, _ = spec.parse(getattr(config, flag), flag)
        if name not in known.get(flag, (name,)) and not spec.is_user_function(name):
            expected = f"expected one of {', '.join(known[flag])}, or file.py:function"
            raise UserError(f"--{flag}: {expected}. Received: {name!r}")


def _check_strategy(config: Any) -> None:
    """Raises if choices of one strategy are made with another, or choices of a pipeline contradict each other."""
    if config.accumulate > 1 and config.strategy != "data":
        instead = "use --split_size" if config.strategy == "pipeline" else "leave one of them out"
        raise UserError(f"--accumulate: there for --strategy=data only. Received: {config.strategy}; {instead}")
    of_pipelines = [c for c in choices_of(type(config)).values() if c.group == CUT and c.name != "strategy"]
    if config.strategy != "pipeline" and any(getattr(config, c.name) != c.default for c in of_pipelines):
        flags = ", ".join(f"--{c.flags[-1]}" for c in of_pipelines)
        raise UserError(f"{flags} have an effect only with --strategy=pipeline")


def _check_where(config: Any) -> None:
    """Raises if a choice is not there for the backend, or the strategy."""
    for choice in choices_of(type(config)).values():
        value = getattr(config, choice.name)
        for only in choice.only:
            if value == choice.default or only.value not in (None, value):
                continue
            what, one = f"--{choice.flags[-1]}={value}", len(only.backends) == 1
            if only.backends and config.backend not in (None, *only.backends):
                raise UserError(
                    f"{what}: there for --backend={' and '.join(only.backends)}{' only' if one else ''}. Received: "
                    f"{config.backend}{', where ' if only.why else ''}{only.why}; use "
                    f"{f'--backend={only.backends[0]}' if one else 'one of those'}, or {only.instead}"
                )
            if only.strategies and config.strategy not in only.strategies:
                raise UserError(f"{what}: not together with --strategy={config.strategy}; leave out one of them")


def check_replicas(config: Any, num_replicas: int) -> None:
    """Raises `UserError` if so many replicas cannot share a batch, or add gradients, as asked."""
    choices = choices_of(type(config))
    for name, does in _OF_SEVERAL_DEVICES.items():
        value = getattr(config, name)
        if num_replicas == 1 and value != choices[name].default:
            raise UserError(f"--{name}={value}: one device {does}; leave it out, or use --gpus=2 or more")
    if config.batch_size < num_replicas:
        raise UserError(
            f"--batch_size counts the samples of all devices together: expected at least {num_replicas} "
            f"for {num_replicas} devices. Received: {config.batch_size}"
        )
    rows = config.replica_batch_size(num_replicas)
    if config.accumulate > rows:
        raise UserError(f"--accumulate: expected at most {rows}, a device's samples. Received: {config.accumulate}")
    count = -(-rows // -(-rows // config.accumulate))
    if count != config.accumulate:
        raise UserError(
            f"--accumulate: {rows} samples, those of a device, cannot be cut into {config.accumulate} parts of one "
            f"size, but for the last; use {count}, or another --batch_size"
        )
