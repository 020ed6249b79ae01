"""Finds what a user-defined step uses of Keras, by running it once on a few samples, without an effect."""

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import keras

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import InnerScope, all_layers, raw_value
from kerasdp.keras_compat.numerics import same_on_all_backends
from kerasdp.keras_compat.optimizers import wrapped_apply
from kerasdp.keras_compat.patches import step_with
from kerasdp.portability.layer_calls import hook_layers
from kerasdp.portability.random import UNNAMED, portable_draws


@dataclasses.dataclass(kw_only=True)
class StepParts:
    """What a step uses.

    Attributes:
        layers: that it calls, without those that are called within them.
        optimizers: that it lets apply gradients, each with the weights.
        metrics: that it updates.
        variables: that it reads or assigns and that are in none of these.
    """

    layers: list[keras.layers.Layer]
    optimizers: list[tuple[keras.optimizers.Optimizer, list[keras.Variable]]]
    metrics: list[keras.metrics.Metric]
    variables: list[keras.Variable]


class _Recording(InnerScope):
    """Takes which variables are read or assigned, by their `id`, into `used`."""

    def __init__(self, used: dict[int, keras.Variable]):
        super().__init__()
        self.used = used

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.used.setdefault(id(update[0]), update[0])
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        if raw_value(variable) is None:  # Keras makes it when the scope is left
            raise UserError(
                f"the step makes the variable {variable.path}: make variables, layers and metrics, and build them, "
                "before the step"
            )
        self.used.setdefault(id(variable), variable)
        return super().get_current_value(variable)


def find_parts(
    step: Callable[[Any], Any], data: Any, run_in_replicas: Callable[[Callable[[], None]], None], name: str = UNNAMED
) -> StepParts:
    """Runs a step, and returns what it uses; no variable changes, no optimizer updates or is built.

    Args:
        step: of a user.
        data: a few samples, as the step takes them, in NumPy.
        run_in_replicas: `trace` or `in_replicas` of a `kerasdp.backends.base.Strategy`.
        name: of what draws random numbers: see `portable_draws`.

    Raises:
        UserError: if the step makes a variable.
    """
    calls: dict[int, keras.layers.Layer] = {}
    applied: dict[int, tuple[Any, list[Any]]] = {}
    used: dict[int, keras.Variable] = {}

    def record(layer: keras.layers.Layer, outputs: Any) -> None:
        calls.setdefault(id(layer), layer)

    def apply(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        applied.setdefault(id(optimizer), (optimizer, list(trainable_variables or ())))

    def run() -> None:
        tensors = keras.tree.map_structure(
            lambda leaf: leaf if leaf is None else keras.ops.convert_to_tensor(leaf), data
        )
        with step_with(record=record), _Recording(used), portable_draws(name):
            step(tensors)

    hook_layers()
    with wrapped_apply(apply), same_on_all_backends():
        run_in_replicas(run)
    inner = {id(part) for layer in calls.values() for part in all_layers(layer, include_self=False)}
    layers = [layer for key, layer in calls.items() if key not in inner]
    optimizers = list(applied.values())
    metrics = [each for each in _living(keras.metrics.Metric) if any(id(own) in used for own in each.variables)]
    known = {
        id(variable) for part in (*layers, *metrics, *(one for one, _ in optimizers)) for variable in part.variables
    }
    variables = [variable for key, variable in used.items() if key not in known]
    return StepParts(layers=layers, optimizers=optimizers, metrics=metrics, variables=variables)


def _living(kind: type) -> list[Any]:
    """Returns all objects of a class, in the order in which they were made: Keras (3.15) keeps no list."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
