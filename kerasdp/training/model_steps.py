"""Lends models the step functions of a run, for Keras' `fit`, `evaluate` and `predict`."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from kerasdp.backends.base import StepFunctions, Strategy
from kerasdp.backends.steps import TrainedWeights
from kerasdp.errors import UserError
from kerasdp.keras_compat.models import building_nothing, lent_functions, made_by_compile
from kerasdp.keras_compat.numerics import same_on_all_backends
from kerasdp.portability.random import UNNAMED, portable_draws
from kerasdp.runtime.heartbeat import Heartbeat
from kerasdp.runtime.model_cache import ModelCache
from kerasdp.runtime.run_state import Evaluated, RunState


class ModelSteps:
    """The step functions of the models of a run, made once for each compiled model."""

    def __init__(self, strategy: Strategy, state: RunState, heartbeat: Heartbeat):
        """`strategy` makes the functions, which tell `state` of each training step; their calls are marked."""
        # Calls of Keras' `fit`, `evaluate` and `predict` that have not returned.
        self._strategy, self._state, self._heartbeat = strategy, state, heartbeat
        self.num_running = 0
        self._functions: ModelCache[tuple[tuple[Any, ...], StepFunctions]] = ModelCache()

    @contextlib.contextmanager
    def running(self, model: keras.Model, *names: str, evaluated: Evaluated | None = None) -> Iterator[None]:
        """Gives the model this run's step functions, and takes them back, so that it is a plain Keras model afterwards.

        Args:
            model: of which they are the steps.
            names: which of `train`, `test` and `predict`; the others stay Keras' own, for callbacks that use them.
            evaluated: what `test` or `predict` get; None: nothing.
        """
        functions = self._functions_of(model)
        self.num_running += 1
        evaluated, self._state.evaluated = self._state.evaluated, evaluated
        try:
            # Where models are made, user-defined initializers draw portably; layers say which of them do.
            with (
                lent_functions(model, {name: getattr(functions, name) for name in names}),
                self._strategy.running(model),
                same_on_all_backends(),
                building_nothing(model),
                portable_draws(UNNAMED),
            ):
                yield
        finally:
            self.num_running -= 1
            self._state.evaluated = evaluated

    def _functions_of(self, model: keras.Model) -> StepFunctions:
        # A model that is compiled again needs new functions; compiling makes new objects of all of these.
        stages = self._strategy.stages
        plan = None if stages is None else stages.engine_of(model).plan
        optimizer = getattr(model, "optimizer", None)
        is_built = bool(getattr(optimizer, "built", False))  # not by `predict` alone, and it makes variables
        # Variables come and go without a `compile`, too: `quantize`, `enable_lora`.
        made_for = (optimizer, is_built, *made_by_compile(model), plan, *model.variables)
        known = self._functions.get(model)
        if known is None or list(map(id, known[0])) != list(map(id, made_for)):
            functions = self._strategy.step_functions(model, self._state)
            functions = functions if stages is None else _training_the_same_weights(model, functions)
            known = made_for, self._marked(functions)
            self._functions.put(model, known)
        return known[1]

    def _marked(self, functions: StepFunctions) -> StepFunctions:
        names = [field.name for field in dataclasses.fields(functions)]
        mark = self._heartbeat.step_function
        return StepFunctions(**{name: mark(name, getattr(functions, name), lambda: self._state.step) for name in names})


def _training_the_same_weights(model: keras.Model, functions: StepFunctions) -> StepFunctions:
    """Refuses to train once other layers are frozen: what trains in stages is made for those of `compile`."""
    weights = TrainedWeights(model)
    key = weights.key()

    def train(*args: Any) -> Any:
        if weights.key() != key:
            raise UserError(
                f"{model.name} has layers that were frozen or unfrozen since it was compiled, which a pipeline or "
                "accumulation cannot heed: call model.compile again"
            )
        return functions.train(*args)

    return dataclasses.replace(functions, train=train)
