"""Plans a pipeline for all backends: how model and batch are cut, the schedule, and what is refused."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import keras

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import has_mask
from kerasdp.keras_compat.models import inputs_structure, outputs_structure
from kerasdp.keras_compat.optimizers import inner_optimizer
from kerasdp.pipeline.partition import HERE, MeasuringDevice, Stage, functional, imbalance, split, table
from kerasdp.portability.own_steps import refuse_next_values
from kerasdp.portability.reduction import shares_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How a global batch is cut into micro-batches.

    Args:
        num_rows: of the global batch.
        size: rows of a micro-batch, over all pipelines; the last one may have fewer.
        instead: what to do about a loss that cannot be computed for each of them alone.
    """

    num_rows: int
    size: int
    instead: str = "use --pipeline_schedule=gpipe"

    def __len__(self) -> int:
        return -(-self.num_rows // self.size)

    def rows(self, number: int) -> slice:
        """Returns the rows of one of them."""
        return slice(number * self.size, min((number + 1) * self.size, self.num_rows))

    def num_rows_of(self, number: int) -> int:
        """Returns how many rows one of them has."""
        rows = self.rows(number)
        return rows.stop - rows.start

    def share_of_rows(self, number: int) -> float:
        """Returns the share of the batch's rows that one of them has."""
        return self.num_rows_of(number) / self.num_rows

    def shares(self, model: keras.Model, *, is_weighted: bool) -> list[float]:
        """Returns the weight of each micro-batch's loss in that of the global batch.

        Args:
            model: compiled, and its losses built.
            is_weighted: whether the samples have weights.

        Raises:
            UserError: if the loss of the global batch is not a sum over the micro-batches.
        """
        counts = [self.num_rows_of(number) for number in range(len(self))]
        return shares_of(model, counts, is_weighted=is_weighted, instead=self.instead)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is trained as a pipeline.

    Args:
        model: functional.
        stages: of the model.
        size: rows of a micro-batch, over all pipelines.
        num_pipelines: that share a micro-batch.
        num_devices: of all of them together.
        schedule: as `pipeline_schedule` of `kerasdp.Config`.
        is_whole_model: whether the only stage is the model, for `Config.accumulate`.
    """

    model: keras.Model
    stages: list[Stage]
    size: int
    num_pipelines: int
    num_devices: int
    schedule: str
    is_whole_model: bool = False

    def micro_batches(self, num_rows: int) -> MicroBatches:
        """Of a global batch of `num_rows` rows."""
        choice = {"instead": "leave out --accumulate"} if self.is_whole_model else {}
        return MicroBatches(num_rows=num_rows, size=self.size, **choice)

    def inputs(self, inputs: Any) -> list[Any]:
        """Returns the inputs of the first stage, in its order, from what `fit` takes."""
        structure = inputs_structure(self.model)
        if isinstance(inputs, dict) and isinstance(structure, dict):
            inputs = {name: inputs[name] for name in structure}
        elif isinstance(inputs, dict):
            inputs = [inputs[tensor.name] for tensor in self.model.inputs]
        return keras.tree.flatten(inputs)

    def outputs(self, outputs: list[Any]) -> Any:
        """Returns what the model returns, from what the last stage returns."""
        packed = keras.tree.pack_sequence_as(outputs_structure(self.model), outputs)
        return packed[0] if isinstance(packed, (list, tuple)) and len(packed) == 1 else packed  # as Keras does

    def schedule_for(self, num_micro_batches: int) -> str:
        """Returns the schedule, or `"gpipe"` for a smaller last batch, which may have too few micro-batches for it.

        The two compute the same, and differ in the memory that they need.
        """
        return self.schedule if num_micro_batches >= len(self.stages) else "gpipe"

    def __str__(self) -> str:
        if self.is_whole_model:
            return f"gradients are summed over micro-batches of {self.size} samples"
        pipelines = f" in {self.num_pipelines} pipelines" if self.num_pipelines > 1 else ""
        lines = [
            table(self.stages),
            imbalance(self.stages),
            f"micro-batches of {self.size}{pipelines}, {self.schedule}",
        ]
        return "\n".join(filter(None, lines))


def make_plan(
    model: keras.Model,
    config: Config,
    num_devices: int,
    broadcast_from_rank0: Callable[[list[float]], list[float]],
    measuring: MeasuringDevice = HERE,
) -> Plan:
    """Cuts a built model as a run's choices say.

    Args:
        model: functional.
        config: of the run.
        num_devices: of the run.
        broadcast_from_rank0: gives all ranks the costs that rank 0 measured.
        measuring: the device on which it measures them.

    Raises:
        UserError: if that cannot be done.
    """
    user = "--accumulate" if config.accumulate > 1 else "a pipeline"
    _check(model, user)
    refuse_next_values(model, user, "use --strategy=data without --accumulate")
    num_stages, num_pipelines = config.stages_on(num_devices), config.num_pipelines(num_devices)
    if config.split_size == "auto":  # until it is found, by `find_size`
        config = dataclasses.replace(config, split_size=None)
    size = config.micro_batch_size(num_stages, num_pipelines)
    _check_sizes(config, num_stages, num_pipelines, num_devices, size)
    inner = inner_optimizer(getattr(model, "optimizer", None))
    if config.backend != "tensorflow" and inner and inner.global_clipnorm and inner.gradient_accumulation_steps:
        raise UserError(
            f"{user} clips the gradients of each step, and would not clip what gradient_accumulation_steps has "
            "accumulated; use a larger --batch_size instead, or clipnorm"
        )
    cut_at = None if config.cut_at is None else [name.strip() for name in config.cut_at.split(",")]
    balance = config.balance if num_stages > 1 else "parameters"  # nothing to balance, nothing to measure
    stages = split(
        model,
        num_stages,
        cut_at=cut_at,
        balance=balance,
        batch_size=min(size, 32),
        broadcast_from_rank0=broadcast_from_rank0,
        measuring=measuring,
    )
    if any(has_mask(tensor) for tensor in stages[-1].model.outputs):
        raise UserError(f"{user}: the outputs of {model.name} carry a mask, which its micro-batches would lose")
    return Plan(
        model=functional(model),
        stages=stages,
        size=size * num_pipelines,
        num_pipelines=num_pipelines,
        num_devices=num_devices,
        # Backward passes as soon as possible: with one stage, no more than one micro-batch is in memory.
        schedule="1f1b" if config.accumulate > 1 else config.pipeline_schedule,
        is_whole_model=config.accumulate > 1,
    )


def with_rows(plan: Plan, config: Config, num_rows: int) -> Plan:
    """Returns the plan for batches of `num_rows` rows, whatever `config.batch_size` is.

    Args:
        config: its `split_size` is not `"auto"`.

    Raises:
        UserError: if they cannot be cut into micro-batches as the configuration says.
    """
    config = dataclasses.replace(config, num_devices=None, batch_size=num_rows)
    config.check_replicas(plan.num_pipelines)
    num_stages = len(plan.stages)
    size = config.micro_batch_size(num_stages, plan.num_pipelines)
    _check_sizes(config, num_stages, plan.num_pipelines, plan.num_devices, size)
    return dataclasses.replace(plan, size=size * plan.num_pipelines)


def find_size(pipeline: Any, batch: Any, report: Callable[[str], None]) -> None:
    """Finds the size of micro-batches with which a step is fastest, and sets it.

    Tried are 1, 2, 4 ... 32 micro-batches, and the numbers between the best one and its neighbours.

    Args:
        pipeline: an engine, which can say how long the forward and backward passes of a batch take, and leaves
            everything as it was.
        batch: one of those to train on.
        report: called with what was tried.
    """
    num_rows = -(-len(batch.indices) // pipeline.plan.num_pipelines)
    seconds: dict[int, float] = {}

    def try_counts(counts: list[int]) -> int:
        for size in dict.fromkeys(-(-num_rows // count) for count in counts if 0 < count <= num_rows):
            if size not in seconds:
                pipeline.plan = dataclasses.replace(pipeline.plan, size=size * pipeline.plan.num_pipelines)
                measured = [pipeline.seconds_without_update(batch) for _ in range(4)][1:]  # the first one compiles
                (seconds[size],) = pipeline.processes.broadcast_from_rank0([statistics.median(measured)])
        return min(seconds, key=lambda size: seconds[size])

    count = -(-num_rows // try_counts([1, 2, 4, 8, 16, 32]))
    best = try_counts([count * 3 // 4, count * 3 // 2])
    pipeline.plan = dataclasses.replace(pipeline.plan, size=best * pipeline.plan.num_pipelines)
    tried = ", ".join(f"{size}: {1000 * time:.0f} ms" for size, time in sorted(seconds.items()))
    report(f"split size {best} is the fastest; tried {tried} a step without its update")


def _check_sizes(config: Config, num_stages: int, num_pipelines: int, num_devices: int, size: int) -> None:
    """Raises `UserError` if the batch cannot be cut as asked."""
    rows = config.replica_batch_size(num_pipelines)
    count = -(-rows // size)
    if config.split_size is not None and int(config.split_size) > rows:
        raise UserError(f"--split_size: expected at most {rows}, a pipeline's samples. Received: {config.split_size}")
    if config.micro_batches not in (None, count):
        raise UserError(
            f"--micro_batches: {rows} samples cannot be cut into {config.micro_batches} of one size, but for the last; "
            "give --split_size, the samples of each"
        )
    if config.pipeline_schedule != "gpipe" and count < num_stages:
        raise UserError(
            f"--pipeline_schedule={config.pipeline_schedule}: expected at least {num_stages} micro-batches, one per "
            f"stage. Received: {count}; give a smaller --split_size, or use gpipe"
        )
    rounds = max(1, count // num_devices)
    if config.pipeline_schedule == "interleaved1f1b" and count % rounds:
        raise UserError(
            f"--pipeline_schedule=interleaved1f1b: expected a multiple of {rounds} micro-batches. Received: {count}; "
            "give another --split_size"
        )


def _check(model: keras.Model, user: str) -> None:
    for tensor in functional(model, user).inputs:
        if None in tensor.shape[1:]:
            raise UserError(
                f"{user}: expected inputs of known shape. Received: {tensor.name} with {tuple(tensor.shape)}; give "
                "keras.Input all sizes but that of the batch"
            )
    names = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
    own = [name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)]
    if own:
        raise UserError(
            f"{user} calls the layers of a model directly, and so never calls the {own[0]} of "
            f"{type(model).__name__}; {'use --strategy=data' if user == 'a pipeline' else 'leave it out'}"
        )


def actions(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> list[tuple[str, int]]:
    """Returns what a stage does in a step, in order: `("forward", number of the micro-batch)` or `("backward", ...)`.

    GPipe: Huang et al. 2019 (arXiv:1811.06965). 1F1B, here with a flush after each step: Narayanan et al. 2019
    (PipeDream, doi:10.1145/3341301.3359646); it keeps at most as many micro-batches in memory as there are stages.
    """
    forwards = [("forward", number) for number in range(num_micro_batches)]
    backwards = [("backward", number) for number in range(num_micro_batches)]
    if schedule == "gpipe":
        return forwards + backwards
    ahead = min(num_stages - 1 - stage, num_micro_batches)
    steady = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return forwards[:ahead] + steady + backwards[num_micro_batches - ahead :]
