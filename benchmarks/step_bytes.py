"""Computes what the devices of a data-parallel step exchange, from a built model: what scaling_model.py starts from."""

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kerasdp.config import Config
from kerasdp.keras_compat.models import compiled_variables
from kerasdp.same.portable import batch_norms
from kerasdp.sharding import bytes_of
from kerasdp.step.global_batch import reasons_to_gather_for_loss, reasons_to_gather_for_metrics
from kerasdp.training.prepare import bytes_of_row

if TYPE_CHECKING:
    import keras


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
    """

    gradients: int
    metrics: int = 0
    statistics: int = 0
    gathered: int = 0
    num_gatherings: int = 0
    outputs: int = 0


def _numbers_in(variables: Iterable[Any]) -> int:
    return sum(math.prod(variable.shape) for variable in variables)


def step_bytes(model: "keras.Model", config: Config, num_replicas: int) -> StepBytes:
    """Computes what the devices of a data-parallel run exchange in a training step, from the built model.

    The sizes are the sizes of the tensors that the engines hand to collectives. The algorithm says how often these are
    sent. A ring sends 2 (N - 1) / N times the bytes of an all-reduce, and N - 1 times the bytes of an all-gather
    (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH",
    doi:10.1177/1094342005051521).

    Args:
        model: built and compiled, with the batch norm of the run.
        config: `backend`, `batch_norm`, `batch_size` and `accumulate` are read.
        num_replicas: of the run.
    """
    gradients = bytes_of(model.trainable_variables)
    size = 8 if config.precision == "float64" else 4
    outputs = 0
    if config.backend == "jax":
        # XLA sums the gradients of each micro-batch, and of a metric's mean only the total: it knows the count.
        gradients *= config.accumulate
        metrics = size * (1 + _numbers_in(each for each in metric_variables(model) if each.name != "count"))
    else:
        metrics = size * (1 + _numbers_in(metric_variables(model)))
        if reasons_to_gather_for_loss(model) or reasons_to_gather_for_metrics(model):
            # 0 where the model does not tell.
            outputs_of_row = bytes_of_row(getattr(model, "outputs", None) or [])
            metrics, outputs = 0, outputs_of_row * config.replica_batch_size(num_replicas)
    norms = [norm for norm in batch_norms(model) if norm.trainable]
    return StepBytes(
        gradients=gradients,
        metrics=metrics,
        outputs=outputs,
        **_of_batch_norms(norms, config, size),
    )


def _of_batch_norms(norms: list[Any], config: Config, size: int) -> dict[str, int]:
    channels = [math.prod(norm.moving_mean.shape) for norm in norms]
    if config.backend == "jax":
        if config.batch_norm == "replica":  # for the moving statistics
            return {"statistics": size * 2 * sum(channels)}
        # Two sums forward and four backward, of which some are those that the weights get.
        known = sum(count * (bool(norm.center) + bool(norm.scale)) for norm, count in zip(norms, channels))
        return {"statistics": size * (6 * sum(channels) - known)}
    if config.batch_norm == "replica":  # count, mean and squares, with the gradients
        return {"statistics": size * 3 * sum(channels)}
    # These forward, and two sums backward.
    return {"gathered": size * 5 * sum(channels), "num_gatherings": 2 * len(norms)}


def metric_variables(model: "keras.Model") -> list[Any]:
    """Returns the variables that replicas sum: of the losses of single outputs, and of the metrics of `compile`."""
    return [variable for variables in compiled_variables(model) for variable in variables]
