"""Trains, evaluates and predicts on all devices, for a `train` function."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.config import Config
from kerasdp.contract import Strategy
from kerasdp.data.batch import Feed, Reader
from kerasdp.data.batch_reader import BatchReader
from kerasdp.data.sources import split_off
from kerasdp.data.streams import Stream
from kerasdp.errors import NonFiniteLossError, RunError, UserError
from kerasdp.keras_compat.layers import adapters_in_float64
from kerasdp.keras_compat.models import flat_metrics, metrics_of_ranks_as_they_are, own_steps
from kerasdp.keras_compat.optimizers import inner_optimizer
from kerasdp.keras_compat.saving import arguments_in_configs, save_optimizers_by_public_names
from kerasdp.keras_compat.settings import (
    keep_messages_of,
    kept_by_clear_session,
    set_attention,
    set_precision,
    set_seed,
)
from kerasdp.processes import signals, watchdog
from kerasdp.processes.devices import Devices
from kerasdp.reporting.report import Facts, say
from kerasdp.run_state import Evaluated, RunState, is_made_of_choices
from kerasdp.same import initial_weights
from kerasdp.same.layer_calls import hook_layers
from kerasdp.step.check import check_first_step
from kerasdp.step.row_search import row_layout_of
from kerasdp.training.callbacks import RunCallbacks
from kerasdp.training.custom_loop import CustomLoop, LoopBatch, SavedParts, Step
from kerasdp.training.data_checks import about_validation, chance_loss, check_data
from kerasdp.training.loop import Loop, ModelSteps, is_due, require_equal_replicas
from kerasdp.training.model_calls import model_calls_through, through_model
from kerasdp.training.prepare import MadeBefore, find_rows, prepare
from kerasdp.training.readers import FitNumbers, first_of, make_reader, open_feed

# The choices of which `build_model`, `make_optimizer` and `load_data` make a part of the training.
_OF_PARTS = {
    "model": ("model",),
    "optimizer": ("optimizer", "learning_rate"),
    "data": ("dataset", "data_dir"),
}


class Runner:
    """Trains, evaluates and predicts on all devices of a run. Made by `kerasdp.launch`, one in each worker process.

    Attributes:
        config: the choices of the run.
        devices: the devices of the run.
        strategy: how the devices share the work (`kerasdp.contract.Strategy`).
        state: where the training is.
    """

    def __init__(self, config: Config, devices: Devices, strategy: Strategy):
        self.config, self.devices, self.strategy = config, devices, strategy
        self._numbering = initial_weights.WeightNumbering(config.seed)
        self.state = RunState()
        self._num_fits = 0
        self._num_model_calls = 0  # of `model.fit` and the like, which came here
        self._model_steps = ModelSteps(config, strategy, self.state)
        self._made_before, self._fit_numbers = MadeBefore(), FitNumbers()
        self._saved_parts: SavedParts | None = None
        self._loop: CustomLoop | None = None
        # They change how the layers of a model work before its first step, as rematerialization does.
        self._transforms: list[Callable[[keras.Model], Any]] = []
        self._known_streams: dict[int, Stream] = {}
        keep_messages_of(RunError)
        save_optimizers_by_public_names()
        set_seed(config.seed)
        set_precision(config.precision)
        set_attention(devices.kind)

    @property
    def num_replicas(self) -> int:
        """Replicas of the model, one a device."""
        return self.strategy.split.num_replicas

    @property
    def is_chief(self) -> bool:
        """Returns whether this process is the one that prints and writes files."""
        return self.strategy.processes.rank == 0

    @contextlib.contextmanager
    def _training_function(self) -> Iterator[None]:
        """Returns the context of `train`, in which models are the run's, and their `fit` this runner's."""
        hook_layers()
        with (
            self._continued_scope(),
            model_calls_through(self),
            metrics_of_ranks_as_they_are(),
            kept_by_clear_session(),
            arguments_in_configs(),
            adapters_in_float64(),
        ):
            yield

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which models built alike begin alike, whatever was made before.

        Models, optimizers and metrics made elsewhere in `train` have weights of the seed, too, but of other places.
        """
        self._numbering.restart()
        return self._continued_scope()

    @contextlib.contextmanager
    def _continued_scope(self) -> Iterator[None]:
        """Returns the context in which what is made has the weights of its place in the run, counted on from before."""
        with self.strategy.scope(), initial_weights.portable(self.config.seed, self._numbering):
            yield

    @through_model
    def fit(
        self,
        model: keras.Model,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: list[keras.callbacks.Callback] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | list[int] = 1,
    ) -> keras.callbacks.History:
        """Trains a model on all devices. The arguments are those of `keras.Model.fit`.

        Args that mean more than in Keras:
            x: also a `kerasdp.data.sources.Source`. Batches of tf.data, a DataLoader, a generator and the like are read
                by one process, and handed out.
            batch_size: the GLOBAL batch, over all devices. None: `config.batch_size`.
            verbose: `"auto"`: `config.verbose`.

        Returns:
            The `History`. Files of the run are in `config.workdir`, those of a second call in its folder `fit-2`.

        Raises:
            UserError: if the data cannot be split over the devices.
            NonFiniteLossError: if the loss becomes NaN or infinite.
            ReplicasDifferError: if the replicas do not hold equal weights at the end.
        """
        batch_size = batch_size or self.config.batch_size
        if self._model_steps.num_running:
            raise UserError("fit within fit: a callback cannot train; train the other model after this one")
        epochs = min(epochs, keras.config.max_epochs() or epochs)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_off(x, y, sample_weight, validation_split)
        number = self._fit_numbers.next(model, initial_epoch)
        order = {"shuffle": shuffle, "steps": steps_per_epoch, "class_weight": class_weight, "fit_number": number}
        reader = self._reader(x, y, sample_weight, batch_size, training=True, fitting=True, **order)
        num_rows = self._prepare(model, reader, "train_step")
        validation_size = validation_batch_size or batch_size
        validation = self._validation(model, validation_data, validation_size, validation_steps, epochs)
        run_callbacks = self._begin_fit(model, reader, callbacks, batch_size, num_rows, epochs, verbose)
        if run_callbacks.resumed is not None:
            if validation[0] is not None:
                done = range(initial_epoch, self.state.epoch)
                validation[0].resume_at(sum(is_due(epoch, validation_freq) for epoch in done))
            initial_epoch, epochs = self.state.epoch, self.state.epoch if self.state.was_over else epochs
        with self._training(model, run_callbacks, reader, *validation) as (loop, feed, validation_feed):
            loop.fit(feed, run_callbacks, range(initial_epoch, epochs), validation_feed, validation_freq)
        self.strategy.gather_variables(model)
        self.check_replicas(model)
        return model.history

    def _validation(
        self, model: keras.Model, data: Any, batch_size: int, steps: int | None, epochs: int
    ) -> tuple[Reader | None, Evaluated | None]:
        if data is None:
            return None, None
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with about_validation():
            reader = self._reader(x, y, sample_weight, batch_size, steps=steps, fitting=True)
            check_data(model, reader, first := first_of(reader), is_validation=True)
            with watchdog.current.compiling():
                find_rows(model, reader, self.config, self.strategy, "test_step")
        return reader, Evaluated(reader.num_batches and reader.num_batches * epochs, len(first.indices))

    def _begin_fit(
        self,
        model: keras.Model,
        reader: Reader,
        callbacks: list[keras.callbacks.Callback] | None,
        batch_size: int,
        num_rows: int,
        epochs: int,
        verbose: str | int,
    ) -> RunCallbacks:
        """Sets state and strategy to the begin of a `fit`, and makes its callbacks, which may resume a former one."""
        self.state.begin_fit(
            batch_size=num_rows,
            num_batches=reader.num_batches,
            epochs=epochs,
            max_steps=self.config.max_steps,
        )
        reader.split.micro_batch_rows = self.config.micro_batch_rows(num_rows, self.devices.count)
        self.strategy.split = reader.split
        if isinstance(reader, BatchReader):
            batch_size = num_rows  # whatever it was told
        facts = Facts(
            # What is used, also where the arguments of `fit` say otherwise than the flags.
            config=dataclasses.replace(self.config, batch_size=batch_size, epochs=self.state.epochs),
            devices=str(self.devices),
            device_kind=self.devices.kind,
            num_devices=self.devices.count,
            num_processes=self.strategy.processes.num_processes,
            model=model.name,
            data=reader.name,
            unused=_unused(model, reader),
            folder=self.config.folder_of_fit(self._num_fits + 1),
            chance_loss=chance_loss(model),
        )
        self._num_fits, known = self._num_fits + 1, (self.config, self.strategy, self.state)
        return RunCallbacks(*known, model, reader, callbacks, facts=facts, fit=self._num_fits, verbose=verbose)

    @through_model
    def evaluate(
        self,
        model: keras.Model,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = 0,
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: list[keras.callbacks.Callback] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Evaluates on all devices: each sample counts exactly once. Arguments as in `fit` and in Keras."""
        reader = self._reader(x, y, sample_weight, batch_size or self.config.batch_size, steps=steps)
        with self._evaluating(model, reader, "test_step", callbacks, verbose) as (loop, *data):
            logs = loop.evaluate(*data)
        return logs if return_dict else flat_metrics(model, logs)

    @through_model
    def predict(
        self,
        model: keras.Model,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = 0,
        steps: int | None = None,
        callbacks: list[keras.callbacks.Callback] | None = None,
    ) -> Any:
        """Predicts on all devices; each process gets the outputs of all samples, in order. Arguments as in Keras."""
        reader = self._reader(x, None, None, batch_size or self.config.batch_size, steps=steps)
        with self._evaluating(model, reader, "predict_step", callbacks, verbose) as (loop, *data):
            return loop.predict(*data)

    @contextlib.contextmanager
    def _evaluating(
        self,
        model: keras.Model,
        reader: Reader,
        step: str,
        callbacks: list[keras.callbacks.Callback] | None,
        verbose: str | int,
    ) -> Iterator[tuple[Loop, Feed, keras.callbacks.CallbackList]]:
        """Prepares a step of the model, and yields what goes through the reader's batches, these, and the callbacks."""
        evaluated = Evaluated(reader.num_batches, self._prepare(model, reader, step))
        verbose = verbose if self.is_chief else 0
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = keras.callbacks.CallbackList(
                callbacks, add_progbar=verbose != 0, verbose=verbose, epochs=1, steps=reader.num_batches, model=model
            )
        with self._model_steps.running(model, evaluated) as functions:
            with_loss = step == "test_step"
            if ("loss" if with_loss else "outputs") not in row_layout_of(model).checked and not own_steps(model):
                with watchdog.current.compiling():
                    check_first_step(model, self.config, self.strategy, reader, with_loss=with_loss)
            with open_feed(self.strategy, reader) as feed:
                yield Loop(model, self.strategy, self.state, functions), feed, callbacks
            self.strategy.gather_variables(model)

    def step(self, function: Callable[..., Any] | None = None, *, returns: Any = "mean") -> Any:
        """Makes of a function one step on all devices, compiled where the backend can: for a custom loop.

        Args:
            function: of a batch, as `(x, y)`, `(x, y, sample_weight)`, `x` alone, or whatever structure the step is
                given; or of nothing. It may use Keras models, optimizers, metrics and variables as it likes, and
                `kerasdp.value_and_grad`. None: the result is a decorator.
            returns: how what it returns is joined over the devices, a word or a structure of them: `"mean"` over the
                rows of the batch (results of metrics are those of all rows anyway), `"sum"`, `"rows"`: concatenated in
                the order of the batch, `"same"`: it is the same on all.

        Returns:
            A function of a batch of `batches`, or of arrays that every process has the whole of.

        Raises:
            UserError: on the first call, if devices that each have some rows would do something else than one.
        """
        if function is None:
            return functools.partial(self.step, returns=returns)
        return Step(self, function, returns)

    def batches(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        steps_per_epoch: int | None = None,
    ) -> Iterator[LoopBatch]:
        """Yields the global batches of some epochs, in the order of `fit`, for functions that `step` makes.

        The arguments are those of `fit`. What `checkpoint` was told of is saved between the batches, and a resumed run
        begins with the batch after. A loop within another (a validation, a second data set) is neither saved nor
        recorded.
        """
        batch_size = batch_size or self.config.batch_size
        order = {"shuffle": shuffle, "steps": steps_per_epoch}
        reader = self._reader(x, y, sample_weight, batch_size, training=True, fitting=True, **order)
        loop = CustomLoop(reader, self.strategy, batch_size, epochs)
        loop.generator = self._batches_of(loop)
        return loop.generator

    def _batches_of(self, loop: CustomLoop) -> Generator[LoopBatch, None, None]:
        """Yields the batches of a loop; the first that is asked for begins it."""
        if self._loop is not None and self._saved_parts is not None:  # it was left by an error, say
            self._loop.generator.close()
        with contextlib.ExitStack() as stack:
            if self._loop is None:
                self._begin_loop(loop, stack)
            else:
                loop.begin(RunState(), None, None)
            feed = stack.enter_context(open_feed(self.strategy, loop.reader, loop.state))
            yield from loop.batches(feed)

    def _begin_loop(self, loop: CustomLoop, stack: contextlib.ExitStack) -> None:
        """Begins the loop that is recorded, and saved if `checkpoint` was told what; `stack` ends it."""
        saved, self._saved_parts = self._saved_parts, None
        callbacks = None
        if saved is not None:
            # With TensorFlow each replica has the metrics of the whole batch: one copy is saved, and all are restored.
            stack.enter_context(self.strategy.running(saved))
            sizes = loop.batch_size, len(loop.first.indices), loop.epochs.stop
            callbacks = self._begin_fit(saved, loop.reader, None, *sizes, "auto")
            stack.enter_context(contextlib.closing(callbacks))
            if callbacks.checkpointer:
                stack.enter_context(signals.awaited())
        elif self.config.keeps_checkpoints and self.is_chief and self.config.verbose != 0:
            say("nothing of this loop is saved: name its parts by runner.checkpoint before it")
        loop.begin(self.state, callbacks, saved, self.config.max_steps)
        self._loop = loop
        stack.callback(setattr, self, "_loop", None)

    def steps(self, number: int) -> Iterator[int]:
        """Yields the numbers of the steps of a loop that brings its own data, from 0, or from where a run resumes.

        As `batches` in all else: `log`, `checkpoint` before the loop; the files of the run count `config.batch_size`
        samples a step. What the data comes from, an environment say, is not saved.
        """
        rows = np.broadcast_to(np.zeros((), "float32"), (number * self.config.batch_size, 1))  # one number in memory
        for batch in self.batches(rows, shuffle=False):
            yield batch.number

    def log(self, logs: dict[str, Any]) -> None:
        """Tells the files, the progress and the trackers of the run what a step of the loop over `batches` gave.

        Args:
            logs: scalars by name, tensors that the device may still compute; `loss` is the curve of the run.

        Raises:
            UserError: outside of a loop over `batches`.
        """
        if self._loop is None:
            raise UserError("log: there is no loop over runner.batches")
        self._loop.logs = dict(logs)

    def checkpoint(self, *, models: Any, optimizers: Any, metrics: Any = None, variables: Any = None) -> None:
        """Says what the next loop over `batches` saves: as with `fit`, it resumes on any backend and number of devices.

        With it the loop also has the files, the progress and the trackers of `fit`; see `log`.

        Args:
            models: by name, as a list, or one alone; and so for the others.
            optimizers: that are built.
            metrics: whose values go from one step to the next.
            variables: that are in none of these; `keras.random.SeedGenerator` likewise.

        Raises:
            UserError: for what cannot be saved. A step of the loop that uses anything else raises it later.
        """
        self._saved_parts = SavedParts(models=models, optimizers=optimizers, metrics=metrics, variables=variables)

    def check_replicas(self, model: keras.Model) -> None:
        """Raises `ReplicasDifferError` unless all replicas hold bit-equal weights."""
        require_equal_replicas(model, self.strategy)

    def _reader(self, x: Any, y: Any, sample_weight: Any, batch_size: int, **options: Any) -> Reader:
        options["known_streams"] = self._known_streams
        return make_reader(self.config, self.strategy, self.devices, x, y, sample_weight, batch_size, **options)

    def _prepare(self, model: keras.Model, reader: Reader, step: str) -> int:
        """Prepares a step of the model for the reader's first batch; returns that batch's rows."""
        self._made_before.refuse(model)
        batch = first_of(reader)
        with watchdog.current.compiling():
            prepare(model, reader, batch, self.config, self.strategy, self._continued_scope, step)
            for transform in self._transforms:
                transform(model)
        return len(batch.indices)

    @contextlib.contextmanager
    def _training(
        self, model: keras.Model, callbacks: RunCallbacks, reader: Reader,
        validation: Reader | None, evaluated: Evaluated | None,
    ) -> Iterator[tuple[Loop, Feed, Feed | None]]:  # fmt: skip
        """Checks the first step, waits for signals if there is something to save, and closes the files at the end.

        Yields what trains, and the batches of the two readers.
        """
        checkpointer = callbacks.checkpointer
        waiting = signals.awaited() if checkpointer else contextlib.nullcontext()
        with self._model_steps.running(model, evaluated) as functions, contextlib.closing(callbacks), waiting:
            try:
                with watchdog.current.compiling():
                    check_first_step(model, self.config, self.strategy, reader)
                evaluating = open_feed(self.strategy, validation) if validation else contextlib.nullcontext()
                with open_feed(self.strategy, reader, self.state) as feed, evaluating as validation_feed:
                    yield Loop(model, self.strategy, self.state, functions), feed, validation_feed
            except NonFiniteLossError as error:
                if checkpointer is None or not self.is_chief:
                    raise
                checkpointer.close()
                kept = checkpointer.last_good
                known = f"the last good checkpoint is {kept}" if kept else "there is no good checkpoint yet"
                raise NonFiniteLossError(f"{error}; {known}", error.step) from None


def _unused(model: keras.Model, reader: Reader) -> tuple[str, ...]:
    """Returns the choices of which nothing that is trained was made: that part is user-defined."""
    parts = {"model": model, "optimizer": inner_optimizer(model.optimizer)}
    is_used = {name: is_made_of_choices(part) for name, part in parts.items()} | {"data": bool(reader.name)}
    return tuple(choice for name, choices in _OF_PARTS.items() if not is_used[name] for choice in choices)
