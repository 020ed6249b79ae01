"""Provides steps and batches for custom training loops, which run on all devices.

A user-defined function becomes the `train_step` of a Keras model. The model contains the layers, metrics, optimizers
and variables that the function uses. So kerasdp checks and runs the function like a user-defined `train_step`
(`kerasdp.step.custom_steps`).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from kerasdp.contract import DeviceBatch, Strategy
from kerasdp.data.batch import Feed, Reader, batch_of
from kerasdp.data.sources import num_samples, take_rows
from kerasdp.errors import UserError
from kerasdp.keras_compat.models import as_keras_gives
from kerasdp.keras_compat.patches import current_step
from kerasdp.processes import watchdog
from kerasdp.processes.ranks import meet
from kerasdp.run_state import Detail, RunState
from kerasdp.same.portable import portable
from kerasdp.same.random import STEP
from kerasdp.same.replica_context import all_rows
from kerasdp.step.check import check_first_step
from kerasdp.step.custom_steps import StepParts, find_parts
from kerasdp.step.replica import variables_of_own_step
from kerasdp.step.row_search import NUM_ROWS, explaining_trial
from kerasdp.training.callbacks import RunCallbacks
from kerasdp.training.loop import require_equal_replicas
from kerasdp.training.model_calls import described
from kerasdp.training.prepare import find_rows
from kerasdp.training.readers import first_of

# Ways to combine a result of a step over the devices.
REDUCTIONS = ("mean", "sum", "rows", "same")


class LoopBatch(NamedTuple):
    """Holds a global batch that `Runner.batches` yields, as input of the functions that `Runner.step` makes.

    Attributes:
        epoch: index of the epoch, from 0, as in Keras callbacks. Printed lines count epochs from 1.
        number: index of the batch in the epoch, from 0.
        is_last: whether this is the last batch of the epoch; None if not known.
        num_rows: number of samples of the global batch.
        data: the batch on this process's devices.
        sample: a few samples of the data set, for checks.
    """

    epoch: int
    number: int
    is_last: bool | None
    num_rows: int
    data: DeviceBatch
    sample: "GivenRows"


class GivenRows:
    """Holds samples in memory. `find_rows` and the first-step check read the samples through `sample`."""

    def __init__(self, data: tuple[Any, Any, Any]):
        self.data = data

    def sample(self, num_rows: int) -> Any:
        """Returns `num_rows` rows. Repeats rows if there are fewer than `num_rows` rows."""
        return take_rows(self.data, np.resize(np.arange(num_samples(self.data)), num_rows))


# Samples that are read of each data set, for trials: as many as the check of the first step takes on 16 devices.
_MOST_SAMPLED = 64
# Key of a batch that is not `(x, y)` or `(x, y, sample_weight)`.
_GIVEN = "kerasdp: given"


class StepModel(keras.Model):
    """Wraps a user-defined function as the `train_step` of a model.

    The model contains the layers, metrics, optimizers and variables that the function uses.

    Attributes:
        title: name of the step, for messages.
        structure: structure of the latest traced result of the function, with None for each tensor.
    """

    structure: Any = None
    checks_results = True  # the first-step check compares the results, too

    def __init__(self, function: Callable[..., Any], parts: StepParts, returns: Any):
        """Wraps a function.

        Args:
            function: the user-defined function.
            parts: the layers, metrics, variables and optimizers that the function uses.
            returns: how results are combined over the devices; see `Runner.step`.
        """
        super().__init__(name=_name_of(function))
        self.function, self._returns, self.title = function, returns, f"the step {self.name}"
        self.parts = [*parts.layers, *parts.metrics, *parts.variables]
        self.optimizers = [optimizer for optimizer, _ in parts.optimizers]

    def train_step(self, data: Any) -> Any:
        """Calls the function. Combines the results declared as "sum" or "rows" over the devices.

        Means over rows and results of metrics are combined after this method has returned.
        """
        returned = _call(self.function, data)
        result = keras.tree.map_structure(_as_tensor, returned)
        declared = _declared(self._returns, result, self.name)
        joined = keras.tree.map_structure(functools.partial(_joined, self.name), result, declared)
        # JAX sorts the keys of dictionaries, and so does `keras.tree`, by what is installed.
        object.__setattr__(self, "structure", _as_ordered(returned, None))  # past Keras
        return {"result": keras.tree.flatten(joined)}


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__).strip("<>")


def _call(function: Callable[..., Any], data: Any) -> Any:
    if isinstance(data, dict) and data.keys() == {_GIVEN}:
        data = data[_GIVEN]
        return function() if data.keys() == {"nothing"} else function(data["batch"])
    return function(data)


def _declared(returns: Any, result: Any, name: str) -> Any:
    """Returns the reduction of each leaf of a result ("mean", "sum", "rows" or "same"), as `returns` declares."""
    if isinstance(returns, str):
        return keras.tree.map_structure(lambda leaf: returns, result)
    if isinstance(returns, dict) and isinstance(result, dict) and returns.keys() <= result.keys():
        return {key: _declared(returns.get(key, "mean"), value, name) for key, value in result.items()}
    if isinstance(returns, (tuple, list)) and isinstance(result, (tuple, list)) and len(returns) == len(result):
        return type(result)(_declared(one, value, name) for one, value in zip(returns, result))
    raise UserError(f"the step {name}: returns={returns!r} does not fit the result; pass one string or one per value")


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, (str, bytes)):
        raise UserError(f"a step: expected tensors as results. Received: {leaf!r:.100}; do not return text")
    # Tensors stay the same objects, so that results of metrics are recognized.
    return leaf if leaf is None or keras.ops.is_tensor(leaf) else keras.ops.convert_to_tensor(leaf)


def _joined(name: str, leaf: Any, reduction: str) -> Any:
    """Combines a leaf of a result over the devices.

    Means over rows and results of metrics are returned unchanged, and combined later.
    """
    if leaf is None:
        return None
    dtype, shape = keras.backend.standardize_dtype(leaf.dtype), tuple(leaf.shape)
    if reduction == "mean" and (shape or "float" not in dtype):
        raise UserError(
            f"the step {name}: expected a floating-point scalar, the mean over the samples. Received: {dtype} of shape "
            f"{shape}; for other results pass returns='same', 'sum' or 'rows'"
        )
    share = current_step().share
    if reduction == "mean" or share is None:
        return leaf
    if reduction == "rows":
        leaf = all_rows(leaf)
    elif reduction == "sum":
        (leaf,) = share.of_all([leaf])
    share.results.append((leaf, lambda: leaf))
    share.declared.append(leaf)
    return leaf


def _as_ordered(structure: Any, values: Any) -> Any:
    """Returns nested values with dictionary keys in the same order as in `structure`.

    If `values` is None, returns `structure` with None for each leaf.
    """
    if isinstance(structure, dict):
        return {key: _as_ordered(part, None if values is None else values[key]) for key, part in structure.items()}
    if type(structure) in (list, tuple):
        parts = [None] * len(structure) if values is None else values
        return type(structure)(_as_ordered(part, value) for part, value in zip(structure, parts))
    return values


class Step:
    """Runs a user-defined function on all devices, as one compiled program. `Runner.step` returns a `Step`."""

    def __init__(self, runner: Any, function: Callable[..., Any], returns: Any):
        """Sets up the step. See `Runner.step` for the arguments."""
        for reduction in keras.tree.flatten(returns):
            if reduction not in REDUCTIONS:
                raise UserError(f"returns: expected one of {', '.join(REDUCTIONS)}. Received: {reduction!r}")
        self._runner, self._function, self._returns = runner, function, returns
        self._model: StepModel | None = None
        self.__name__, self.__doc__ = _name_of(function), function.__doc__

    def __call__(self, batch: Any = None) -> Any:
        """Runs the function on a global batch. Returns the results, combined over the devices.

        Args:
            batch: a batch of `Runner.batches`, or a structure of arrays with the samples on axis 0. If it contains
                arrays, each process must pass the whole batch. None: the function takes no argument.
        """
        runner = self._runner
        if current_step().record is not None:
            raise UserError(f"the step {self.__name__} was called within a step; call its undecorated function instead")
        is_given = not isinstance(batch, LoopBatch)
        if is_given:
            batch = _given(batch, runner.strategy)
        if self._model is None:
            with watchdog.current.compiling():
                if is_given:
                    meet(runner.strategy.processes, self.__name__, {"batch": described(batch.sample.data)})
                self._model = self._made(batch.sample)
        if runner._loop is not None and (is_given or batch.sample is runner._loop.sample):
            runner._loop.take(self._model)
        # If the number of steps is not known, torch compiles them only with --compile=on.
        is_full = is_given and (runner._loop is not None or runner.config.compile != "auto")
        rows = runner.state.of_full_batch(batch.num_rows) if is_full else contextlib.nullcontext()
        with runner._model_steps.running(self._model) as functions, rows:
            leaves = functions.train(batch.data, Detail.NOTHING).logs["result"]
        structure = self._model.structure
        return _as_ordered(structure, keras.tree.pack_sequence_as(structure, leaves))

    def _made(self, reader: Any) -> StepModel:
        """Makes the model that runs the function on the devices.

        Finds the objects that the function uses, and builds the optimizers among them. Checks the first step.

        Raises:
            UserError: if the function cannot be used on these devices.
        """
        runner, config, strategy = self._runner, self._runner.config, self._runner.strategy
        if config.strategy != "data" or config.has_micro_batches:
            raise UserError(f"the step {self.__name__}: custom steps need --strategy=data, and no --accumulate")
        # One program for several processes. With one program each, --shard raises an error for custom steps anyway.
        is_one_program = strategy.split.is_one_program and strategy.processes.num_processes > 1
        if config.shard != "none" and is_one_program:
            raise UserError(
                f"the step {self.__name__}: with --shard={config.shard} on several machines, no process could read the "
                "weights after a custom loop; use fit with a custom train_step, or remove --shard"
            )
        sample = as_keras_gives(reader.sample(NUM_ROWS))
        with runner._continued_scope():
            traced = functools.partial(strategy.each_replica, is_traced=True)
            with explaining_trial(f"the step {self.__name__}", NUM_ROWS, is_split=False):
                parts = find_parts(lambda data: _call(self._function, data), sample, traced, STEP)
            for optimizer, weights in parts.optimizers:
                if not optimizer.built:
                    optimizer.build(weights)
            model = StepModel(self._function, parts, self._returns)
            portable(model, config.batch_norm)
            for transform in runner._transforms:
                transform(model)
        runner._made_before.refuse(model)
        with runner._model_steps.running(model):
            # Trials reset the metrics, but these may contain values of this loop or an earlier loop.
            kept = [(variable, keras.ops.convert_to_numpy(variable).copy()) for variable in model.metrics_variables]
            find_rows(model, reader, config, strategy, "train_step")
            check_first_step(model, config, strategy, reader)
            for variable, value in kept:
                variable.assign(value)
        return model


def _given(batch: Any, strategy: Strategy) -> LoopBatch:
    """Copies a batch of arrays to the devices. Returns the batch as a `LoopBatch`."""
    if batch is None:
        batch = {_GIVEN: {"nothing": np.zeros((strategy.split.num_replicas, 1), "float32")}}
    elif not (isinstance(batch, tuple) and len(batch) in (2, 3)):
        batch = {_GIVEN: {"batch": batch}}
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    data = keras.tree.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf), (x, y, sample_weight))
    own = batch_of(data, dataclasses.replace(strategy.split, micro_batch_rows=None))
    return LoopBatch(0, 0, None, len(own.indices), strategy.shard_batch(own), GivenRows(data))


# What a loop may save, by the arguments of `Runner.checkpoint`.
_SAVED: dict[str, tuple[Any, ...]] = {
    "models": (keras.layers.Layer,),
    "optimizers": (keras.optimizers.Optimizer,),
    "metrics": (keras.metrics.Metric,),
    "variables": (keras.Variable, keras.random.SeedGenerator),
}


class SavedParts(keras.Model):
    """Holds the objects that a custom loop saves, as attributes of a Keras model. See `Runner.checkpoint`."""

    # Attributes that the callbacks of a run read from a model in `fit`.
    loss, stop_training = None, False

    def __init__(self, **given: Any):
        """Stores the objects. The files of the run show the learning rate of the first optimizer.

        Raises:
            UserError: for an object that cannot be saved.
        """
        super().__init__(name="loop")
        parts = {name: _by_name(value) for name, value in given.items()}
        for name, kind in _SAVED.items():
            for part in parts[name].values():
                if not isinstance(part, kind):
                    words = " or ".join(each.__name__ for each in kind)
                    raise UserError(f"checkpoint, {name}: expected {words} objects. Received: {type(part).__name__}")
                if not getattr(part, "built", True):
                    raise UserError(
                        f"checkpoint, {name}: {part.name} is not built, so its variables are unknown; call its build "
                        "method before runner.checkpoint; for an optimizer, call optimizer.build(weights)"
                    )
        if not parts["optimizers"]:
            raise UserError("checkpoint, optimizers: expected at least one optimizer. Received: none; pass one")
        self.models, self.metrics_held, self.variables_held = parts["models"], parts["metrics"], parts["variables"]
        (_, self.optimizer), *others = parts["optimizers"].items()
        self.optimizers = dict(others)

    def require(self, step: StepModel) -> None:
        """Raises `UserError` if a step uses a variable that the loop would not save."""
        known = {id(variable) for variable in variables_of_own_step(self)}
        for variable in variables_of_own_step(step):
            if id(variable) not in known:
                raise UserError(
                    f"checkpoint: the step {step.name} uses {variable.path}, which would not be saved, so a resumed "
                    "run would differ; pass its layer, optimizer or metric (or the variable) to runner.checkpoint"
                )


def _by_name(parts: Any) -> dict[str, Any]:
    """Returns a dictionary of objects that were passed as a dictionary, a list or a single object."""
    if parts is None:
        return {}
    if isinstance(parts, dict):
        return dict(parts)
    return {str(place): part for place, part in enumerate(parts if isinstance(parts, (list, tuple)) else [parts])}


class CustomLoop:
    """Runs a custom loop: yields its batches and calls its callbacks.

    Corresponds to `Loop.fit`, except that the user's loop calls the steps.

    Attributes:
        reader: reader of the data.
        batch_size: the requested batch size.
        epochs: the remaining epochs.
        first: the first batch, for its shapes.
        generator: generator of the batches. Closing the generator ends the loop.
        state: epoch and step of the loop.
        logs: values that were logged since the last batch.
    """

    generator: Generator[LoopBatch, None, None]
    state: RunState

    def __init__(self, reader: Reader, strategy: Strategy, batch_size: int, epochs: int):
        """Reads the first batch and a few samples. This must happen before an epoch starts."""
        self.reader, self.batch_size, self.epochs = reader, batch_size, range(epochs)
        self.first, self.sample = first_of(reader), GivenRows(reader.sample(_MOST_SAMPLED))
        self.logs: dict[str, Any] = {}
        self._callbacks: RunCallbacks | None = None
        self._saved: SavedParts | None = None
        self._strategy = strategy
        self._steps: dict[int, StepModel] = {}

    def begin(
        self, state: RunState, callbacks: RunCallbacks | None, saved: SavedParts | None, max_steps: int | None = None
    ) -> None:
        """Sets the state of the loop, the callbacks and the saved objects.

        If `callbacks` is None, the loop is not recorded. If `saved` is None, the loop is not saved.
        """
        self.state, self._callbacks, self._saved = state, callbacks, saved
        if callbacks is None:
            state.begin_fit(
                batch_size=len(self.first.indices),
                num_batches=self.reader.num_batches,
                epochs=len(self.epochs),
                max_steps=max_steps,
            )
        elif callbacks.resumed is not None:
            self.epochs = range(state.epoch, state.epoch if state.was_over else self.epochs.stop)

    def take(self, step: StepModel) -> None:
        """Registers a step of the loop. Raises `UserError` if the step uses variables that the loop would not save."""
        if id(step) not in self._steps:
            if self._saved is not None:
                self._saved.require(step)
            self._steps[id(step)] = step

    def batches(self, feed: Feed) -> Iterator[LoopBatch]:
        """Yields the batches of the loop.

        When the loop requests the next batch, the callbacks for the previous step run, and a due checkpoint is written.
        """
        callbacks = self._callbacks or keras.callbacks.CallbackList()
        callbacks.on_train_begin()
        for epoch in self.epochs:
            if self._callbacks is None:
                self.state.begin_epoch(epoch)
            callbacks.on_epoch_begin(epoch)
            for batch in feed:
                if self.state.is_at_last_step:
                    break
                number, num_batches = self.state.batch, self.reader.num_batches
                callbacks.on_train_batch_begin(number)
                is_last = None if num_batches is None else number + 1 == num_batches
                yield LoopBatch(epoch, number, is_last, len(batch.indices), batch, self.sample)
                logs = self.logs
                self.state.after_step(logs.get("loss"), batch.indices, {})
                callbacks.on_train_batch_end(number, logs)
            for step in self._steps.values():  # all variables: the loop may have assigned any
                require_equal_replicas(step, self._strategy)
            callbacks.on_epoch_end(epoch, self.logs)
            if self._callbacks is None:
                self.state.end_epoch()
            if self.state.is_at_last_step:
                break
        callbacks.on_train_end(self.logs)
