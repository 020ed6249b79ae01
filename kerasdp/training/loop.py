"""Runs the loop over epochs and batches: calls step functions and callbacks in the order of Keras' `fit`."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras.callbacks import CallbackList

from kerasdp.config import Config
from kerasdp.contract import DeviceBatch, StepFunctions, Strategy, Trained
from kerasdp.data.batch import Feed
from kerasdp.errors import ReplicasDifferError, UserError
from kerasdp.keras_compat.models import has_untold_loss, made_by_compile, own_steps, restored_epoch, set_training_mode
from kerasdp.keras_compat.numerics import same_on_all_backends
from kerasdp.keras_compat.optimizers import inner_optimizer
from kerasdp.processes import watchdog
from kerasdp.processes.watchdog import shapes_of
from kerasdp.reporting import report
from kerasdp.reporting.recorder import as_numbers
from kerasdp.run_state import Evaluated, ModelCache, RunState
from kerasdp.same.random import UNNAMED, portable_draws
from kerasdp.step.replica import DeviceScalar, all_variables, optimizers_of

Logs = dict[str, Any]


class Loop:
    """Trains, evaluates and predicts with one model, batch by batch.

    A test compares the callback events, their logs and the history with Keras' own methods
    (keras/src/backend/*/trainer.py).
    """

    def __init__(self, model: keras.Model, strategy: Strategy, state: RunState, functions: StepFunctions):
        """Sets up the loop.

        Args:
            model: the model.
            strategy: strategy of the run.
            state: state of the run. It contains the resume point, and counts the steps.
            functions: step functions of the model.
        """
        self.model, self.strategy, self.state, self.functions = model, strategy, state, functions
        self._compiled = model.compiled and (model.optimizer, *made_by_compile(model))
        self._is_state_checked = False

    def fit(
        self,
        feed: Feed,
        callbacks: CallbackList,
        epochs: range,
        validation: Feed | None,
        validation_freq: int | list[int],
    ) -> None:
        """Trains the epochs. Evaluates on `validation` after the epochs that `validation_freq` names, like Keras.

        Raises:
            UserError: if a callback compiles the model again, because the step functions would still use the old
                optimizer and losses.
        """
        model = self.model
        logs: Logs = {}
        model.stop_training = False
        callbacks.on_train_begin()
        for epoch in range(restored_epoch(model) or epochs.start, epochs.stop):
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            logs = self._train_epoch(feed, callbacks)
            self._check_state()
            if validation is not None and is_due(epoch, validation_freq):
                logs |= {f"val_{name}": value for name, value in self.evaluate(validation, callbacks).items()}
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        # With `use_ema`, averaged weights replace the trained weights.
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs.stop > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs)

    def _train_epoch(self, feed: Feed, callbacks: CallbackList) -> Logs:
        """Trains the batches of an epoch, and returns the Keras logs of the epoch.

        After a resume it trains only the remaining batches of the first epoch.
        """
        model, num_done = self.model, self.state.num_skipped
        logs = model.get_metrics_result() if num_done else {}
        set_training_mode(model, True)
        for batches in _calls(iter(feed), num_done, model.steps_per_execution):
            if self.state.is_at_last_step:  # a resumed run that had ended within this epoch
                model.stop_training = True
                self.state.after_batch(is_stopping=True)
                break
            callbacks.on_train_batch_begin(num_done)
            self._refuse_new_compile()
            logs = self._train(batches[: self.state.steps_left()])
            if not self._is_state_checked:
                self._check_state()
            num_done += len(batches)
            # Keras' number of a call's last step, also where the data ends before it.
            callbacks.on_train_batch_end(num_done - 1 + -num_done % model.steps_per_execution, logs)
            if model.stop_training:
                break
        else:
            self._warn_if_short(feed, num_done)
        set_training_mode(model, False)
        return self._epoch_logs(logs, "train_step")

    def _check_state(self) -> None:
        """Compares the non-trainable variables of the replicas, after the first step and after each epoch.

        Trainable weights need no check. Either there is only one copy of each weight, or all replicas update the weight
        with the same all-reduced sum.
        """
        self._is_state_checked = True
        if self.strategy.split.runs_on_shards:
            require_equal_replicas(self.model, self.strategy, state_only=True)

    def _train(self, batches: list[DeviceBatch]) -> Logs:
        """Trains on the batches of one call. Returns the Keras logs after the last batch.

        Runs all batches in one program if the step functions allow it.
        """
        state, functions = self.state, self.functions
        logs: Logs = {}
        several = functions.train_several if len(batches) > 1 and state.observer is None else None
        if several and len({shapes_of(batch) for batch in batches}) == 1:  # the one that ends an epoch may be smaller
            losses, rates, logs, _ = several(batches)
            for batch, loss, rate in zip(batches, *(DeviceScalar.each(each, len(batches)) for each in (losses, rates))):
                state.after_step(loss, batch.indices, {}, rate)
            return logs
        for batch in batches:
            loss, rate, logs, observed = functions.train(batch, state.detail)
            state.after_step(loss, batch.indices, observed, rate)
        return logs

    def evaluate(self, feed: Feed, callbacks: CallbackList) -> Logs:
        """Evaluates all batches. Returns the logs as floats."""
        model, number, logs = self.model, 0, {}
        losses: list[Any] = []  # of a user-defined step
        is_own = "test_step" in own_steps(model)
        set_training_mode(model, False)
        model.stop_evaluating = False
        callbacks.on_test_begin()
        model.reset_metrics()
        for batches in _calls(iter(feed), 0, model.steps_per_execution):
            callbacks.on_test_batch_begin(number)
            for batch in batches:
                logs = self.functions.test(batch)
                if is_own and "loss" in logs:
                    losses.append(logs["loss"])
            number += model.steps_per_execution
            callbacks.on_test_batch_end(number - 1, logs)
            if model.stop_evaluating:
                break
        logs = self._epoch_logs(logs, "test_step")
        if losses and logs.get("loss", 0) is None:
            logs["loss"] = np.mean([float(keras.ops.convert_to_numpy(loss)) for loss in losses])
        logs = as_numbers(logs)
        callbacks.on_test_end(logs)
        return logs

    def predict(self, feed: Feed, callbacks: CallbackList) -> Any:
        """Predicts all batches. Returns the outputs as arrays, in the same structure as the model's outputs."""
        model, outputs = self.model, []
        last: Any = None
        set_training_mode(model, False)
        model.stop_predicting = False
        callbacks.on_predict_begin()
        for number, batch in enumerate(feed):
            callbacks.on_predict_batch_begin(number)
            last, before = self.functions.predict(batch), last
            if number:  # copied while the device computes the next one
                outputs.append(keras.tree.map_structure(keras.ops.convert_to_numpy, before))
            callbacks.on_predict_batch_end(number, {"outputs": last})
            if model.stop_predicting:
                break
        outputs.append(keras.tree.map_structure(keras.ops.convert_to_numpy, last))
        callbacks.on_predict_end()
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)

    def _refuse_new_compile(self) -> None:
        now = self.model.compiled and (self.model.optimizer, *made_by_compile(self.model))
        if any(one is not other for one, other in zip(now, self._compiled)):
            raise UserError(f"{self.model.name} was compiled again during fit; call compile between two calls of fit")

    def _epoch_logs(self, logs: Logs, step: str) -> Logs:
        """Returns the metrics of the model after an epoch.

        A user-defined step may return logs whose names differ from the model's metrics. Then this method returns the
        logs of the last batch. The loss is None if the step updates no loss metric. The caller replaces None with the
        mean loss of the batches.
        """
        metrics = self.model.get_metrics_result()
        if metrics.keys() != logs.keys():
            return dict(logs)
        is_untold = "loss" in logs and step in own_steps(self.model) and has_untold_loss(self.model)
        return {**metrics, "loss": None} if is_untold else dict(metrics)

    def _warn_if_short(self, feed: Feed, num_done: int) -> None:
        if feed.num_batches is not None and num_done < feed.num_batches and self.strategy.processes.rank == 0:
            report.warn(
                f"epoch {self.state.epoch + 1}: expected {feed.num_batches} batches (steps_per_epoch). Received: only "
                f"{num_done}; add data, or repeat the data set"
            )


def _calls(batches: Iterator[DeviceBatch], num_done: int, per_call: int) -> Iterator[list[DeviceBatch]]:
    """Groups batches into lists of `per_call`, one list for each call of a step function.

    The last list of the data may be shorter. The first list of a resumed epoch may be shorter, too.
    """
    while taken := list(itertools.islice(batches, per_call - num_done % per_call)):
        yield taken
        num_done += len(taken)


def is_due(epoch: int, validation_freq: int | list[int]) -> bool:
    """Returns whether to evaluate after an epoch, counted from 0.

    `validation_freq` is an interval, or a list of epochs that count from 1.
    """
    if hasattr(validation_freq, "__contains__"):
        return epoch + 1 in validation_freq
    return (epoch + 1) % validation_freq == 0


def require_equal_replicas(model: keras.Model, strategy: Strategy, *, state_only: bool = False) -> None:
    """Raises `ReplicasDifferError` unless all replicas hold bit-equal values.

    If `state_only` is True, compares only non-trainable variables.
    """
    different = strategy.diverged_variables(model, state_only)
    if different:
        raise ReplicasDifferError(
            f"the replicas of {model.name} hold different values in {len(different)} variables, first in "
            f"{different[0]}: a layer, loss, callback or loop changed this variable on one device only, or computed it "
            "from the samples of one device; update the variable in the same way on all devices"
        )


class ModelSteps:
    """Makes the step functions of each compiled model once, and stores them for later calls."""

    def __init__(self, config: Config, strategy: Strategy, state: RunState):
        """Sets up an empty store.

        Args:
            config: configuration of the run.
            strategy: strategy that makes the step functions.
            state: state of the run, which counts the training steps.
        """
        self._strategy, self._state = strategy, state
        # Whether each process holds all weights. They are neither sharded nor on another process.
        self._has_weights = config.strategy == "data" and config.shard != "weights"
        # Calls of the runner's `fit`, `evaluate` and `predict` that have not returned.
        self.num_running = 0
        self._functions: ModelCache[tuple[tuple[Any, ...], StepFunctions]] = ModelCache()

    @contextlib.contextmanager
    def running(self, model: keras.Model, evaluated: Evaluated | None = None) -> Iterator[StepFunctions]:
        """Yields the step functions of a model, in a context in which the caller may call them.

        `evaluated` describes the data for `test` or `predict`; None if there is no such data.
        """
        functions = self._functions_of(model)
        self._state.description = functions.description
        self.num_running += 1
        evaluated, self._state.evaluated = self._state.evaluated, evaluated
        try:
            # User-defined initializers draw portable values where models are made; layers name those that do.
            with self._strategy.running(model), same_on_all_backends(), portable_draws(UNNAMED):
                yield functions
        finally:
            self.num_running -= 1
            self._state.evaluated = evaluated

    def _functions_of(self, model: keras.Model) -> StepFunctions:
        # A model that is compiled again needs new functions. `compile` makes new objects of all of these. `quantize`,
        # `enable_lora` and the building of a metric add or remove variables without `compile`.
        made_for = (getattr(model, "optimizer", None), *made_by_compile(model), *all_variables(model))
        known = self._functions.get(model)
        if known is None or list(map(id, known[0])) != list(map(id, made_for)):
            functions = self._strategy.step_functions(model, self._state)
            if self._has_weights and self._strategy.processes.rank == 0:
                functions = _warning_of_unchanged_weights(model, functions)
            mark = watchdog.current.step_function
            marked: dict[str, Any] = {name: mark(each) for name, each in vars(functions).items() if callable(each)}
            known = made_for, dataclasses.replace(functions, **marked)
            self._functions.put(model, known)
        return known[1]


# A weight has to change within so many steps. After the first step only the smallest weights are compared.
_FEW_STEPS, _FEW_WEIGHTS = 4, 8


def _warning_of_unchanged_weights(model: keras.Model, functions: StepFunctions) -> StepFunctions:
    """Wraps the training functions, so that they warn once if the first steps change no weight.

    Does not wrap the functions of a model without an optimizer. After the first step, compares only a few small
    weights. If these weights are unchanged, compares all weights after some more steps. This second comparison includes
    batch-norm statistics, and the loss scale, which changes after an overflow. It excludes seed states.
    """
    if not optimizers_of(model):
        return functions
    look = _looks_at_weights(model)

    def looking(function: Callable[..., Trained]) -> Callable[..., Trained]:
        def train(*args: Any) -> Trained:
            next(look, None)  # once for several steps of one call, too
            return function(*args)

        return train

    several = functions.train_several
    return dataclasses.replace(
        functions,
        train=looking(functions.train),
        train_several=several and looking(several),
    )


def _looks_at_weights(model: keras.Model) -> Iterator[None]:
    """Checks that the first steps change a weight. The caller calls `next` before each step.

    Ends as soon as a weight has changed. If no weight has changed after the last of these steps, prints a warning.
    """
    optimizers = optimizers_of(model)
    num_steps = max(_FEW_STEPS, *(1 + (inner_optimizer(each).gradient_accumulation_steps or 1) for each in optimizers))
    weights = sorted(model.trainable_weights, key=lambda weight: math.prod(weight.shape))[:_FEW_WEIGHTS]
    for count in (1, num_steps - 1):
        before = _values_of(weights)
        for _ in range(count):
            yield
        if any((new != old).any() for new, old in zip(_values_of(weights), before, strict=True)):
            return
        if not all(float(keras.ops.convert_to_numpy(optimizer.learning_rate)) for optimizer in optimizers):
            return
        scales = [getattr(optimizer, "dynamic_scale", None) for optimizer in optimizers]
        found = [each for each in (*model.weights, *scales) if each is not None]
        weights = [weight for weight in found if weight.name != "seed_generator_state"]
    if weights:
        reason = "check that the step applies its gradients, and that the loss depends on the weights"
        if not model.trainable_weights:
            reason = "all weights are frozen; to train a layer, set its trainable attribute to True"
        report.warn(f"{model.name}: no weight has changed in the first {num_steps} steps; {reason}")


def _values_of(variables: list[keras.Variable]) -> list[np.ndarray]:
    # Copies, since the next value reuses the memory. TensorFlow (2.21) cannot convert a bfloat16 scalar to an array.
    return [
        np.array(keras.ops.convert_to_numpy(keras.ops.cast(each, "float32") if "float16" in each.dtype else each))
        for each in variables
    ]
