"""Defines `Config`: every choice of a run in one frozen record, checked when it is made."""

import dataclasses
import os
from typing import Any

from kerasdp.config import sharing, validation
from kerasdp.config.workdir import CHECKPOINTS
from kerasdp.errors import UserError, redacted

# Seconds: as long as NCCL waits in a collective, so that no run ends by it that would have gone through on GPUs.
HANG_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Every choice of a run.

    `kerasdp.launch` reads the fields on devices, batch norm, precision, seed and output; the main job reads all.

    Args:
        backend: `"torch"`, `"jax"` or `"tensorflow"`. None: that of Keras if it is imported, else $KERAS_BACKEND,
            else that of keras.json, else the first installed.
        num_devices: devices of the run, or, on several hosts, of each. None: all GPUs or TPUs there are, or 1.
        device: `"gpu"`, `"tpu"` (jax), `"cpu"`, or `"auto"`: GPUs or TPUs if there are any, else virtual CPU devices.
        hosts: machines of the run: `"2"`, or, with torch, `"1:3"`: it begins with one to three, and continues when some
            leave and others join. None: as many as the environment says (of torchrun, mpirun, srun, TF_CONFIG), or 1.
        host_rank: number of this host, from 0. None: `JOB_COMPLETION_INDEX` of a Kubernetes Indexed Job.
        coordinator: address and port at which host 0 listens for the others, as `"10.0.0.1:29500"`.
        interface: network interface between the hosts. None: the one on the way to the coordinator.
        dry_run: instead of training, says what would run where, for any `hosts` and `num_devices`; nothing is started.
        strategy: what devices share: the batch (`"data"`), the model, cut into stages (`"pipeline"`), or each layer's
            output channels (`"tensor"`, with jax).
        num_stages: stages of a pipeline. None: one per device.
        cut_at: layers after which a pipeline is cut, comma-separated. None: where the stages are balanced.
        balance: what the stages of a pipeline have equal shares of: `"time"` (measured), `"flops"`, `"parameters"`.
        split_size: samples per micro-batch of a pipeline, as a number, or `"auto"`: the fastest, by a short search.
        micro_batches: instead of `split_size`: how many. None for both: twice as many as stages.
        pipeline_schedule: which micro-batch a stage works on next: all forward passes first (`"gpipe"`), or backward
            passes as soon as they can be (`"1f1b"`), also with several stages per device (`"interleaved1f1b"`).
        model: a model of `kerasdp.models`, or a user-defined function (`file.py:function`).
        dataset: a data set of `kerasdp.data`, or a user-defined function.
        data_dir: folder of the data set's files. None: where Keras or the system keeps them.
        data_on_device: whether inputs that are in memory stay on the devices while `fit` runs, so that a step sends
            row indices only: `"on"`, `"off"`, or `"auto"`: on GPUs, up to 1 GiB. Each device then holds all.
        batch_size: samples per step, over all devices: the global batch.
        accumulate: micro-batches into which each device cuts its samples, one after the other, so that it holds the
            activations of only one; the sum of their gradients is that of the global batch. Batch norm takes its
            statistics from each micro-batch.
        epochs: passes over the training data.
        max_steps: updates after which the run ends. None: it ends after `epochs`.
        optimizer: a Keras optimizer by name, with arguments: `sgd(momentum=0.9)`.
        learning_rate: None: that of `optimizer`, its argument or its default.
        schedule: how the rate falls in the course of the run: `"constant"`, `"cosine"` and `"linear"`, to 0,
            `"step(every=10, factor=0.1)"`, every 10 epochs.
        warmup: updates in which the rate rises to its full height.
        ema: decay of an exponential moving average of the weights, which are evaluated, and are the weights when the
            training ends: 0.99. None: no average.
        label_smoothing: share of the target that all classes have alike: 0.1.
        augment: changes of the images in training: `"flip, translate(factor=0.1)"`. None: none.
        early_stopping: epochs without a lower validation loss (else training loss) after which the training ends, with
            the weights of the best epoch. None: never.
        lr_base_batch: if given, the rate is multiplied by `batch_size / lr_base_batch`.
        kernel_initializer: a Keras initializer for every convolution and dense kernel of the built-in models,
            as `random_normal(stddev=0.01)`. None: each layer's default.
        batch_norm: statistics over the global batch (`"sync"`) or each replica's shard (`"replica"`).
        precision: precision of the layers' arithmetic; variables stay in float32, except with `"float64"`, which is for
            telling round-off from mistakes.
        compile: whether a step of training, evaluation or prediction runs as one compiled graph, on torch: `"on"`,
            `"off"`, or `"auto"`: where a run has at least 1,000 of its kind. What cannot be captured runs uncompiled,
            with a warning. On jax and tensorflow the model's `jit_compile` decides, as in Keras.
        gradient_precision: precision in which replicas exchange their gradients: `"bfloat16"` halves what they send
            (torch; tensorflow on virtual CPU devices alone, since it sums no bfloat16 between GPUs).
        reduce: where the gradients of several devices are added: on the devices (`"device"`), or in host memory
            (`"host"`; torch, tensorflow): slower, and leaves device memory free. None: on the devices; on virtual CPU
            devices, which are host memory, as is fastest.
        device_shares: shares of the global batch that the devices get, as `"3,1"`, in the order of the ranks, for
            devices of unequal speed (torch, tensorflow); `"auto"`: as measured when training begins. None: equal ones.
        check: whether a run on several devices begins with a forward pass of a few samples, whole on one device and
            split over all, and ends if they differ: `"first"`, before the first update, or `"off"`.
        seed: seed of initial weights, sample order and dropout.
        deterministic: whether a run repeated, or resumed, on GPUs of the same kind and number is equal bit by bit, as
            it always is on the CPU; slower. What the backend cannot do so ends the run.
        workdir: folder for what the run leaves. None: nothing is written.
        log_every: steps between two lines of steps.jsonl.
        verbose: 0 nothing, 1 progress bar, 2 a line per epoch, 3 also curves, as a figure in a notebook, as text in a
            terminal; None: 1 in a terminal, 3 in a notebook, else 2.
        tracker: where the numbers of the run go beside its files: some of `"tensorboard,wandb,mlflow"`. None: nowhere.
        profile: steps that the backend's profiler records, as `"5:8"`, into the workdir. None: none.
        checkpoint_every: when a checkpoint is written into the workdir: `"epoch"`, at the end of each; `"50"`, and
            after every 50 steps; `"10m"`, and every 10 minutes; `"never"`, none at all.
        checkpoint_dir: folder of the checkpoints, or a URL as `"s3://bucket/run"`, which fsspec writes to and reads
            from. None: the folder `checkpoints` of the workdir.
        keep: how many of the newest checkpoints stay. The best one, by validation loss (without validation data by
            training loss), stays besides.
        resume: resume from the newest checkpoint; without one, start from the beginning.
        max_restarts: how often a run is restarted from its last checkpoint when a worker dies or hangs.
        hang_timeout: seconds without a move in `fit`, `evaluate` or `predict` after which the run is ended; the first
            call of each function with each shape, which may compile, has an hour. 0: never. None: 600 where ranks wait
            for each other (torch on several devices); elsewhere a line then says where the run is.
        export: file for the finished model, `.keras` or `.weights.h5`. None: none.

    Raises:
        UserError: if a value is out of its range.
    """

    backend: str | None = None
    num_devices: int | None = None
    device: str = "auto"
    hosts: str | None = None
    host_rank: int | None = None
    coordinator: str | None = None
    interface: str | None = None
    dry_run: bool = False
    strategy: str = "data"
    num_stages: int | None = None
    cut_at: str | None = None
    balance: str = "time"
    split_size: int | str | None = None
    micro_batches: int | None = None
    pipeline_schedule: str = "gpipe"
    model: str = "lenet"
    dataset: str = "digits"
    data_dir: str | None = None
    data_on_device: str = "auto"
    batch_size: int = 64
    accumulate: int = 1
    epochs: int = 20
    max_steps: int | None = None
    optimizer: str = "sgd(learning_rate=0.03, momentum=0.9)"
    learning_rate: float | None = None
    schedule: str = "constant"
    warmup: int = 0
    ema: float | None = None
    label_smoothing: float = 0.0
    augment: str | None = None
    early_stopping: int | None = None
    lr_base_batch: int | None = None
    kernel_initializer: str | None = None
    batch_norm: str = "sync"
    precision: str = "float32"
    compile: str = "auto"
    check: str = "first"
    gradient_precision: str = "float32"
    reduce: str | None = None
    device_shares: str | None = None
    seed: int = 0
    deterministic: bool = False
    workdir: str | None = None
    log_every: int = 10
    verbose: int | None = None
    tracker: str | None = None
    profile: str | None = None
    checkpoint_every: str = "epoch"
    checkpoint_dir: str | None = None
    keep: int = 3
    resume: bool = False
    max_restarts: int = 0
    hang_timeout: float | None = None
    export: str | None = None

    def __post_init__(self) -> None:
        for name, value in validation.normalized(self).items():
            object.__setattr__(self, name, value)
        validation.check(self)

    def check_replicas(self, num_replicas: int) -> None:
        """Raises `UserError` if the global batch cannot be shared as asked, or nothing is shared that should be."""
        sharing.check_replicas(self, num_replicas)

    @property
    def host_range(self) -> tuple[int, int]:
        """Returns the least and the most hosts of the run, of those that `hosts` names."""
        fewest, _, most = (self.hosts or "1").partition(":")
        return int(fewest), int(most or fewest)

    @property
    def engine(self) -> str:
        """Returns the strategy that trains: `--accumulate` is a pipeline of one stage."""
        return "pipeline" if self.accumulate > 1 else self.strategy

    def num_replicas(self, num_devices: int) -> int:
        """Returns how many replicas of the model share the batch on that many devices.

        Raises:
            UserError: if the stages of a pipeline and the devices do not go together.
        """
        if self.strategy == "tensor":
            return 1
        return self.num_pipelines(num_devices) if self.strategy == "pipeline" else num_devices

    def with_devices_for_stages(self) -> "Config":
        """Returns a copy with one device per stage of a pipeline, if stages are given and devices are not."""
        if self.strategy != "pipeline" or self.num_devices or not (self.num_stages or self.cut_at):
            return self
        stages = self.stages_on(1)
        return dataclasses.replace(
            self, num_devices=-(-stages // 2) if self.pipeline_schedule == "interleaved1f1b" else stages
        )

    def stages_on(self, num_devices: int) -> int:
        """Returns how many stages a pipeline has on that many devices."""
        if self.accumulate > 1:
            return 1
        if self.cut_at is not None:
            return len(self.cut_at.split(",")) + 1
        return self.num_stages or (2 * num_devices if self.pipeline_schedule == "interleaved1f1b" else num_devices)

    def num_pipelines(self, num_devices: int) -> int:
        """Returns how many pipelines share the batch, each with a replica of the model.

        Raises:
            UserError: if stages and devices do not go together.
        """
        return sharing.num_pipelines(self, num_devices)

    def micro_batch_size(self, num_stages: int, num_pipelines: int) -> int:
        """Returns the samples of a full micro-batch of each pipeline, if `split_size` is not `"auto"`."""
        size = self.replica_batch_size(num_pipelines)
        if self.split_size is not None:
            return min(int(self.split_size), size)
        count = self.accumulate if self.accumulate > 1 else self.micro_batches or 2 * num_stages
        return -(-size // min(count, size))

    def replica_batch_size(self, num_replicas: int) -> int:
        """Returns the samples of a full batch on one replica (the last one holds fewer if they do not divide)."""
        return -(-self.batch_size // num_replicas)

    def scaled_learning_rate(self, default: float) -> float:
        """Returns `learning_rate`, or the optimizer's (`default`), scaled if `lr_base_batch` is set."""
        rate = default if self.learning_rate is None else self.learning_rate
        return rate * self.batch_size / self.lr_base_batch if self.lr_base_batch else rate

    @property
    def trackers(self) -> list[str]:
        """Returns the names in `tracker`."""
        return [name.strip() for name in self.tracker.split(",")] if self.tracker else []

    @property
    def profiled_steps(self) -> tuple[int, int]:
        """Returns the first and the last step that `profile` names; (0, 0) without."""
        first, _, last = (self.profile or "0").partition(":")
        return int(first), int(last or first)

    def checkpoint_interval(self) -> tuple[int | None, float | None]:
        """Returns the steps and the seconds after which a checkpoint is due; None where they do not count."""
        text = self.checkpoint_every
        if text in ("epoch", "never"):
            return None, None
        number = text.removesuffix("m")
        if not number.isdecimal() or int(number) < 1:
            raise UserError(f"--checkpoint_every: expected {validation.CHECKPOINT_TIMES}. Received: {text!r}")
        return (None, 60.0 * int(number)) if text.endswith("m") else (int(number), None)

    @property
    def keeps_checkpoints(self) -> bool:
        """Returns whether the run writes checkpoints."""
        return (self.workdir or self.checkpoint_dir) is not None and self.checkpoint_every != "never"

    def folder_of_fit(self, number: int) -> str | None:
        """Returns the folder of the files of a `fit`, by its number from 1: each leaves those of the others alone."""
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
