"""Lets people write a training loop of their own: steps that run on all devices, and the batches for them.

A user-defined function becomes the `train_step` of a Keras model that holds whatever the function uses. So it trains,
and is checked, as user-defined steps of `fit` are (`kerasdp.step.custom_steps`).
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

# How what a step returns is joined over the devices.
REDUCTIONS = ("mean", "sum", "rows", "same")


class LoopBatch(NamedTuple):
    """A global batch of `Runner.batches`, for the functions that `Runner.step` makes.

    Attributes:
        epoch: from 0, as callbacks have it; the lines of a run count from 1.
        number: in the epoch, from 0.
        is_last: whether it is the epoch's last one; None if that is not known.
        num_rows: samples of the global batch.
        data: on this process's devices.
        sample: a few samples of the data.
    """

    epoch: int
    number: int
    is_last: bool | None
    num_rows: int
    data: DeviceBatch
    sample: "GivenRows"


class GivenRows:
    """Samples that are in memory: what `find_rows` and the first step's check ask a reader for."""

    def __init__(self, data: tuple[Any, Any, Any]):
        self.data = data

    def sample(self, num_rows: int) -> Any:
        """Returns so many rows; a batch of fewer is repeated."""
        return take_rows(self.data, np.resize(np.arange(num_samples(self.data)), num_rows))


# Samples that are read of each data set, for trials: as many as the check of the first step takes on 16 devices.
_MOST_SAMPLED = 64
# Under this name a batch is handed on that is not `(x, y)` or `(x, y, sample_weight)`.
_GIVEN = "kerasdp: given"


class StepModel(keras.Model):
    """A user-defined function, as the `train_step` of a model that holds what the function uses.

    Attributes:
        title: for messages.
        structure: of what it returned when it was last traced, with None for each tensor.
    """

    structure: Any = None
    checks_results = True  # the first step's check looks at what it returns, too

    def __init__(self, function: Callable[..., Any], parts: StepParts, returns: Any):
        """`returns`: see `Runner.step`."""
        super().__init__(name=_name_of(function))
        self.function, self._returns, self.title = function, returns, f"the step {self.name}"
        self.parts = [*parts.layers, *parts.metrics, *parts.variables]
        self.optimizers = [optimizer for optimizer, _ in parts.optimizers]

    def train_step(self, data: Any) -> Any:
        """Calls the function; joins over the devices what it returns, but for means and metrics' results."""
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
    """Returns what each leaf of a result is declared to be."""
    if isinstance(returns, str):
        return keras.tree.map_structure(lambda leaf: returns, result)
    if isinstance(returns, dict) and isinstance(result, dict) and returns.keys() <= result.keys():
        return {key: _declared(returns.get(key, "mean"), value, name) for key, value in result.items()}
    if isinstance(returns, (tuple, list)) and isinstance(result, (tuple, list)) and len(returns) == len(result):
        return type(result)(_declared(one, value, name) for one, value in zip(returns, result))
    raise UserError(f"the step {name}: returns={returns!r} does not fit what it returns, {type(result).__name__}")


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, (str, bytes)):
        raise UserError(f"a step returns tensors. Received: {leaf!r:.100}")
    # Not of a tensor: a metric's result would not be known as that any more.
    return leaf if leaf is None or keras.ops.is_tensor(leaf) else keras.ops.convert_to_tensor(leaf)


def _joined(name: str, leaf: Any, reduction: str) -> Any:
    """Joins a leaf over the devices, unless it is a mean over the rows or a metric's result: that is done later."""
    if leaf is None:
        return None
    dtype, shape = keras.backend.standardize_dtype(leaf.dtype), tuple(leaf.shape)
    if reduction == "mean" and (shape or "float" not in dtype):
        raise UserError(
            f"the step {name} returns {dtype} of shape {shape}: expected a floating-point number, which is a mean over "
            "the samples. Say what else it is by returns=, as 'same', 'sum' or 'rows'"
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
    """Returns values with the keys of dictionaries in the order of a structure; None: of the structure itself."""
    if isinstance(structure, dict):
        return {key: _as_ordered(part, None if values is None else values[key]) for key, part in structure.items()}
    if type(structure) in (list, tuple):
        parts = [None] * len(structure) if values is None else values
        return type(structure)(_as_ordered(part, value) for part, value in zip(structure, parts))
    return values


class Step:
    """A user-defined function that runs on all devices, one compiled program a step: what `Runner.step` returns."""

    def __init__(self, runner: Any, function: Callable[..., Any], returns: Any):
        """See `Runner.step`."""
        for reduction in keras.tree.flatten(returns):
            if reduction not in REDUCTIONS:
                raise UserError(f"returns: expected some of {', '.join(REDUCTIONS)}. Received: {reduction!r}")
        self._runner, self._function, self._returns = runner, function, returns
        self._model: StepModel | None = None
        self.__name__, self.__doc__ = _name_of(function), function.__doc__

    def __call__(self, batch: Any = None) -> Any:
        """Runs the function on a global batch, and returns what it returns, joined over the devices.

        Args:
            batch: of `Runner.batches`; or arrays, or a structure of them, with the samples on axis 0: on every process
                the whole batch. None: the function takes none.
        """
        runner = self._runner
        if current_step().record is not None:
            raise UserError(f"the step {self.__name__} is called within a step: call its function there")
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
        # Where it is not known how many steps there will be, torch compiles them only with --compile=on.
        is_full = is_given and (runner._loop is not None or runner.config.compile != "auto")
        rows = runner.state.of_full_batch(batch.num_rows) if is_full else contextlib.nullcontext()
        with runner._model_steps.running(self._model) as functions, rows:
            leaves = functions.train(batch.data, Detail.NOTHING).logs["result"]
        structure = self._model.structure
        return _as_ordered(structure, keras.tree.pack_sequence_as(structure, leaves))

    def _made(self, reader: Any) -> StepModel:
        """Finds what the function uses, builds its optimizers, and prepares a model for the devices.

        Raises:
            UserError: if the function cannot be used on these devices.
        """
        runner, config, strategy = self._runner, self._runner.config, self._runner.strategy
        if config.strategy != "data" or config.has_micro_batches:
            raise UserError(
                f"the step {self.__name__}: a custom step trains with --strategy=data and without --accumulate"
            )
        # One program of several processes; where each has its own, --shard is refused with a custom step anyway.
        is_one_program = strategy.split.is_one_program and strategy.processes.num_processes > 1
        if config.shard != "none" and is_one_program:
            raise UserError(
                f"the step {self.__name__}: after a loop with --shard={config.shard} on several machines none could "
                "read the weights; use fit, with a train_step of your own, or leave out --shard"
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
            # Trials leave metrics as at the begin of an epoch; these may hold what a loop, or one before it, has seen.
            kept = [(variable, keras.ops.convert_to_numpy(variable).copy()) for variable in model.metrics_variables]
            find_rows(model, reader, config, strategy, "train_step")
            check_first_step(model, config, strategy, reader)
            for variable, value in kept:
                variable.assign(value)
        return model


def _given(batch: Any, strategy: Strategy) -> LoopBatch:
    """Brings a batch that was given as arrays to the devices."""
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
    """What a loop saves, as a model that holds it: see `Runner.checkpoint`."""

    # What the callbacks of a run ask of a model that `fit` trains.
    loss, stop_training = None, False

    def __init__(self, **given: Any):
        """Takes the parts; of the optimizers, the first is that whose learning rate the files of the run show.

        Raises:
            UserError: for what cannot be saved.
        """
        super().__init__(name="loop")
        parts = {name: _by_name(value) for name, value in given.items()}
        for name, kind in _SAVED.items():
            for part in parts[name].values():
                if not isinstance(part, kind):
                    words = " or ".join(each.__name__ for each in kind)
                    raise UserError(f"checkpoint, {name}: expected a {words}. Received: {type(part).__name__}")
                if not getattr(part, "built", True):
                    raise UserError(
                        f"checkpoint, {name}: {part.name} is not built, so that it is not known what there is to save: "
                        "call its build (of an optimizer with the weights that it updates) before"
                    )
        if not parts["optimizers"]:
            raise UserError("checkpoint, optimizers: expected at least one. Received: none")
        self.models, self.metrics_held, self.variables_held = parts["models"], parts["metrics"], parts["variables"]
        (_, self.optimizer), *others = parts["optimizers"].items()
        self.optimizers = dict(others)

    def require(self, step: StepModel) -> None:
        """Raises `UserError` for a variable that a step uses, but that would not be saved."""
        known = {id(variable) for variable in variables_of_own_step(self)}
        for variable in variables_of_own_step(step):
            if id(variable) not in known:
                raise UserError(
                    f"checkpoint: the step {step.name} uses {variable.path}, which is not among what is saved, so that "
                    "a resumed run would differ: name what holds it in models, optimizers, metrics or variables"
                )


def _by_name(parts: Any) -> dict[str, Any]:
    """Returns parts that were given as a dictionary, as a list, or one alone."""
    if parts is None:
        return {}
    if isinstance(parts, dict):
        return dict(parts)
    return {str(place): part for place, part in enumerate(parts if isinstance(parts, (list, tuple)) else [parts])}


class CustomLoop:
    """The batches of a custom loop, and what the loop tells of each: as `Loop.fit` without the steps.

    Attributes:
        reader: of the data.
        batch_size: that was asked for.
        epochs: that are left.
        first: the first batch, for its shapes.
        generator: of the batches; who closes it leaves the loop.
        state: where the loop is.
        logs: what the loop has logged since the last batch.
    """

    generator: Generator[LoopBatch, None, None]
    state: RunState

    def __init__(self, reader: Reader, strategy: Strategy, batch_size: int, epochs: int):
        """Reads what is to be known of the data, which cannot be done once an epoch has begun."""
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
        """Takes where the loop is, and what records and saves it; None: nothing does."""
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
        """Notes a step of the loop. Raises `UserError` if what it uses would not be saved."""
        if id(step) not in self._steps:
            if self._saved is not None:
                self._saved.require(step)
            self._steps[id(step)] = step

    def batches(self, feed: Feed) -> Iterator[LoopBatch]:
        """Yields the batches; what follows a step is done when the next batch is asked for."""
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
            for step in self._steps.values():  # all of their variables: the loop may have assigned any
                require_equal_replicas(step, self._strategy)
            callbacks.on_epoch_end(epoch, self.logs)
            if self._callbacks is None:
                self.state.end_epoch()
            if self.state.is_at_last_step:
                break
        callbacks.on_train_end(self.logs)
