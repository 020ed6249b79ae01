"""Runs Keras' `fit`, `evaluate` and `predict` on all devices, for a `train` function."""

import contextlib
import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.backends.base import StepFunctions, Strategy
from kerasdp.config import Config
from kerasdp.data.feed import BatchReader, Feed, FeedAdapter, SampleReader
from kerasdp.data.sampling import Order
from kerasdp.data.sources import ArraySource, split_off, weights_of_classes
from kerasdp.errors import NonFiniteLossError, ReplicasDifferError, UserError
from kerasdp.keras_compat import build_compiled, made_by_compile, set_precision, set_seed
from kerasdp.portability import initial_weights
from kerasdp.portability.portable import batch_norms, foreign_batch_norms, portable
from kerasdp.reporting.report import Facts
from kerasdp.runtime import signals
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.heartbeat import Heartbeat
from kerasdp.runtime.model_cache import ModelCache
from kerasdp.runtime.run_state import RunState
from kerasdp.training.callbacks import RunCallbacks

# Bytes of inputs that stay on each GPU without being asked to.
MOST_ON_DEVICE = 2**30


class Runner:
    """Trains, evaluates and predicts with a Keras model on all devices of a run.

    Made by `kerasdp.launch`, one in each worker process.

    Attributes:
        config: the choices of the run.
        devices: the devices of the run.
        strategy: how the devices share the work (`kerasdp.backends.base.Strategy`).
        state: where the training is.
        heartbeat: marks this rank's steps for a supervisor, if there is one (`kerasdp.runtime.heartbeat`).
        num_fits: calls of `fit`.
    """

    def __init__(self, config: Config, devices: Devices, strategy: Strategy, heartbeat: Heartbeat | None = None):
        self.config, self.devices, self.strategy, self.heartbeat = config, devices, strategy, heartbeat
        self._places: Iterator[int] = itertools.count()
        self.state = RunState()
        self.num_fits = 0
        self._functions: ModelCache[tuple[tuple[Any, ...], StepFunctions]] = ModelCache()
        set_seed(config.seed)
        set_precision(config.precision)

    @property
    def num_replicas(self) -> int:
        """Replicas of the model, one a device."""
        return self.strategy.num_replicas

    @property
    def epoch_seconds(self) -> list[float]:
        """Returns the seconds of the training part of each epoch of the last `fit`."""
        return self.state.epoch_seconds

    @property
    def is_chief(self) -> bool:
        """Returns whether this process is the one that prints and writes files."""
        return self.strategy.processes.rank == 0

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Returns the context in which models are built and compiled, with weights that depend on the seed."""
        self._places = itertools.count()
        with self._scope():
            yield

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        with self.strategy.scope(), initial_weights.portable(self.config.seed, self._places):
            yield

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
        """Trains a model with Keras' `fit` on all devices. The arguments are those of `keras.Model.fit`.

        Args that mean more than in Keras:
            x: also a `kerasdp.data.sources.Source`. Generators, tf.data and DataLoaders are taken where one process
                feeds all devices; with torch on several devices use arrays, a Source or a `keras.utils.PyDataset`.
            batch_size: the GLOBAL batch, over all devices. None: `config.batch_size`.
            verbose: `"auto"`: `config.verbose`.

        Returns:
            The `History`. With `config.workdir`, the files of the run are there as well, those of a second call in a
            folder `fit-2` of its own.

        Raises:
            UserError: if the data cannot be split over the devices.
            NonFiniteLossError: if the loss becomes NaN or infinite.
            ReplicasDifferError: if the replicas do not hold equal weights at the end.
        """
        batch_size = batch_size or self.config.batch_size
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_off(x, y, sample_weight, validation_split)
        reader = self._reader(
            x, y, sample_weight, batch_size, shuffle, steps_per_epoch, class_weight, training=True, fitting=True
        )
        num_rows = self._prepare(model, reader)
        feed = Feed(reader, self.strategy.shard_batch, self.state)
        if validation_data is not None:
            val_x, val_y, val_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
            size = validation_batch_size or batch_size
            validation = self._reader(val_x, val_y, val_weight, size, steps=validation_steps, fitting=True)
            validation_data = self._adapter(Feed(validation, self.strategy.shard_batch), size)
        self.state.begin_fit(
            batch_size=num_rows, num_batches=feed.num_batches, epochs=epochs, max_steps=self.config.max_steps
        )
        if self.strategy.stages is not None:
            self.strategy.stages.tune(model, reader.first, self._say)
        run_callbacks = self._run_callbacks(model, feed, callbacks, batch_size, verbose)
        if run_callbacks.resumed is not None:
            initial_epoch = self.state.epoch
            epochs = initial_epoch if self.state.was_over else epochs
        with self._training(run_callbacks), self._running(model, "train", "test"):
            history = model.fit(
                self._adapter(feed, batch_size),
                epochs=epochs,
                verbose=0,
                callbacks=run_callbacks,
                validation_data=validation_data,
                shuffle=False,
                initial_epoch=initial_epoch,
                validation_freq=validation_freq,
            )
        self.strategy.gather_variables(model)
        self.check_replicas(model)
        return history

    def _run_callbacks(
        self,
        model: keras.Model,
        feed: Feed,
        callbacks: list[keras.callbacks.Callback] | None,
        batch_size: int,
        verbose: str | int,
    ) -> RunCallbacks:
        facts = Facts(
            # What is used, also where the arguments of `fit` say otherwise than the flags.
            config=dataclasses.replace(self.config, batch_size=batch_size, epochs=self.state.epochs),
            devices=str(self.devices),
            device_kind=self.devices.kind,
            num_devices=self.strategy.num_devices,
            num_replicas=self.config.num_replicas(self.devices.count),
            num_processes=self.strategy.processes.num_processes,
            model=model.name,
            global_batch_size=batch_size,
        )
        return RunCallbacks(
            self.config,
            self.strategy,
            self.state,
            model,
            feed,
            callbacks,
            facts=facts,
            folder=self.next_folder(),
            heartbeat=self.heartbeat,
            verbose=verbose,
        )

    def _say(self, line: str) -> None:
        if self.is_chief and self.config.verbose != 0:
            print(line, flush=True)

    def next_folder(self) -> str | None:
        """Returns the folder of the next `fit`: a second one leaves the first one's files alone."""
        self.num_fits += 1
        folder = self.config.workdir
        return folder if folder is None or self.num_fits == 1 else os.path.join(folder, f"fit-{self.num_fits}")

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
        """Evaluates with Keras' `evaluate` on all devices: each sample counts exactly once. Arguments as in `fit`."""
        batch_size = batch_size or self.config.batch_size
        reader = self._reader(x, y, sample_weight, batch_size, steps=steps)
        self._prepare(model, reader)
        with self._running(model, "test"):
            return model.evaluate(
                self._adapter(Feed(reader, self.strategy.shard_batch), batch_size),
                verbose=verbose if self.is_chief else 0,
                callbacks=callbacks,
                return_dict=return_dict,
            )

    def predict(
        self,
        model: keras.Model,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = 0,
        steps: int | None = None,
        callbacks: list[keras.callbacks.Callback] | None = None,
    ) -> Any:
        """Predicts with Keras' `predict` on all devices; each process gets the outputs of all samples, in order."""
        batch_size = batch_size or self.config.batch_size
        reader = self._reader(x, None, None, batch_size, steps=steps)
        self._prepare(model, reader, with_targets=False)
        several = model.steps_per_execution
        with self._running(model, "predict"), contextlib.ExitStack() as stack:
            model.steps_per_execution = 1  # the predict functions take a batch at a time
            stack.callback(setattr, model, "steps_per_execution", several)
            return model.predict(
                self._adapter(Feed(reader, self.strategy.shard_batch), batch_size),
                verbose=verbose if self.is_chief else 0,
                callbacks=callbacks,
            )

    def check_replicas(self, model: keras.Model) -> None:
        """Raises `ReplicasDifferError` unless all replicas hold bit-equal weights."""
        different = self.strategy.diverged_variables(model)
        if different:
            raise ReplicasDifferError(
                f"the replicas of {model.name} hold different values in {len(different)} variables, first in "
                f"{different[0]}: a layer or callback changed a weight on one device but not on the others"
            )

    def _reader(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int,
        shuffle: bool = False,
        steps: int | None = None,
        class_weight: dict[int, float] | None = None,
        training: bool = False,
        fitting: bool = False,
    ) -> SampleReader | BatchReader:
        shard = self.strategy.shard
        is_source = hasattr(x, "inputs") and hasattr(x, "targets")
        is_structure = isinstance(x, (np.ndarray, list, tuple, dict)) or hasattr(x, "__array__")
        if is_source or is_structure:
            if is_source and not (y is None and sample_weight is None and class_weight is None):
                raise UserError(f"with a {type(x).__name__} as x, leave out y and weights: they are in x")
            if class_weight is not None:
                if sample_weight is not None:
                    raise UserError("give class_weight or sample_weight, not both")
                sample_weight = weights_of_classes(np.asarray(y), class_weight)
            source = x if is_source else ArraySource(x, y, sample_weight)
            if steps is not None and not training:  # else samples would count twice
                steps = min(steps, -(-source.num_samples // batch_size))
            order = Order(
                num_samples=source.num_samples,
                batch_size=batch_size,
                seed=self.config.seed,
                shuffle=shuffle,
                steps_per_epoch=steps,
            )
            return SampleReader(source, order, self.num_replicas, shard, fitting and self._stays_on_device(source))
        if fitting:
            self._stays_on_device(x)  # raises if it was asked to
        if y is not None or sample_weight is not None or class_weight is not None:
            raise UserError(f"with batches as x ({type(x).__name__}), leave out y and weights: they are in x")
        if shard[1] > 1 and not isinstance(x, keras.utils.PyDataset):
            raise UserError(
                f"expected arrays, a kerasdp.ArraySource, a kerasdp.ImageFolder or a keras.utils.PyDataset. Received: "
                f"{type(x).__name__}, which each torch process would iterate by itself, maybe with other batches"
            )
        return BatchReader(x, self.config.seed if shuffle else None, self.num_replicas, shard, steps)

    def _stays_on_device(self, source: Any) -> bool:
        choice, is_in_memory = self.config.data_on_device, isinstance(source, ArraySource)
        if choice == "on" and not is_in_memory:
            raise UserError(f"--data_on_device=on: expected data in memory. Received: {type(source).__name__}")
        if choice == "auto" and self.devices.kind == "gpu" and self.config.engine == "data":
            return is_in_memory and source.num_bytes <= MOST_ON_DEVICE
        return choice == "on"

    def _adapter(self, feed: Feed, batch_size: int) -> "FeedAdapter":
        return FeedAdapter(self.strategy.adapt(feed), feed.num_batches, batch_size)

    def _prepare(self, model: keras.Model, reader: SampleReader | BatchReader, with_targets: bool = True) -> int:
        """Builds whatever is not built, from the first batch, makes batch norm portable; that batch's rows."""
        if model.steps_per_execution != 1 and not self.strategy.takes_several_steps:
            raise UserError(
                f"steps_per_execution: expected 1 with {self.config.backend} and --strategy={self.config.strategy}. "
                f"Received: {model.steps_per_execution}; leave it out"
            )
        batch = reader.first()
        num_rows = len(batch.indices)

        def symbol(leaf: Any) -> Any:
            # As many rows as the global batch has: this process may hold only some of the inputs.
            return None if leaf is None else keras.KerasTensor((num_rows, *leaf.shape[1:]), str(leaf.dtype))

        symbols = keras.tree.map_structure(symbol, (batch.inputs, batch.targets, batch.sample_weight))
        with self._scope():
            if model.compiled and with_targets:  # loss and metrics, too
                build_compiled(model, symbols)
            elif not model.built:
                model.build(keras.tree.map_structure(lambda leaf: (None, *leaf.shape[1:]), batch.inputs))
        outside = self.strategy.variables_outside_scope(model)
        if outside:
            raise UserError(
                f"{outside[0]} of {model.name} was made outside of runner.scope(), so it is on one device only: make "
                "all layers, the optimizer and the metrics within it"
            )
        portable(model, self.config.batch_norm)
        if self.config.batch_norm == "replica" and self.is_chief and not batch_norms(model):
            warnings.warn(f"--batch_norm=replica has no effect on {model.name}, which has no batch norm", stacklevel=3)
        for layer in foreign_batch_norms(model) if self.strategy.splits_batches else ():
            raise UserError(
                f"layer {layer.name} is a {type(layer).__name__}, a subclass of BatchNormalization, whose statistics "
                "would part between the devices; use keras.layers.BatchNormalization, one device, or --backend=jax"
            )
        return num_rows

    @contextlib.contextmanager
    def _training(self, callbacks: RunCallbacks) -> Iterator[None]:
        """Waits for signals if there is something to save, and closes the files of the run at its end."""
        checkpointer = callbacks.checkpointer
        with contextlib.closing(callbacks), signals.awaited() if checkpointer else contextlib.nullcontext():
            try:
                yield
            except NonFiniteLossError as error:
                if checkpointer is None or not self.is_chief:
                    raise
                checkpointer.close()
                kept = checkpointer.last_good
                raise NonFiniteLossError(
                    f"{error}; the last good checkpoint is {kept}"
                    if kept
                    else f"{error}; there is no good checkpoint yet"
                ) from None

    @contextlib.contextmanager
    def _running(self, model: keras.Model, *names: str) -> Iterator[None]:
        """Gives the model this run's step functions, and takes them back, so that it is a plain Keras model afterwards.

        `names`: which of `train`, `test` and `predict`; the others stay Keras' own, for callbacks that use them.
        """
        # A model that is compiled anew needs new functions; compiling makes new objects of all of these.
        stages = self.strategy.stages
        plan = None if stages is None else stages.engine_of(model).plan
        optimizer = getattr(model, "optimizer", None)
        is_built = bool(getattr(optimizer, "built", False))  # not by `predict` alone, and it makes variables
        made_for = (optimizer, is_built, *made_by_compile(model), plan)
        known = self._functions.get(model)
        if known is None or any(old is not new for old, new in zip(known[0], made_for, strict=True)):
            known = made_for, self.strategy.step_functions(model, self.state)
            self._functions.put(model, known)
        kept = {name: getattr(model, f"{name}_function") for name in names}
        for name in names:
            setattr(model, f"{name}_function", getattr(known[1], name))
        try:
            with self.strategy.running(model):
                yield
        finally:
            for name, function in kept.items():
                setattr(model, f"{name}_function", function)
