"""Lets `model.fit`, `model.evaluate` and `model.predict` mean the runner's, and honours models that override them."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import keras

from kerasdp.backends.base import Strategy
from kerasdp.errors import UserError
from kerasdp.keras_compat.models import methods_through
from kerasdp.runtime.heartbeat import Heartbeat
from kerasdp.training.call_arguments import described
from kerasdp.training.model_steps import ModelSteps
from kerasdp.training.preprocessing import has_preprocessing, preprocessed

Method = TypeVar("Method", bound=Callable[..., Any])


class CalledRunner(Protocol):
    """What is used of a `kerasdp.Runner`, whose `fit`, `evaluate` and `predict` are looked up by name.

    Attributes:
        strategy: how the devices share the work.
        steps: know whether one of its methods runs.
        heartbeat: lets all ranks begin a call together.
        num_model_calls: calls of models' own methods that came to the runner.
    """

    strategy: Strategy
    steps: ModelSteps
    heartbeat: Heartbeat
    num_model_calls: int


def through_model(method: Method) -> Method:
    """Makes a method of `Runner` call the model's own method of that name, if its class overrides that of Keras.

    Such a method hands changed arguments (more callbacks, say) to `super()`, which is the runner's again: see
    `model_calls_through`. One that preprocesses data (`kerasdp.training.preprocessing`) is not called, but its
    preprocessing, on all data at once.
    """
    name, signature, method = method.__name__, inspect.signature(method), _on_all_ranks(method)

    @functools.wraps(method)
    def call(runner: CalledRunner, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        _, _, *names = signature.parameters
        bound = signature.bind(runner, model, *args, **kwargs).arguments
        given = {name: bound[name] for name in names if name in bound}
        if has_preprocessing(model, name):
            found = preprocessed(model, given, runner.strategy.processes)
            # What a language model predicts is made of its inputs: `predict` has no use for it.
            return method(runner, model, **{name: value for name, value in found.items() if name in names})
        own = _own_method(model, name)
        if own is None:
            return method(runner, model, **given)
        num_model_calls = runner.num_model_calls
        try:
            result = own(model, **given)
        except NotImplementedError as error:  # what KerasHub's tasks for inference say
            raise UserError(f"{type(model).__name__}.{name}: {error}") from error
        if runner.num_model_calls == num_model_calls:
            raise UserError(f"{type(model).__name__} has a {name} of its own, which does not call super().{name}")
        return result

    return cast(Method, call)


def _on_all_ranks(method: Method) -> Method:
    """Makes a method of `Runner` begin when all ranks have called it, with the same arguments."""
    name, signature = method.__name__, inspect.signature(method)

    @functools.wraps(method)
    def call(runner: CalledRunner, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        given = {}
        if runner.strategy.processes.num_processes > 1:
            _, _, *names = signature.parameters
            bound = signature.bind(runner, model, *args, **kwargs).arguments
            given = described(model, {name: bound[name] for name in names if name in bound})
        with runner.heartbeat.call(name, given):
            return method(runner, model, *args, **kwargs)

    return cast(Method, call)


def _own_method(model: keras.Model, name: str) -> Callable[..., Any] | None:
    """Returns a method of a class that extends Keras' model; None if the model has Keras' own."""
    kind = next(kind for kind in type(model).__mro__ if name in vars(kind))
    return None if issubclass(keras.Model, kind) else vars(kind)[name]


def model_calls_through(runner: CalledRunner) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which the methods of all models mean those of a runner.

    They would train on one device, or on each one by itself, with random numbers of the backend's, and nobody would
    notice. While the runner trains, those that a callback calls are Keras' own, but for `evaluate`.
    """
    names = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
    return methods_through({name: functools.partial(_through_runner, runner, name) for name in names})


def _through_runner(runner: CalledRunner, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what a method of all models is to be while a runner is there."""

    @functools.wraps(original)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if runner.steps.num_running and name != "evaluate":
            return original(model, *args, **kwargs)
        if name in ("train_on_batch", "test_on_batch"):
            raise UserError(f"expected runner.fit or runner.evaluate. Received: model.{name}, which uses one device")
        if hasattr(model, "preprocess_samples"):
            raise UserError(
                f"expected runner.{name}(model, ...). Received: model.{name} of a {type(model).__name__}, which cuts "
                "and preprocesses the data by itself"
            )
        if name == "predict_on_batch":
            (x,) = inspect.signature(original).bind(model, *args, **kwargs).args[1:]
            return vars(type(runner))["predict"](runner, model, x, batch_size=len(keras.tree.flatten(x)[0]))
        runner.num_model_calls += 1
        # Not the one of `through_model`: this may be the `super()` of a model's own method.
        return getattr(type(runner), name).__wrapped__(runner, model, *args, **kwargs)

    return call
