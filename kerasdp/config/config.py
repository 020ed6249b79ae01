"""Defines `Config`, the frozen dataclass with every option of a run.

Only this module defines the name, type, default, flag group, valid values and meaning of an option. Checks, flags,
`--help` and documentation pages are generated from these definitions (`choices.py`).
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
# kerasdp has an extra with the name of each tracker, which installs its package.
TRACKERS = ("tensorboard", "wandb", "mlflow")
# Seconds.
HANG_TIMEOUT = 300.0
CHECKPOINTS = "checkpoints"  # folder in the workdir

# The groups of the flags.
DEVICES = "Backend and devices"
CUT = "Models split over several devices"
TRAINING = "Training"
OUTPUT = "Output"
FAULTS = "Checkpoints and faults"


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All options of a run. A `Config` cannot be changed; `dataclasses.replace` makes a changed copy.

    `kerasdp.launch` takes a `Config`, and passes it to `train` as `runner.config`. The model, the data, the optimizer
    and the epochs are not options of a run: `train` defines them.

    Raises:
        UserError: if a value is not valid.

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
        "the backend of an imported Keras, else $KERAS_BACKEND, else keras.json, else the first installed")
    num_devices: int | None = choice(None, DEVICES, COUNT,
        "Number of devices on each machine (with jax: in each process that is started). The devices are GPUs or TPUs, "
        "or virtual CPU devices if there are none.", "all GPUs or TPUs, or one CPU device")
    device: str = choice("auto", DEVICES, one_of("auto", "gpu", "tpu", "cpu"),
        "gpu, tpu, cpu or auto. auto: GPUs or TPUs if there are any, else virtual CPU devices. tpu: with jax only.")
    precision: str = choice("auto", DEVICES, one_of(*PRECISIONS),
        f"Precision of the layers' arithmetic: {', '.join(PRECISIONS)}. auto: float32; on GPUs the framework may use "
        "TF32 for matrix products. float32: float32 without TF32. tf32: all matrix products use TF32. Variables are "
        "float32, except with float64.")
    compile: str = choice("auto", DEVICES, one_of("auto", "on", "off", "cudagraphs"),
        "Whether to compile a step of training, evaluation or prediction: on, off, auto or cudagraphs. auto: compile "
        "a step that still runs 1,000 times or more (GPU: 200). cudagraphs: compile; on several GPUs a step is one "
        "CUDA graph that includes NCCL collectives. Code that cannot be captured runs uncompiled, with a warning. The "
        "flag works with torch only; on jax and tensorflow the model's jit_compile decides.")
    check: str = choice("first", DEVICES, one_of("first", "off"),
        "first: before the first update on several devices, check that a split batch gives the same results as a whole "
        "batch. If the results differ, the run ends with an error. off: no check.")

    shard: str = choice("none", DEVICES, one_of("none", "optimizer", "weights"),
        "Variables to shard over the devices. none: no variables. optimizer: the variables of the optimizer. weights: "
        "also the weights, which a step gathers when it needs them. The flag works with torch and jax only.")

    remat: str = choice("none", DEVICES, Range("none, blocks, or names of layers such as 'block*'", bool),
        "Layers to compute again in the backward pass, instead of storing their activations. none: no layers. blocks: "
        "layers that contain other layers. Or names or paths, such as 'block*, *attention'. The losses do not change.")

    strategy: str = choice("data", CUT, one_of("data", "pipeline", "tensor"),
        "How to split the work over the devices. data: split the batch. pipeline: split the model into stages (with "
        "torch only). tensor: split each layer's output channels (with jax only).")
    cut_at: str | None = choice(None, CUT, Range("names of layers in one string, comma-separated"),
        "Names of the layers after which to split a model into stages, comma-separated.",
        "one stage per device, with equal shares of the weights")
    split_size: int | None = choice(None, CUT, COUNT, "Samples per micro-batch.", "two micro-batches per stage")

    batch_size: int = choice(64, TRAINING, COUNT, "Global batch: samples per step over all devices.")
    accumulate: int = choice(1, TRAINING, COUNT,
        "Number of micro-batches per step. Each device computes its samples one micro-batch after the other, to save "
        "memory. This does not change the gradient, but batch norm uses the statistics of each micro-batch.")
    max_steps: int | None = choice(None, TRAINING, COUNT, "Number of updates after which the run ends.",
        "the run ends after its epochs")
    batch_norm: str = choice("sync", TRAINING, one_of(*BATCH_NORMS),
        "Statistics of batch norm. sync: over the global batch. replica: over each replica's shard of the batch.")
    seed: int = choice(0, TRAINING, Range("a whole number from 0 to 4294967295", lambda number: 0 <= number < 2**32),
        "Seed of initial weights, sample order and dropout.")
    deterministic: bool = choice(False, TRAINING, SWITCH,
        "Make a repeated or resumed run bitwise identical on the same kind and number of GPUs. This is slower. CPU "
        "runs are always identical. An operation without a deterministic implementation ends the run with an error.")

    workdir: str | None = choice(None, OUTPUT, FOLDER, "Folder for the files of the run.",
        "a new folder in runs/; in Python no files are written", of_host=True)
    log_every: int = choice(10, OUTPUT, COUNT, "Steps between two lines of steps.jsonl.")
    verbose: int | None = choice(None, OUTPUT, one_of(0, 1, 2),
        "0: nothing, 1: progress bar, 2: one line per epoch.", "1 in a terminal, else 2", of_host=True)
    tracker: str | None = choice(None, OUTPUT,
        Range(f"some of {', '.join(TRACKERS)}", lambda text: {name.strip() for name in text.split(",")} <= {*TRACKERS}),
        f"Where to log metrics in addition to the files of the run: some of {', '.join(TRACKERS)}, comma-separated.",
        "nowhere", of_host=True)

    checkpoint_every: str | int = choice("epoch", FAULTS,
        Range("epoch, never, steps (as 50) or minutes (as 10m)",
              lambda value: value in ("epoch", "never") or is_count(str(value).removesuffix("m"))),
        "epoch: write a checkpoint after each epoch. 50: also every 50 steps. 10m: also every 10 minutes. never: none.")
    checkpoint_dir: str | None = choice(None, FAULTS, Range("a folder, or a URL as s3://bucket/folder", bool),
        "Folder or URL of the checkpoints: s3://bucket/run, gs://, az://, ... (pip install 'kerasdp[fsspec]').",
        "checkpoints in --workdir", of_host=True)
    checkpoint_weights: str = choice("all", FAULTS, one_of("all", "trained"),
        "Weights that checkpoints contain. trained: all except frozen weights. A resumed run must then get the frozen "
        "weights from the same file, preset or seed as the first run.")
    keep: int = choice(3, FAULTS, COUNT,
        "Number of newest checkpoints to keep. The best one, by validation loss (else training loss), is also kept.")
    resume: bool = choice(False, FAULTS, SWITCH,
        "Resume from the newest checkpoint, on any backend and number of devices. Without a checkpoint the run starts "
        "from the beginning.", of_host=True)
    max_restarts: int = choice(0, FAULTS, FROM_0,
        "How often to restart from the last checkpoint when a worker dies or hangs.")
    hang_timeout: float | None = choice(None, FAULTS,
        Range("a number of seconds, or 0 for never", lambda seconds: math.isfinite(seconds) and seconds >= 0),
        "Seconds without progress after which the run ends or restarts. Use more than the longest step or callback "
        "takes. A call that may compile may take one hour. 0: never.",
        "300 if several processes wait for each other, as with torch on several devices; else never")
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
                    f"--{name}={value}: works with --backend={' and '.join(backends)} only. Received: {self.backend}; "
                    f"{instead}"
                )
        if self.num_devices is not None:
            self.check_replicas(self.num_replicas(self.num_devices))

    def check_replicas(self, num_replicas: int) -> None:
        """Checks that the global batch and the weights can be split over a number of replicas.

        Raises:
            UserError: if the batch is too small for the replicas or micro-batches; if `shard` is set for one replica.
        """
        if num_replicas == 1 and self.shard != "none":
            raise UserError(
                f"--shard={self.shard}: expected several devices. Received: 1; leave it out, or use --gpus=2 or more"
            )
        if self.batch_size < num_replicas:
            raise UserError(
                f"--batch_size: expected at least {num_replicas} samples for {num_replicas} devices. Received: "
                f"{self.batch_size}; the batch is split over all devices, so use a larger batch or fewer devices"
            )
        rows = self.replica_batch_size(num_replicas)
        count = -(-rows // -(-rows // self.accumulate))
        if count != self.accumulate:
            raise UserError(
                f"--accumulate: the {rows} samples of a device cannot be split into {self.accumulate} micro-batches of "
                f"equal size (only the last may be smaller); use --accumulate={count}, or another --batch_size"
            )

    @property
    def may_use_tf32(self) -> bool:
        """Returns whether GPUs may use TF32 to multiply float32 values."""
        return self.precision == "tf32" or (self.precision == "auto" and not self.deterministic)

    def num_replicas(self, num_devices: int) -> int:
        """Returns the number of replicas of the model that share a batch.

        Args:
            num_devices: number of devices of the run.

        Raises:
            UserError: if the number of stages that `cut_at` defines differs from the number of devices.
        """
        if self.strategy == "data":
            return num_devices
        if self.cut_at and (stages := self._stages()) != num_devices:
            raise UserError(f"--gpus: expected {stages}, one device per stage of --cut_at. Received: {num_devices}")
        return 1

    def with_devices_for_stages(self) -> "Config":
        """Returns a copy with one device per pipeline stage if `cut_at` is set and `num_devices` is None.

        Otherwise returns `self`.
        """
        return self if self.num_devices or not self.cut_at else dataclasses.replace(self, num_devices=self._stages())

    def _stages(self) -> int:
        return len((self.cut_at or "").split(",")) + 1

    @property
    def has_micro_batches(self) -> bool:
        """Returns whether a training step calls layers several times, once per micro-batch."""
        return self.accumulate > 1 or self.strategy == "pipeline"

    def micro_batch_rows(self, num_rows: int, num_devices: int) -> int | None:
        """Returns the size of a full micro-batch, in samples over all replicas; None if there are no micro-batches.

        Args:
            num_rows: number of samples of a batch.
            num_devices: number of devices of the run.

        Raises:
            UserError: if the batch is too small for the micro-batches of this configuration.
        """
        if self.strategy == "pipeline":
            size = self.split_size or -(-num_rows // min(2 * num_devices, num_rows))
            if size > num_rows:
                raise UserError(f"--split_size: expected at most {num_rows}, the size of a batch. Received: {size}")
            return size
        if self.accumulate == 1:
            return None
        num_replicas = self.num_replicas(num_devices)
        config = dataclasses.replace(self, num_devices=None, batch_size=num_rows)
        config.check_replicas(num_replicas)
        return num_replicas * -(-config.replica_batch_size(num_replicas) // self.accumulate)

    def replica_batch_size(self, num_replicas: int) -> int:
        """Returns the number of samples of a full batch on one replica. The last replica may have fewer."""
        return -(-self.batch_size // num_replicas)

    @property
    def trackers(self) -> list[str]:
        """Returns the names in `tracker` as a list."""
        return [name.strip() for name in self.tracker.split(",")] if self.tracker else []

    def checkpoint_interval(self) -> tuple[int | None, float | None]:
        """Returns the checkpoint interval as a tuple: in steps, and in seconds. One or both of the values are None."""
        text = str(self.checkpoint_every)
        if text in ("epoch", "never"):
            return None, None
        return (None, 60.0 * int(text.removesuffix("m"))) if text.endswith("m") else (int(text), None)

    @property
    def keeps_checkpoints(self) -> bool:
        """Returns whether the run writes checkpoints."""
        return (self.workdir or self.checkpoint_dir) is not None and self.checkpoint_every != "never"

    def folder_of_fit(self, number: int) -> str | None:
        """Returns the folder for the files of a `fit` call; None if the run writes no files.

        Args:
            number: number of the `fit` call in the run, from 1.
        """
        return None if self.workdir is None else _of_fit(self.workdir, number)

    def checkpoints_of_fit(self, number: int) -> str | None:
        """Returns the folder or URL for the checkpoints of a `fit` call; None if the run writes no checkpoints.

        Args:
            number: number of the `fit` call in the run, from 1.
        """
        if not self.keeps_checkpoints:
            return None
        if self.checkpoint_dir is not None:
            return _of_fit(self.checkpoint_dir, number)
        return os.path.join(str(self.folder_of_fit(number)), CHECKPOINTS)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as a dictionary of JSON types. Passwords in URLs are removed."""
        fields = dataclasses.asdict(self).items()
        return {name: redacted(value) if isinstance(value, str) else value for name, value in fields}


def _of_fit(folder: str, number: int) -> str:
    return folder if number == 1 else os.path.join(folder, f"fit-{number}")


# Option, its value (None: all except the default), the backends that have it, and what to do on other backends.
_OF_BACKENDS: tuple[tuple[str, str | None, tuple[str, ...], str], ...] = (
    ("device", "tpu", ("jax",), "use --backend=jax, or another --device"),
    ("compile", None, ("torch",), "leave out --compile, and set jit_compile of the model"),
    ("shard", None, ("torch", "jax"), "use one of these backends, or leave out --shard"),
    ("strategy", "tensor", ("jax",), "use --backend=jax, or --strategy=data or pipeline"),
    ("strategy", "pipeline", ("torch",), "use --backend=torch, or --backend=jax with --shard=weights"),
)


def _check_files(config: Config) -> None:
    """Raises a `UserError` if an option needs a folder or checkpoints, but the run has no folder or checkpoints."""
    resumes = "resume" if config.resume else "max_restarts" if config.max_restarts else None
    needs = "tracker" if config.tracker else resumes if config.checkpoint_dir is None else None
    if needs and config.workdir is None:
        raise UserError(f"--{needs} needs a folder for the files of the run; add --workdir=FOLDER")
    if config.checkpoint_every == "never" and config.checkpoint_dir is not None:
        raise UserError("--checkpoint_dir has no effect with --checkpoint_every=never; leave out one of these flags")
    if config.checkpoint_every == "never" and resumes:
        raise UserError(f"--{resumes} needs checkpoints, but the run writes none; leave out --checkpoint_every=never")


def _check_strategy(config: Config) -> None:
    """Raises a `UserError` if an option does not work with the chosen strategy."""
    if config.strategy != "pipeline" and (config.cut_at is not None or config.split_size is not None):
        raise UserError("--cut_at and --split_size need --strategy=pipeline; add it, or leave out these two flags")
    if config.strategy == "data":
        return
    if config.accumulate > 1:
        instead = "use --split_size" if config.strategy == "pipeline" else "leave out --accumulate"
        raise UserError(f"--accumulate: works with --strategy=data only. Received: {config.strategy}; {instead}")
    for name in ("shard", "remat"):
        if (value := getattr(config, name)) != "none":
            raise UserError(f"--{name}={value}: does not work with --strategy={config.strategy}; leave out one of them")


@functools.cache  # each reads a file
def versions() -> dict[str, str]:
    """Returns the versions of Python and of all installed packages that take part in training."""
    found = {"python": platform.python_version()}
    for package in ("kerasdp", "keras", *BACKENDS, "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
