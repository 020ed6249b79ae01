"""Plans a pipeline: how model and batch are cut, and what is refused."""

import dataclasses
from typing import Any

import keras

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import has_mask
from kerasdp.keras_compat.models import inputs_structure, outputs_structure
from kerasdp.keras_compat.optimizers import inner_optimizer
from kerasdp.pipeline.partition import Stage, functional, imbalance, split, table
from kerasdp.portability.global_batch import shares_of
from kerasdp.portability.own_steps import refuse_next_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How a global batch is cut into micro-batches.

    Args:
        num_rows: of the global batch.
        size: rows of a micro-batch, over all pipelines; the last one may have fewer.
    """

    num_rows: int
    size: int

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

    def shares(self, model: keras.Model, *, is_weighted: bool) -> list[float] | None:
        """Returns the weight of each micro-batch's loss in the loss of the global batch.

        Args:
            model: compiled, and its losses built.
            is_weighted: whether the samples have weights.

        Returns:
            None if the loss of the global batch is no sum over the micro-batches.
        """
        counts = [self.num_rows_of(number) for number in range(len(self))]
        try:
            return shares_of(model, counts, is_weighted=is_weighted, instead="")
        except UserError:
            return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is trained as a pipeline.

    Args:
        model: functional.
        stages: of the model.
        size: rows of a micro-batch, over all pipelines.
        num_pipelines: that share a micro-batch.
    """

    model: keras.Model
    stages: list[Stage]
    size: int
    num_pipelines: int

    def micro_batches(self, num_rows: int) -> MicroBatches:
        """Of a global batch of `num_rows` rows."""
        return MicroBatches(num_rows=num_rows, size=self.size)

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

    def __str__(self) -> str:
        pipelines = f" in {self.num_pipelines} pipelines" if self.num_pipelines > 1 else ""
        lines = [
            table(self.stages),
            imbalance(self.stages),
            f"micro-batches of {self.size}{pipelines}",
        ]
        return "\n".join(filter(None, lines))


def make_plan(model: keras.Model, config: Config, num_devices: int) -> Plan:
    """Cuts a built model as a run's choices say.

    Args:
        model: functional.
        config: of the run.
        num_devices: of the run.

    Raises:
        UserError: if that cannot be done.
    """
    _check(model)
    refuse_next_values(model, "a pipeline", "use --strategy=data")
    num_stages, num_pipelines = config.stages_on(num_devices), config.num_pipelines(num_devices)
    size = config.micro_batch_size(num_stages, num_pipelines)
    _check_sizes(config, num_pipelines)
    inner = inner_optimizer(getattr(model, "optimizer", None))
    if inner and inner.global_clipnorm and inner.gradient_accumulation_steps:
        raise UserError(
            "a pipeline clips the gradients of each step, and would not clip what gradient_accumulation_steps has "
            "accumulated; use a larger --batch_size instead, or clipnorm"
        )
    cut_at = None if config.cut_at is None else [name.strip() for name in config.cut_at.split(",")]
    stages = split(model, num_stages, cut_at=cut_at)
    if any(has_mask(tensor) for tensor in stages[-1].model.outputs):
        raise UserError(f"a pipeline: the outputs of {model.name} carry a mask, which its micro-batches would lose")
    return Plan(
        model=functional(model),
        stages=stages,
        size=size * num_pipelines,
        num_pipelines=num_pipelines,
    )


def with_rows(plan: Plan, config: Config, num_rows: int) -> Plan:
    """Returns the plan for batches of `num_rows` rows, whatever `config.batch_size` is.

    Raises:
        UserError: if they cannot be cut into micro-batches as the configuration says.
    """
    config = dataclasses.replace(config, num_devices=None, batch_size=num_rows)
    config.check_replicas(plan.num_pipelines)
    size = config.micro_batch_size(len(plan.stages), plan.num_pipelines)
    _check_sizes(config, plan.num_pipelines)
    return dataclasses.replace(plan, size=size * plan.num_pipelines)


def _check_sizes(config: Config, num_pipelines: int) -> None:
    """Raises `UserError` if the batch cannot be cut as asked."""
    rows = config.replica_batch_size(num_pipelines)
    if config.split_size is not None and config.split_size > rows:
        raise UserError(f"--split_size: expected at most {rows}, a pipeline's samples. Received: {config.split_size}")


def _check(model: keras.Model) -> None:
    for tensor in functional(model).inputs:
        if None in tensor.shape[1:]:
            raise UserError(
                f"a pipeline: expected inputs of known shape. Received: {tensor.name} with {tuple(tensor.shape)}; give "
                "keras.Input all sizes but that of the batch"
            )
    names = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
    own = [name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)]
    if own:
        raise UserError(
            f"a pipeline calls the layers of a model directly, and so never calls the {own[0]} of "
            f"{type(model).__name__}; use --strategy=data"
        )
