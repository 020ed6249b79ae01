"""Defines `Config`, every choice of a run: a frozen record, checked when made.

This is the one place where a choice is written: its field's name, type and default, the group of its flag, what it may
be, and what it means. Range checks, flags, `--help` and the pages are made of it (`choices.py`).
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import os
import platform
from typing import Any

from kerasdp.config.choices import (
    COUNT,
    FOLDER,
    FROM_0,
    SWITCH,
    Range,
    check_choices,
    choice,
    choices_of,
    documented,
    is_count,
    one_of,
)
from kerasdp.errors import UserError, redacted

BACKENDS = ("torch", "jax", "tensorflow")
BATCH_NORMS = ("sync", "replica")
PRECISIONS = ("auto", "float32", "tf32", "bfloat16", "float16", "float64")
# The package of each comes with an extra of the tracker's name.
TRACKERS = ("tensorboard", "wandb", "mlflow")
# Seconds.
HANG_TIMEOUT = 300.0
CHECKPOINTS = "checkpoints"  # folder in the workdir

# The groups of the flags.
DEVICES = "Backend and devices"
CUT = "Models cut over several devices"
TRAINING = "Training"
OUTPUT = "Output"
FAULTS = "Checkpoints and faults"


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All choices of a run. It cannot be changed; `dataclasses.replace` makes a changed copy.

    `kerasdp.launch` takes one, and passes it to `train` as `runner.config`. The model, the data, the optimizer and the
    epochs are no choices of a run: `train` decides them.

    Raises:
        UserError: if a value is out of its range.

    Example:
        ```python
        import dataclasses
        import kerasdp

        config = kerasdp.Config(batch_size=32, seed=7)
        larger = dataclasses.replace(config, batch_size=64)
        print(kerasdp.launch(lambda runner: runner.config.batch_size, larger))  # 64
        ```
    """

    # fmt: off
    backend: str | None = choice(None, DEVICES, one_of(*BACKENDS), f"Framework that trains: {', '.join(BACKENDS)}.",
        "that of Keras if it is imported, else $KERAS_BACKEND, else that of keras.json, else the first installed")
    num_devices: int | None = choice(None, DEVICES, COUNT,
        "Devices of each machine (with jax of each process that is started): GPUs, TPUs, or, where there are none, "
        "virtual CPU devices.", "all GPUs or TPUs, or 1")
    device: str = choice("auto", DEVICES, one_of("auto", "gpu", "tpu", "cpu"),
        "gpu, tpu, cpu, or auto: GPUs or TPUs if there are any, else virtual CPU devices. tpu: with jax only.")
    precision: str = choice("auto", DEVICES, one_of(*PRECISIONS),
        f"Precision of the layers' arithmetic: {', '.join(PRECISIONS)}. auto: float32, in which GPUs multiply as the "
        "framework lets them, most in TF32; float32: exact; tf32: all products in TF32. Variables are float32, except "
        "with float64.")
    compile: str = choice("auto", DEVICES, one_of("auto", "on", "off", "cudagraphs"),
        "on, off, or auto: whether a step of training, evaluation or prediction is one compiled graph; auto: where "
        "1,000 of its kind or more, on a GPU 200, are to come. cudagraphs: on, and on several GPUs a step is one CUDA "
        "graph, NCCL's messages in it. What cannot be captured runs uncompiled, with a warning. To be set with "
        "torch only: jax and tensorflow do as the model's jit_compile says.")
    check: str = choice("first", DEVICES, one_of("first", "off"),
        "first: before the first update on several devices, a few samples go through the model whole and split over "
        "all, and the run ends if they differ. Or off.")

    shard: str = choice("none", DEVICES, one_of("none", "optimizer", "weights"),
        "What each device holds a part of, instead of the whole: none; the variables of the optimizer; or the weights, "
        "too, which are gathered where a step uses them. To be set with torch and jax only.")

    remat: str = choice("none", DEVICES, Range("none, blocks, or names of layers as 'block*'", bool),
        "What is computed once more in the backward pass, and not kept until then: none; blocks: the layers of the "
        "model that hold others; or layers by name or path, as 'block*, *attention'. The losses stay the same.")

    strategy: str = choice("data", CUT, one_of("data", "pipeline", "tensor"),
        "What the devices share: the batch (data); the model, cut into stages (pipeline, with torch only); or each "
        "layer's output channels (tensor, with jax only).")
    cut_at: str | None = choice(None, CUT, Range("names of layers in one string, comma-separated"),
        "Layers after which to cut a model into stages, comma-separated.",
        "a stage a device, with equal shares of the weights")
    split_size: int | None = choice(None, CUT, COUNT, "Samples per micro-batch.", "two micro-batches a stage")

    batch_size: int = choice(64, TRAINING, COUNT, "Samples per step over all devices: the global batch.")
    accumulate: int = choice(1, TRAINING, COUNT,
        "Micro-batches into which each device cuts its samples, one after the other, for batches larger than its "
        "memory. The gradient is the same; batch norm takes its statistics from each micro-batch.")
    max_steps: int | None = choice(None, TRAINING, COUNT, "Updates after which the run ends.",
        "it ends after its epochs")
    batch_norm: str = choice("sync", TRAINING, one_of(*BATCH_NORMS),
        "Statistics over the global batch (sync) or over each replica's shard of it (replica).")
    seed: int = choice(0, TRAINING, Range("a whole number from 0 to 4294967295", lambda number: 0 <= number < 2**32),
        "Seed of initial weights, sample order and dropout.")
    deterministic: bool = choice(False, TRAINING, SWITCH,
        "Repeated or resumed on GPUs of the same kind and number, the run is equal bit by bit, as it is on the CPU; "
        "slower. What the backend cannot do so ends the run.")

    workdir: str | None = choice(None, OUTPUT, FOLDER, "Folder for the files of the run.",
        "a new one in runs/; from Python none", of_host=True)
    log_every: int = choice(10, OUTPUT, COUNT, "Steps between two lines of steps.jsonl.")
    verbose: int | None = choice(None, OUTPUT, one_of(0, 1, 2),
        "0: nothing, 1: progress bar, 2: a line per epoch.", "1 in a terminal, else 2", of_host=True)
    tracker: str | None = choice(None, OUTPUT,
        Range(f"some of {', '.join(TRACKERS)}", lambda text: {name.strip() for name in text.split(",")} <= {*TRACKERS}),
        f"Some of {', '.join(TRACKERS)}, comma-separated: where the numbers of the run go beside its files.", "nowhere",
        of_host=True)

    checkpoint_every: str | int = choice("epoch", FAULTS,
        Range("epoch, never, steps (as 50) or minutes (as 10m)",
              lambda value: value in ("epoch", "never") or is_count(str(value).removesuffix("m"))),
        "epoch; 50: also every 50 steps; 10m: also every 10 minutes; never: none.")
    checkpoint_dir: str | None = choice(None, FAULTS, Range("a folder, or a URL as s3://bucket/folder", bool),
        "Folder of the checkpoints, or a URL: s3://bucket/run, gs://, az://, ... (pip install 'kerasdp[fsspec]').",
        "checkpoints in --workdir", of_host=True)
    checkpoint_weights: str = choice("all", FAULTS, one_of("all", "trained"),
        "Weights of the model that checkpoints hold: all, or trained: all but the frozen ones, which a resumed run "
        "must have from where the first had them: a file, a preset, the seed.")
    keep: int = choice(3, FAULTS, COUNT,
        "Number of newest checkpoints to keep; the best one, by validation loss (else training loss), is kept as well.")
    resume: bool = choice(False, FAULTS, SWITCH,
        "Resume from the newest checkpoint, on any backend and number of devices; else start from the beginning.",
        of_host=True)
    max_restarts: int = choice(0, FAULTS, FROM_0,
        "How often to restart from the last checkpoint when a worker dies or hangs.")
    hang_timeout: float | None = choice(None, FAULTS,
        Range("a number of seconds, or 0 for never", lambda seconds: math.isfinite(seconds) and seconds >= 0),
        "Seconds without a move after which the run is ended, or restarted; more than the longest step or callback "
        "takes; what may compile has an hour. 0: never.",
        "300 where several processes wait for each other, as torch's on several devices; else never")
    # fmt: on

    def __post_init__(self) -> None:
        check_choices(self)
        _check_files(self)
        _check_strategy(self)
        for name, only, backends, instead in _OF_BACKENDS:
            value = getattr(self, name)
            is_meant = value == only if only else value != choices_of(Config)[name].default
            if is_meant and self.backend not in (None, *backends):
                raise UserError(
                    f"--{name}={value}: there for --backend={' and '.join(backends)} only. Received: {self.backend}; "
                    f"{instead}"
                )
        if self.num_devices is not None:
            self.check_replicas(self.num_replicas(self.num_devices))

    def check_replicas(self, num_replicas: int) -> None:
        """Checks that replicas can share a batch, and the weights, as this configuration says.

        Raises:
            UserError: if so many replicas cannot.
        """
        if num_replicas == 1 and self.shard != "none":
            raise UserError(
                f"--shard={self.shard}: one device holds all of the model; leave it out, or use --gpus=2 or more"
            )
        if self.batch_size < num_replicas:
            raise UserError(
                f"--batch_size counts the samples of all devices together: expected at least {num_replicas} "
                f"for {num_replicas} devices. Received: {self.batch_size}"
            )
        rows = self.replica_batch_size(num_replicas)
        count = -(-rows // -(-rows // self.accumulate))
        if count != self.accumulate:
            raise UserError(
                f"--accumulate: {rows} samples, those of a device, cannot be cut into {self.accumulate} parts of one "
                f"size, but for the last; use {count}, or another --batch_size"
            )

    @property
    def may_use_tf32(self) -> bool:
        """Returns whether GPUs may multiply numbers of float32 in TF32."""
        return self.precision == "tf32" or (self.precision == "auto" and not self.deterministic)

    def num_replicas(self, num_devices: int) -> int:
        """Returns the number of replicas of the model that share a batch.

        Args:
            num_devices: number of devices of the run.

        Raises:
            UserError: if `cut_at` makes more or fewer stages of a pipeline than there are devices.
        """
        if self.strategy == "data":
            return num_devices
        if self.cut_at and (stages := self._stages()) != num_devices:
            raise UserError(f"--gpus: expected {stages}, a device for each stage. Received: {num_devices}")
        return 1

    def with_devices_for_stages(self) -> "Config":
        """Returns a copy with one device per stage of a pipeline, if `cut_at` is given and devices are not."""
        return self if self.num_devices or not self.cut_at else dataclasses.replace(self, num_devices=self._stages())

    def _stages(self) -> int:
        return len((self.cut_at or "").split(",")) + 1

    @property
    def has_micro_batches(self) -> bool:
        """Returns whether a training step calls layers with one micro-batch after the other."""
        return self.accumulate > 1 or self.strategy == "pipeline"

    def micro_batch_rows(self, num_rows: int, num_devices: int) -> int | None:
        """Returns the samples of a full micro-batch, over all replicas; None if there are no micro-batches.

        Args:
            num_rows: samples of a batch.
            num_devices: number of devices of the run.

        Raises:
            UserError: if such a batch cannot be cut into these micro-batches.
        """
        if self.strategy == "pipeline":
            size = self.split_size or -(-num_rows // min(2 * num_devices, num_rows))
            if size > num_rows:
                raise UserError(f"--split_size: expected at most {num_rows}, a batch's samples. Received: {size}")
            return size
        if self.accumulate == 1:
            return None
        num_replicas = self.num_replicas(num_devices)
        config = dataclasses.replace(self, num_devices=None, batch_size=num_rows)
        config.check_replicas(num_replicas)
        return num_replicas * -(-config.replica_batch_size(num_replicas) // self.accumulate)

    def replica_batch_size(self, num_replicas: int) -> int:
        """Returns the samples of a full batch on one replica. The last replica may have fewer."""
        return -(-self.batch_size // num_replicas)

    @property
    def trackers(self) -> list[str]:
        """Returns the names in `tracker`."""
        return [name.strip() for name in self.tracker.split(",")] if self.tracker else []

    def checkpoint_interval(self) -> tuple[int | None, float | None]:
        """Returns the steps and the seconds after which a checkpoint is due; None where they do not count."""
        text = str(self.checkpoint_every)
        if text in ("epoch", "never"):
            return None, None
        return (None, 60.0 * int(text.removesuffix("m"))) if text.endswith("m") else (int(text), None)

    @property
    def keeps_checkpoints(self) -> bool:
        """Returns whether the run writes checkpoints."""
        return (self.workdir or self.checkpoint_dir) is not None and self.checkpoint_every != "never"

    def folder_of_fit(self, number: int) -> str | None:
        """Returns the folder of the files of a `fit`, by its number from 1; None if the run writes no files."""
        return None if self.workdir is None else _of_fit(self.workdir, number)

    def checkpoints_of_fit(self, number: int) -> str | None:
        """Returns the folder or URL of the checkpoints of a `fit`; None if it keeps none."""
        if not self.keeps_checkpoints:
            return None
        if self.checkpoint_dir is not None:
            return _of_fit(self.checkpoint_dir, number)
        return os.path.join(str(self.folder_of_fit(number)), CHECKPOINTS)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as a dictionary that JSON can hold, to be written or shown: URLs without passwords."""
        fields = dataclasses.asdict(self).items()
        return {name: redacted(value) if isinstance(value, str) else value for name, value in fields}


def _of_fit(folder: str, number: int) -> str:
    return folder if number == 1 else os.path.join(folder, f"fit-{number}")


# Choices, of these the value (None: all but the default), the backends that have it, and what to do on the others.
_OF_BACKENDS: tuple[tuple[str, str | None, tuple[str, ...], str], ...] = (
    ("device", "tpu", ("jax",), "use --backend=jax, or another --device"),
    ("compile", None, ("torch",), "leave it out: the model's jit_compile decides"),
    ("shard", None, ("torch", "jax"), "use one of those, or leave it out: each device holds all of the model"),
    ("strategy", "tensor", ("jax",), "use --backend=jax, or --strategy=data or pipeline"),
    ("strategy", "pipeline", ("torch",), "use --backend=torch, or --backend=jax with --shard=weights"),
)


def _check_files(config: Config) -> None:
    """Raises if what is to be written or resumed from has no folder."""
    resumes = "resume" if config.resume else "max_restarts" if config.max_restarts else None
    needs = "tracker" if config.tracker else resumes if config.checkpoint_dir is None else None
    if needs and config.workdir is None:
        raise UserError(f"--{needs} needs the files of a run, but no folder is set: add --workdir=FOLDER")
    if config.checkpoint_every == "never" and config.checkpoint_dir is not None:
        raise UserError("--checkpoint_dir has no effect with --checkpoint_every=never: leave out one of them")
    if config.checkpoint_every == "never" and resumes:
        raise UserError(f"--{resumes} resumes from a checkpoint, but --checkpoint_every=never keeps none")


def _check_strategy(config: Config) -> None:
    """Raises if choices of one strategy are made with another."""
    if config.strategy != "pipeline" and (config.cut_at is not None or config.split_size is not None):
        raise UserError("--cut_at, --split_size have an effect only with --strategy=pipeline")
    if config.strategy == "data":
        return
    if config.accumulate > 1:
        instead = "use --split_size" if config.strategy == "pipeline" else "leave one of them out"
        raise UserError(f"--accumulate: there for --strategy=data only. Received: {config.strategy}; {instead}")
    for name in ("shard", "remat"):
        if (value := getattr(config, name)) != "none":
            raise UserError(f"--{name}={value}: not together with --strategy={config.strategy}; leave out one of them")


@functools.cache  # each reads a file
def versions() -> dict[str, str]:
    """Returns the versions of Python and of every package that trains, if it is installed."""
    found = {"python": platform.python_version()}
    for package in ("kerasdp", "keras", *BACKENDS, "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
