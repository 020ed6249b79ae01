"""One module a backend, with the same names in each: `count_gpus`, `start`, and the class `Replicas`.

`Replicas` is the whole of what differs between the backends in a worker; `kerasdp.runner.Runner` is the same for all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from kerasdp.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFunctions:
    """What Keras' trainer calls for each batch, in place of the functions that it would make itself.

    Their arguments are those of the backend's trainer (keras/src/backend/*/trainer.py).
    """

    train: Callable[..., Any]
    test: Callable[..., Any]
    predict: Callable[..., Any]


@dataclasses.dataclass(kw_only=True)
class Hooks:
    """What the step functions tell of training steps, and to whom. Asked anew in each step.

    Args:
        on_step: called behind each step with the loss of its global batch, a scalar tensor, and the number of its rows.
        observer: is told more of each step, if there is one.
        batch_size: rows of a full batch of this run.
        num_steps: that the run trains from its first to its last, if that is known.
        passed_over_logs: what Keras is told of a batch that a resumed run passes over (`kerasdp.data.feed`).
    """

    on_step: Callable[[Any, int], None] = lambda loss, num_rows: None
    observer: Any = None
    batch_size: int | None = None
    num_steps: int | None = None
    passed_over_logs: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def detail(self) -> Any:
        """How much the observer wants to see of the next step."""
        from kerasdp.observation import Detail

        return Detail.NOTHING if self.observer is None else self.observer.detail

    def after_step(self, loss: Any, indices: Any, seen: dict[str, Any]) -> None:
        """Tells of a step: its loss, the places of its rows in the data set, and what `observed` gave."""
        if self.observer is not None:
            self.observer.on_step(loss, indices, seen)
        self.on_step(loss, indices.shape[0])


class PlacedBatch(NamedTuple):
    """A `kerasdp.data.feed.Batch` on this process's devices: what the step functions get."""

    inputs: Any
    targets: Any
    sample_weight: Any
    indices: Any


class WholeModel:
    """What `Replicas` answer when each of them holds the whole model."""

    def engine_of(self, model: Any) -> Any:
        """What trains the model in stages: nothing."""
        return None

    def description(self, model: Any) -> str:
        """What there is to say of how the work is shared."""
        return ""

    def tune(self, model: Any, first_batch: Callable[[], Any], report: Callable[[str], None]) -> None:
        """Finds what is to be found by trying."""

    def rows_at_once(self, model: Any) -> int | None:
        """Rows that a layer sees at once, if those are neither the global batch nor a replica's part of it."""
        return None

    def collect(self, model: Any) -> None:
        """Gives each process the values of all variables."""


def placed(batch: Any) -> PlacedBatch:
    """The batch, if it comes from a feed.

    Raises:
        UserError: if it is one of Keras' own, from `model.evaluate` in a callback of a running `fit`.
    """
    if not isinstance(batch, PlacedBatch):
        raise UserError(
            "while runner.fit runs, use runner.evaluate in callbacks: model.evaluate has no place for its data"
        )
    return batch


def own_steps(model: Any, num_replicas: int) -> set[str]:
    """Which of train_step, test_step and predict_step the model's class overrides.

    Raises:
        UserError: if there are any, and several replicas each of which would see its part of the batch alone.
    """
    import keras

    names = ("train_step", "test_step", "predict_step")
    found = {name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)}
    if found and num_replicas > 1:
        raise UserError(
            f"{type(model).__name__} has a {sorted(found)[-1]} of its own, which sees only one device's part of the "
            "batch; override compute_loss or compute_metrics instead, or train on one device"
        )
    return found


def all_variables(model: Any) -> list[Any]:
    """The variables of a model, its metrics and its optimizer."""
    optimizer = getattr(model, "optimizer", None)  # there is none before `compile`
    return [*model.variables, *model.metrics_variables, *(optimizer.variables if optimizer is not None else [])]
