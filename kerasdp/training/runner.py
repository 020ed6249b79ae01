"""Defines `Runner`, which trains, evaluates and predicts on all devices within the `train` function."""

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
from kerasdp.reporting.report import Facts, warn
from kerasdp.run_state import Evaluated, RunState
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


class Runner:
    """Trains, evaluates and predicts on all devices of a run.

    `kerasdp.launch` makes a `Runner` in each worker process, and passes it to `train`.

    Attributes:
        config: the `kerasdp.Config` of the run.
        devices: the devices of the run.
        strategy: object that defines how the devices share the work (`kerasdp.contract.Strategy`).
        state: the epoch and the step of the training.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        x, y = np.random.rand(64, 8), np.random.rand(64, 1)

        def train(runner):
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            runner.fit(model, x, y, batch_size=runner.config.batch_size, epochs=2)
            print("replicas:", runner.num_replicas)  # 2

        kerasdp.launch(train, num_devices=2, device="cpu", batch_size=32)
        ```
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
        # Functions that change the layers of a model before its first step. Rematerialization is an example.
        self._transforms: list[Callable[[keras.Model], Any]] = []
        self._known_streams: dict[int, Stream] = {}
        keep_messages_of(RunError)
        save_optimizers_by_public_names()
        set_seed(config.seed)
        set_precision(config.precision)
        set_attention(devices.kind)

    @property
    def num_replicas(self) -> int:
        """Returns the number of replicas of the model that share a batch."""
        return self.strategy.split.num_replicas

    @property
    def is_chief(self) -> bool:
        """Returns whether this is the process that prints and writes files."""
        return self.strategy.processes.rank == 0

    @contextlib.contextmanager
    def _training_function(self) -> Iterator[None]:
        """Returns the context in which `train` runs.

        In this context, new models get initial weights from the seed of the run, and `model.fit` calls this runner's
        `fit`.
        """
        hook_layers()
        with (
            self._continued_scope(),
            model_calls_through(self),
            metrics_of_ranks_as_they_are(),
            kept_by_clear_session(),
            arguments_in_configs(),
            adapters_in_float64(),
        ):
            try:
                yield
            finally:  # a loop that an error ended is over before Python ends
                if self._loop is not None:
                    self._loop.generator.close()

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which initial weights do not depend on the models built before.

        Initial weights come from the seed of the run. Two models that are built the same way, each in a separate scope,
        start with equal weights. Outside of a scope, initial weights also depend on the variables that `train` has made
        before.

        Returns:
            A context manager.

        Example:
            ```python
            import keras
            import numpy as np
            import kerasdp

            def train(runner):
                with runner.scope():
                    first = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
                with runner.scope():
                    second = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
                np.testing.assert_array_equal(first.get_weights()[0], second.get_weights()[0])

            kerasdp.launch(train)
            ```
        """
        self._numbering.restart()
        return self._continued_scope()

    @contextlib.contextmanager
    def _continued_scope(self) -> Iterator[None]:
        """Returns a context in which new variables get the same initial values on every backend.

        The values depend on the seed of the run and on the number of variables made before.
        """
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
        """Trains a model on all devices. The arguments are the same as in `keras.Model.fit`.

        `model.fit` within `train` calls this method. The run writes its files to `config.workdir`. A second call writes
        to the subfolder `fit-2`.

        Args that mean more than in Keras:
            x: may also be a `kerasdp.ArraySource` or a `kerasdp.RecordSource`. If `x` yields batches (tf.data,
                a DataLoader, a generator), one process reads the batches, and each device gets a shard of each batch.
            batch_size: number of samples of the global batch, over all devices. None: `config.batch_size`.
            verbose: `"auto"` means `config.verbose`.

        Returns:
            A `keras.callbacks.History`.

        Raises:
            UserError: if the data cannot be split over the devices.
            NonFiniteLossError: if the loss becomes NaN or infinite.
            ReplicasDifferError: if the replicas do not hold equal weights at the end.

        Example:
            ```python
            import keras
            import numpy as np
            import kerasdp

            x, y = np.random.rand(64, 8), np.random.rand(64, 1)

            def train(runner):
                model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
                return runner.fit(model, x, y, batch_size=32, epochs=2, validation_split=0.25)

            history = kerasdp.launch(train)
            print(history.history["val_loss"])  # two numbers, one for each epoch
            ```
        """
        batch_size = batch_size or self.config.batch_size
        if self._model_steps.num_running:
            raise UserError("fit was called within fit, by a callback; call the second fit after the first fit")
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
        """Resets the state and the strategy for a new `fit`. Returns the callbacks of this `fit`.

        In a resumed run, the callbacks restore the checkpoint.
        """
        self.state.begin_fit(
            batch_size=num_rows,
            num_batches=reader.num_batches,
            epochs=epochs,
            max_steps=self.config.max_steps,
        )
        reader.split.micro_batch_rows = self.config.micro_batch_rows(num_rows, self.devices.count)
        self.strategy.split = reader.split
        if isinstance(reader, BatchReader):
            batch_size = num_rows  # the data sets the batch size
        facts = Facts(
            # The values in use: arguments of `fit` override the flags.
            config=dataclasses.replace(self.config, batch_size=batch_size),
            devices=str(self.devices),
            device_kind=self.devices.kind,
            num_devices=self.devices.count,
            num_processes=self.strategy.processes.num_processes,
            model=model.name,
            data=reader.name,
            epochs=self.state.epochs,
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
        """Evaluates a model on all devices. The arguments are the same as in `keras.Model.evaluate`.

        Each sample counts exactly once, even if the number of samples is not divisible by the number of devices.
        `model.evaluate` within `train` calls this method.

        Args that mean more than in Keras:
            x: as in `fit`.
            batch_size: number of samples of the global batch, over all devices. None: `config.batch_size`.

        Returns:
            The loss, or a list of the loss and the metrics. If `return_dict` is True: a dictionary of these values by
            name.

        Raises:
            UserError: if the data cannot be split over the devices.

        Example:
            ```python
            import keras
            import numpy as np
            import kerasdp

            x, y = np.random.rand(64, 8), np.random.rand(64, 1)

            def train(runner):
                model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
                model.compile(loss="mse", metrics=["mae"])
                return runner.evaluate(model, x, y, batch_size=32, return_dict=True)

            results = kerasdp.launch(train)
            print(results["loss"], results["mae"])
            ```
        """
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
        """Predicts on all devices. The arguments are the same as in `keras.Model.predict`.

        `model.predict` within `train` calls this method.

        Args that mean more than in Keras:
            x: as in `fit`.
            batch_size: number of samples of the global batch, over all devices. None: `config.batch_size`.

        Returns:
            The outputs of all samples as NumPy arrays, in the order of `x`. Each process gets all outputs.

        Raises:
            UserError: if the data cannot be split over the devices.

        Example:
            ```python
            import keras
            import numpy as np
            import kerasdp

            x = np.random.rand(64, 8)

            def train(runner):
                model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
                return runner.predict(model, x, batch_size=32)

            outputs = kerasdp.launch(train)
            print(outputs.shape)  # (64, 4)
            ```
        """
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
        """Prepares the model for a step. Yields a loop, a feed of the reader's batches, and the callbacks."""
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
        """Turns a function into a step that runs on all devices, for a custom training loop.

        `step` can be used as a decorator. JAX and TensorFlow always compile the step. With PyTorch, `config.compile`
        says whether the step is compiled.

        Args:
            function: function of a batch. The batch is `(x, y)`, `(x, y, sample_weight)`, only `x`, or another
                structure of arrays. The function may also have no argument. It may use Keras models, optimizers,
                metrics, variables and `kerasdp.value_and_grad`. None: `step` returns a decorator.
            returns: how the results of the function are combined over the devices. `"mean"`: the mean over the rows of
                the batch. `"sum"`: the sum over the devices, for example of a number of rows. `"rows"`: concatenated,
                in the order of the batch. `"same"`: the value is the same on all devices. If the function returns a
                structure, `returns` may be a structure of these strings. The result of a metric always includes all
                rows.

        Returns:
            A function. It takes a batch from `batches`, or arrays. With arrays, each process must pass the whole batch.

        Raises:
            UserError: on the first call, if the step would compute different results on several devices than on one.

        Example:
            ```python
            import keras
            import numpy as np
            import kerasdp

            x = np.random.rand(64, 8)

            def train(runner):
                model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])

                @runner.step(returns="rows")
                def forward(batch):
                    return model(batch, training=False)

                return [forward(batch).shape for batch in runner.batches(x, batch_size=32)]

            print(kerasdp.launch(train))  # (32, 4) for each of two batches
            ```
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
        """Yields the global batches of some epochs in the order of `fit`, as input for functions that `step` makes.

        The arguments are the same as in `fit`. If you call `checkpoint` before the loop, the run saves the objects
        passed to `checkpoint`. A resumed run begins with the batch after the last saved step. A loop within another
        loop (for validation, for example) is neither saved nor recorded.

        Yields:
            Batches for functions that `step` makes. The attributes `epoch` and `number` are the indices of the epoch
            and of the batch in the epoch, from 0. `is_last` says whether this is the last batch of the epoch; None if
            not known.

        Raises:
            UserError: if the data cannot be split over the devices.

        Example:
            ```python
            import keras
            import numpy as np
            import kerasdp

            x, y = np.random.rand(64, 8), np.random.rand(64, 1)

            def train(runner):
                model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])

                @runner.step
                def error(batch):
                    return keras.ops.mean(keras.ops.square(model(batch[0]) - batch[1]))

                for batch in runner.batches(x, y, batch_size=32, epochs=2):
                    print(batch.epoch, batch.number, float(error(batch)))

            kerasdp.launch(train)
            ```
        """
        batch_size = batch_size or self.config.batch_size
        order = {"shuffle": shuffle, "steps": steps_per_epoch}
        reader = self._reader(x, y, sample_weight, batch_size, training=True, fitting=True, **order)
        loop = CustomLoop(reader, self.strategy, batch_size, epochs)
        loop.generator = self._batches_of(loop)
        return loop.generator

    def _batches_of(self, loop: CustomLoop) -> Generator[LoopBatch, None, None]:
        """Yields the batches of a loop. The loop begins when the user requests its first batch."""
        if self._loop is not None and self._saved_parts is not None:  # an error ended it, for example
            self._loop.generator.close()
        with contextlib.ExitStack() as stack:
            if self._loop is None:
                self._begin_loop(loop, stack)
            else:
                loop.begin(RunState(), None, None)
            feed = stack.enter_context(open_feed(self.strategy, loop.reader, loop.state))
            yield from loop.batches(feed)

    def _begin_loop(self, loop: CustomLoop, stack: contextlib.ExitStack) -> None:
        """Starts a custom loop. Records and saves the loop if `checkpoint` was called before.

        `stack` contains the contexts that end the loop.
        """
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
        elif self.config.keeps_checkpoints and self.is_chief and not self._num_fits:  # else it may be a validation
            lost = "is not resumed, and saves" if self.config.resume else "saves"
            warn(f"this loop {lost} no checkpoints and no logs; call runner.checkpoint before it")
        loop.begin(self.state, callbacks, saved, self.config.max_steps)
        self._loop = loop
        stack.callback(setattr, self, "_loop", None)

    def steps(self, number: int) -> Iterator[int]:
        """Yields step numbers for a loop whose data comes from another source, such as an environment.

        `log` and `checkpoint` work as with `batches`. The files of the run count `config.batch_size` samples for
        each step. The state of the data source is not saved.

        Args:
            number: number of steps.

        Yields:
            The numbers from 0 to `number - 1`. A resumed run begins with the step after the last saved step.

        Example:
            ```python
            import keras
            import numpy as np
            import kerasdp

            def train(runner):
                model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
                step = runner.step(lambda batch: keras.ops.mean(model(batch)))
                random = np.random.default_rng(0)  # the same numbers on each process
                for number in runner.steps(3):
                    print(number, float(step(random.random((64, 8)))))

            kerasdp.launch(train)
            ```
        """
        rows = np.broadcast_to(np.zeros((), "float32"), (number * self.config.batch_size, 1))  # one number in memory
        for batch in self.batches(rows, shuffle=False):
            yield batch.number

    def log(self, logs: dict[str, Any]) -> None:
        """Records values of a step, in a loop over `batches` or `steps`.

        If you call `checkpoint` before the loop, the values go to the files of the run, its progress bar and its
        trackers.

        Args:
            logs: scalars by name. They may be tensors that the device has not computed yet. The run draws a curve of
                `loss`.

        Raises:
            UserError: outside of a loop over `batches` or `steps`.

        Example:
            ```python
            import keras
            import numpy as np
            import kerasdp

            def train(runner):
                model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
                optimizer = keras.optimizers.SGD()
                optimizer.build(model.trainable_variables)
                runner.checkpoint(models=model, optimizers=optimizer)
                step = runner.step(lambda batch: {"loss": keras.ops.mean(keras.ops.square(model(batch)))})
                for batch in runner.batches(np.random.rand(64, 8), batch_size=32):
                    runner.log(step(batch))

            kerasdp.launch(train, workdir="runs/logged", log_every=1)  # see runs/logged/steps.jsonl
            ```
        """
        if self._loop is None:
            raise UserError("runner.log was called outside of a loop over runner.batches; move the call into the loop")
        self._loop.logs = dict(logs)

    def checkpoint(self, *, models: Any, optimizers: Any, metrics: Any = None, variables: Any = None) -> None:
        """Sets the objects that the next loop over `batches` or `steps` saves. Call this method before the loop.

        The run can resume on any backend and number of devices, as with `fit`. The loop also writes the files of a run,
        shows its progress and calls its trackers; see `log`.

        Args:
            models: a Keras model or layer, or a list or dictionary of models and layers. All must be built. The other
                arguments may be lists or dictionaries, too.
            optimizers: at least one optimizer. Call `optimizer.build(variables)` before `checkpoint`.
            metrics: metrics that add up values over more than one step.
            variables: each `keras.Variable` or `keras.random.SeedGenerator` that the other arguments do not contain.

        Raises:
            UserError: if an object is not built or cannot be saved. A step of the loop raises the error later, if the
                step uses a variable that would not be saved.

        Example:
            ```python
            import keras
            import numpy as np
            import kerasdp

            def train(runner):
                model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
                optimizer = keras.optimizers.SGD()
                optimizer.build(model.trainable_variables)
                runner.checkpoint(models=model, optimizers=optimizer)
                step = runner.step(lambda batch: {"loss": keras.ops.mean(keras.ops.square(model(batch)))})
                for batch in runner.batches(np.random.rand(64, 8), batch_size=32, epochs=2):
                    runner.log(step(batch))

            kerasdp.launch(train, workdir="runs/loop")
            kerasdp.launch(train, workdir="runs/loop", resume=True)  # finds that all is done
            ```
        """
        self._saved_parts = SavedParts(models=models, optimizers=optimizers, metrics=metrics, variables=variables)

    def check_replicas(self, model: keras.Model) -> None:
        """Checks that all replicas of a model hold bit-equal weights. `fit` calls this method at its end.

        Args:
            model: a model that the run trains.

        Raises:
            ReplicasDifferError: if the weights differ. The message names the first variable that differs.

        Example:
            ```python
            import keras
            import numpy as np
            import kerasdp

            def train(runner):
                model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
                runner.predict(model, np.random.rand(64, 8))
                model.set_weights([weights * 0.9 for weights in model.get_weights()])
                runner.check_replicas(model)

            kerasdp.launch(train, num_devices=2, device="cpu")
            ```
        """
        require_equal_replicas(model, self.strategy)

    def _reader(self, x: Any, y: Any, sample_weight: Any, batch_size: int, **options: Any) -> Reader:
        options["known_streams"] = self._known_streams
        return make_reader(self.config, self.strategy, self.devices, x, y, sample_weight, batch_size, **options)

    def _prepare(self, model: keras.Model, reader: Reader, step: str) -> int:
        """Prepares the model for a step on the reader's first batch. Returns the number of rows of this batch."""
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
        """Runs the first-step check, handles signals if the run writes checkpoints, and closes the files at the end.

        Yields the loop, the feed of the training batches, and the feed of the validation batches.
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
                raise NonFiniteLossError(f"{error}; {known}") from None
