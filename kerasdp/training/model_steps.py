"""Keeps the step functions of the models of a run."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kerasdp.backends.base import DeviceBatch, StepFunctions, Strategy, Trained
from kerasdp.backends.steps import TrainedWeights
from kerasdp.errors import UserError
from kerasdp.keras_compat.models import made_by_compile
from kerasdp.keras_compat.numerics import same_on_all_backends
from kerasdp.portability.random import UNNAMED, portable_draws
from kerasdp.runtime.heartbeat import Heartbeat
from kerasdp.runtime.model_cache import ModelCache
from kerasdp.runtime.run_state import Detail, Evaluated, RunState


class ModelSteps:
    """The step functions of the models of a run, made once for each compiled model."""

    def __init__(self, strategy: Strategy, state: RunState, heartbeat: Heartbeat):
        """`strategy` makes the functions, which tell `state` of each training step; their calls are marked."""
        self._strategy, self._state, self._heartbeat = strategy, state, heartbeat
        # Calls of the runner's `fit`, `evaluate` and `predict` that have not returned.
        self.num_running = 0
        self._functions: ModelCache[tuple[tuple[Any, ...], StepFunctions]] = ModelCache()

    @contextlib.contextmanager
    def running(self, model: keras.Model, evaluated: Evaluated | None = None) -> Iterator[StepFunctions]:
        """Yields the step functions of a model, in the context in which they may be called.

        `evaluated`: what `test` or `predict` get; None: nothing.
        """
        functions = self._functions_of(model)
        self.num_running += 1
        evaluated, self._state.evaluated = self._state.evaluated, evaluated
        try:
            # Where models are made, user-defined initializers draw portably; layers say which of them do.
            with self._strategy.running(model), same_on_all_backends(), portable_draws(UNNAMED):
                yield functions
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
        def mark(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return self._heartbeat.step_function(name, function, lambda: self._state.step)

        several = functions.train_several
        return StepFunctions(
            train=mark("train", functions.train),
            test=mark("test", functions.test),
            predict=mark("predict", functions.predict),
            train_several=several and mark("train", several),
        )


def _training_the_same_weights(model: keras.Model, functions: StepFunctions) -> StepFunctions:
    """Refuses to train once other layers are frozen: what trains in stages is made for those of `compile`."""
    weights = TrainedWeights(model)
    key = weights.key()

    def train(batch: DeviceBatch, detail: Detail) -> Trained:
        if weights.key() != key:
            raise UserError(
                f"{model.name} has layers that were frozen or unfrozen since it was compiled, which a pipeline or "
                "accumulation cannot heed: call model.compile again"
            )
        return functions.train(batch, detail)

    return dataclasses.replace(functions, train=train)
