"""Lends models the step functions of a run, for Keras' `fit`, `evaluate` and `predict`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from kerasdp.backends.base import StepFunctions, Strategy
from kerasdp.keras_compat import made_by_compile, same_on_all_backends
from kerasdp.runtime.model_cache import ModelCache
from kerasdp.runtime.run_state import RunState


class ModelSteps:
    """The step functions of the models of a run, made once for each compiled model."""

    def __init__(self, strategy: Strategy, state: RunState):
        """`strategy` makes the functions, which tell `state` of each training step."""
        self._strategy, self._state = strategy, state
        self._functions: ModelCache[tuple[tuple[Any, ...], StepFunctions]] = ModelCache()

    @contextlib.contextmanager
    def running(self, model: keras.Model, *names: str) -> Iterator[None]:
        """Gives the model this run's step functions, and takes them back, so that it is a plain Keras model afterwards.

        `names`: which of `train`, `test` and `predict`; the others stay Keras' own, for callbacks that use them.
        """
        functions = self._functions_of(model)
        kept = {name: getattr(model, f"{name}_function") for name in names}
        for name in names:
            setattr(model, f"{name}_function", getattr(functions, name))
        try:
            with self._strategy.running(model), same_on_all_backends():
                yield
        finally:
            for name, function in kept.items():
                setattr(model, f"{name}_function", function)

    def _functions_of(self, model: keras.Model) -> StepFunctions:
        # A model that is compiled again needs new functions; compiling makes new objects of all of these.
        stages = self._strategy.stages
        plan = None if stages is None else stages.engine_of(model).plan
        optimizer = getattr(model, "optimizer", None)
        is_built = bool(getattr(optimizer, "built", False))  # not by `predict` alone, and it makes variables
        made_for = (optimizer, is_built, *made_by_compile(model), plan)
        known = self._functions.get(model)
        if known is None or any(old is not new for old, new in zip(known[0], made_for, strict=True)):
            known = made_for, self._strategy.step_functions(model, self._state)
            self._functions.put(model, known)
        return known[1]
