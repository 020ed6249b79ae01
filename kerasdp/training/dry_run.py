"""Says what a run would do, on machines that need not be there: its script runs here, up to its first `fit`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras

from kerasdp.backends.base import SingleProcess, Strategy
from kerasdp.checkpoint.names import GROUPS, named
from kerasdp.config import Config
from kerasdp.data.batch import Batch, SampleReader
from kerasdp.data.feed import Reader
from kerasdp.data.sampling import replica_rows
from kerasdp.errors import UserError
from kerasdp.keras_compat.models import compiled_variables
from kerasdp.pipeline.plan import make_plan
from kerasdp.portability.portable import batch_norms
from kerasdp.portability.reduction import reasons_to_gather
from kerasdp.reporting.dry_run import lines
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.hardware import bytes_of_device
from kerasdp.runtime.heartbeat import Heartbeat
from kerasdp.sharding import bytes_of, is_cut, numbers_in
from kerasdp.training.memory_plan import count_each, make_ladder, model_bytes, needed
from kerasdp.training.prepare import bytes_of_row
from kerasdp.training.runner import Runner

# Samples that are read, of the first batch.
_FEW = 32


class _Described(BaseException):
    """Ends the training function; no Exception, which that might catch."""

    def __init__(self, figures: dict[str, Any]):
        super().__init__()
        self.figures = figures


def figures_of(config: Config, train: Callable[..., Any], runner: Runner) -> dict[str, Any]:
    """Runs `train` up to its first `fit`; prints what that would do, and returns it, as JSON can hold it.

    Args:
        config: of the run; `num_devices` is given.
        train: as `kerasdp.launch` takes it.
        runner: of one CPU device of this machine.

    Raises:
        UserError: as the run would; and if `train` calls no `fit`.
    """
    dry_runner = DryRunner(config, runner.devices, runner.strategy, runner.heartbeat)
    try:
        with dry_runner.training_function():
            train(dry_runner)
    except _Described as described:
        figures = described.figures
        if config.verbose != 0:
            print("\n".join(lines(figures)), flush=True)
        return figures
    raise UserError("--dry_run tells what fit would do. Received: a training function that calls no fit")


class DryRunner(Runner):
    """A runner whose `fit` prepares all, as that of the run would, and then describes it.

    `evaluate` and `predict` before it work as ever, on one CPU device.
    """

    def __init__(self, config: Config, devices: Devices, strategy: Strategy, heartbeat: Heartbeat):
        super().__init__(config, devices, strategy, heartbeat)
        self._num_devices = config.host_range[1] * (config.num_devices or 1)
        self._readers: list[Reader] = []
        # What each replica is to compute of its own rows is looked at as if there were several.
        shares_rows = config.backend != "jax" and config.engine == "data"
        strategy.splits_batches = shares_rows and self.num_replicas > 1

    @property
    def num_replicas(self) -> int:
        """Replicas of the run."""
        return self.config.num_replicas(self._num_devices)

    def _reader(self, x: Any, y: Any, sample_weight: Any, batch_size: int, **options: Any) -> Reader:
        reader = super()._reader(x, y, sample_weight, batch_size, **options)
        if options.get("fitting"):
            self._readers.append(reader)
            if isinstance(reader, SampleReader):
                reader.first = functools.partial(_first_rows, reader)  # type: ignore[method-assign]
        return reader

    def _begin_fit(self, model: keras.Model, reader: Reader, *args: Any) -> Any:
        _, batch_size, num_rows, epochs, _ = args
        if model.optimizer is not None and not model.optimizer.built:
            with self._scope():
                model.optimizer.build(model.trainable_variables)
        config = dataclasses.replace(self.config, batch_size=batch_size)
        data = _data(config, self._readers, self.num_replicas, self._num_devices)
        self.state.begin_fit(
            batch_size=num_rows, num_batches=data["steps_per_epoch"], epochs=epochs, max_steps=self.config.max_steps
        )
        counted = count_each(model, reader, self.strategy, config)
        activations = counted[config.remat]
        raise _Described({
            **_places(config, model, self._num_devices),
            "data": data,
            "steps": self.state.num_steps,
            "epochs": epochs,
            "memory": needed(model, activations, config, self._num_devices),
            "ladder": None if config.fit_into is None else make_ladder(model, counted, config, self._num_devices),
            "device_bytes": bytes_of_device(str(config.backend), config.device, self._num_devices)
            if config.host_range[1] == 1
            else None,
            "checkpoint_bytes": _checkpoint_bytes(model),
            **_cost(config, model, self._num_devices),
        })  # fmt: skip


def _first_rows(reader: SampleReader) -> Batch:
    """Returns the first batch with few of its rows, which tell their shape; a batch for a pod may fill this machine."""
    indices = reader.order.batch(0, 0)
    rows = indices[:_FEW]
    targets, sample_weight = reader.source.targets(rows)
    return Batch(
        inputs=reader.source.inputs(rows), targets=targets, sample_weight=sample_weight, indices=indices,
        own_indices=rows,
    )  # fmt: skip


def _places(config: Config, model: keras.Model, num_devices: int) -> dict[str, Any]:
    """Returns which process drives which devices."""
    hosts = config.host_range[1]
    rate = getattr(model.optimizer, "learning_rate", None)
    return {
        "backend": config.backend, "model": model.name, "precision": config.precision, "strategy": config.strategy,
        "hosts": hosts, "fewest_hosts": config.host_range[0], "devices_per_host": config.num_devices,
        "device": config.device, "num_devices": num_devices, "num_replicas": config.num_replicas(num_devices),
        "num_processes": num_devices if config.backend == "torch" else hosts, "batch_size": config.batch_size,
        "learning_rate": None if rate is None else float(keras.ops.convert_to_numpy(rate)),
        "keeps_checkpoints": config.keeps_checkpoints, "checkpoint_every": config.checkpoint_every, "keep": config.keep,
    }  # fmt: skip


def _data(config: Config, readers: list[Reader], num_replicas: int, num_devices: int) -> dict[str, Any]:
    """Returns steps, rows and shards of an epoch's batches. The readers are of the training and the validation data."""
    reader = readers[0]
    first = reader.first()
    leaves = keras.tree.flatten((first.inputs, first.targets, first.sample_weight))
    num_processes = num_devices if config.backend == "torch" else config.host_range[1]
    found: dict[str, Any] = {
        "dataset": config.dataset, "note": None, "num_samples": None, "steps_per_epoch": reader.num_batches,
        "full_batch": split_rows(len(first.indices), num_replicas), "last_batch": None,
        "bytes_per_sample": sum(leaf.nbytes // max(len(leaf), 1) for leaf in leaves if leaf is not None),
        "replicas_per_process": max(1, num_replicas // num_processes),
        "num_test_samples": None, "test_steps": None,
    }  # fmt: skip
    if isinstance(reader, SampleReader):
        found |= {"kind": type(reader.source).__name__, "is_handed_out": False, **_counts(reader)}
        found["full_batch"] = split_rows(
            min(config.batch_size, found["num_samples"] or config.batch_size), num_replicas
        )
        last = (found["num_samples"] or 0) % config.batch_size
        if last and found["num_samples"] > config.batch_size:
            found["last_batch"] = split_rows(last, num_replicas)
    else:
        found |= {"kind": type(reader.batches).__name__, "is_handed_out": True}
    for test in readers[1:2]:
        counts = _counts(test) if isinstance(test, SampleReader) else {"steps_per_epoch": test.num_batches}
        found |= {"num_test_samples": counts.get("num_samples"), "test_steps": counts["steps_per_epoch"]}
    return found


def _counts(reader: SampleReader) -> dict[str, Any]:
    """Returns the samples and steps of an epoch, and what is to be said of them; None where they are not known."""
    is_counted, note = getattr(reader.source, "is_counted", True), getattr(reader.source, "note", None)
    if not is_counted:
        return {"num_samples": None, "steps_per_epoch": None, "note": note}
    return {"num_samples": reader.source.num_samples, "steps_per_epoch": reader.num_batches, "note": note}


def split_rows(num_rows: int, num_replicas: int) -> dict[str, int]:
    """Returns how the rows of a batch are split: those of a full replica, how many are full, and what others have.

    Returns:
        `rows` of each of `full` replicas, `rest` of the next one (0: none is partly full), and `empty` replicas, with
        padding alone.
    """
    rows = replica_rows(num_rows, num_replicas)
    full, rest = divmod(num_rows, rows)
    empty = num_replicas - full - (rest > 0)
    return {"num_rows": num_rows, "rows": rows, "full": full, "rest": rest, "empty": empty}


def _checkpoint_bytes(model: keras.Model) -> int:
    """Returns the bytes of the arrays of a checkpoint, in which bfloat16 is float32: NumPy has no such type."""
    variables = [variable for group in GROUPS for _, variable in named(model, group)]
    wide = [variable for variable in variables if keras.backend.standardize_dtype(variable.dtype) == "bfloat16"]
    return bytes_of(variables) + bytes_of(wide)


def _cost(config: Config, model: keras.Model, num_devices: int) -> dict[str, Any]:
    """Returns what the devices of a step exchange; of a pipeline its stages."""
    if config.strategy == "tensor":
        raise UserError(
            "--dry_run: there for --strategy=data and pipeline. Received: tensor, whose layers' tensors are cut where "
            "they divide, and travel as XLA decides; leave one of them out"
        )
    if config.strategy == "pipeline":
        is_by_time = config.balance == "time" and config.cut_at is None  # measured where the layers are to work
        config = dataclasses.replace(config, balance="flops" if is_by_time else config.balance)
        plan = make_plan(model, config, num_devices, SingleProcess().broadcast_from_rank0)
        stages = [
            {"layers": stage.layers, "bytes_per_sample": stage.num_bytes, **model_bytes(model, stage.model.weights)}
            for stage in plan.stages
        ]
        return {"stages": stages, "micro_batch": plan.size, "is_cut_by_time": is_by_time}
    sent = step_bytes(model, config, config.num_replicas(num_devices))
    return {"step_bytes": dataclasses.asdict(sent), "sent_in_ring": sent.in_ring(num_devices)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What a device gives into the collectives of a step with a full batch, in bytes.

    Args:
        gradients: are summed over the devices.
        metrics: loss and metrics, likewise.
        statistics: of batch norms, likewise.
        gathered: own statistics of batch norms, which all other devices get.
        num_gatherings: messages of these.
        outputs: own outputs and targets, which all others get where the loss or a metric needs the whole batch.
        weights: that are held in parts, and gathered for the backward pass once more; the first time is in the place of
            that half of a sum of gradients in which each device gets the others' sums. Or (tensorflow) those of which
            each device updates a part, that all others get.
        gathers_by_sums: whether what all get is put between zeros and summed (tensorflow), which sends twice as much.
    """

    gradients: int
    metrics: int = 0
    statistics: int = 0
    gathered: int = 0
    num_gatherings: int = 0
    outputs: int = 0
    weights: int = 0
    gathers_by_sums: bool = False

    def in_ring(self, num_devices: int) -> dict[str, int]:
        """Returns the bytes that each of so many devices sends in a ring, by what they are; nothing of one device."""
        of_sum = 2 * (num_devices - 1) / num_devices
        of_gathering = (num_devices - 1) * (2 if self.gathers_by_sums else 1)
        return {
            "gradients": round(self.gradients * of_sum),
            "batch_norm": round(self.statistics * of_sum) + self.gathered * of_gathering,
            "metrics": round(self.metrics * of_sum),
            "outputs": self.outputs * (num_devices - 1),
            "weights": round(self.weights * of_sum / 2),
        }


def step_bytes(model: keras.Model, config: Config, num_replicas: int) -> StepBytes:
    """Computes what the devices of a data-parallel run exchange in a training step, from the built model.

    The sizes are those of the tensors that the engines hand to collectives. How often these are sent along depends on
    the algorithm: a ring sends 2 (N - 1) / N times the bytes of a sum, and N - 1 times those of a part that all others
    get (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH",
    doi:10.1177/1094342005051521).

    Args:
        model: built and compiled, with the batch norm of the run.
        config: `backend`, `batch_norm`, `gradient_precision`, `batch_size`, `accumulate` and `shard` are read.
        num_replicas: of the run.
    """
    gradients = bytes_of(model.trainable_variables)
    if config.gradient_precision == "bfloat16":
        gradients = 2 * numbers_in(model.trainable_variables)
    size = 8 if config.precision == "float64" else 4
    outputs = 0
    if config.backend == "jax":
        # XLA sums the gradients of each micro-batch, and of a metric's mean only the total: it knows the count.
        gradients *= config.accumulate
        metrics = size * (1 + numbers_in(each for each in metric_variables(model) if each.name != "count"))
    else:
        metrics = size * (1 + numbers_in(metric_variables(model)))
        if reasons_to_gather(model, is_weighted=False):
            # 0 where the model does not tell.
            outputs_of_row = bytes_of_row(getattr(model, "outputs", None) or [])
            metrics, outputs = 0, outputs_of_row * config.replica_batch_size(num_replicas)
    norms = [norm for norm in batch_norms(model) if norm.trainable]
    gathered = model.weights if config.shard == "weights" else []
    if config.shard == "optimizer" and config.backend == "tensorflow":
        gathered = model.trainable_weights
    return StepBytes(
        gradients=gradients,
        metrics=metrics,
        outputs=outputs,
        weights=bytes_of(weight for weight in gathered if is_cut(weight, num_replicas)),
        gathers_by_sums=config.backend == "tensorflow",
        **_of_batch_norms(norms, config, size),
    )


def _of_batch_norms(norms: list[Any], config: Config, size: int) -> dict[str, int]:
    channels = [math.prod(norm.moving_mean.shape) for norm in norms]
    if config.backend == "jax":
        # Sums of the gradients by scale and offset are needed, and are those that the weights get.
        known = sum(count * (bool(norm.center) + bool(norm.scale)) for norm, count in zip(norms, channels))
        backward = size * (2 * sum(channels) - known)
        if config.batch_norm == "replica":
            return {"statistics": backward + size * 2 * sum(channels)}
        return {"statistics": backward, "gathered": size * 2 * sum(channels), "num_gatherings": len(norms)}
    if config.batch_norm == "replica":  # count, mean and squares, with the gradients
        return {"statistics": size * 3 * sum(channels)}
    # These forward, and two sums backward.
    return {"gathered": size * 5 * sum(channels), "num_gatherings": 2 * len(norms)}


def metric_variables(model: keras.Model) -> list[Any]:
    """Returns the variables that replicas sum: of the losses of single outputs, and of the metrics of `compile`."""
    return [variable for variables in compiled_variables(model) for variable in variables]
