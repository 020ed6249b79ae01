"""JAX: trains a replica on each device, driven by one process, with `keras.distribution.DataParallel`."""

import contextlib
import functools
import resource
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kerasdp.backends.base import DeviceBatch, SingleProcess, StepFunctions, Strategy
from kerasdp.backends.steps import (
    all_variables,
    learning_rate,
    next_batches,
    require_device_batch,
    train_on_next_batches,
)
from kerasdp.config import Config
from kerasdp.data.device_cache import CachedRows
from kerasdp.portability.replica_context import ReplicaContext, use
from kerasdp.runtime.devices import Devices, cache_folder
from kerasdp.runtime.run_state import Detail, RunState


class DataParallel(Strategy):
    """A replica of the model on each device. See `kerasdp.backends.base.Strategy`."""

    shard = (0, 1)
    splits_batches = False

    takes_several_steps = True

    def __init__(self, devices: Devices, config: Config):
        self.processes = SingleProcess()
        self.num_devices = self.num_replicas = devices.count
        # Whether arrays of 64-bit numbers stay what they are, instead of losing half of their bits.
        jax.config.update("jax_enable_x64", config.precision == "float64")
        if jax.config.values["jax_compilation_cache_dir"] is None:  # also $JAX_COMPILATION_CACHE_DIR
            jax.config.update("jax_compilation_cache_dir", cache_folder("jax"))
        self.devices = jax.devices(devices.kind)[: devices.count]
        if devices.kind == "gpu":
            # float32 means float32: TF32 keeps ten bits of it. Use --precision=bfloat16 for speed.
            jax.config.update("jax_default_matmul_precision", "float32")
        mesh = jax.sharding.Mesh(np.array(self.devices), ("batch",))
        self._split, self._copied = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("batch",), ()))
        self._take = jax.jit(_take, out_shardings=self._split)  # each device its own rows
        self._distribution: Any = None

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Returns the context in which models are made: their variables are copied to all devices."""
        if self._distribution is None:
            self._distribution = self._make_distribution([f"{device.platform}:{device.id}" for device in self.devices])
        with self._distribution.scope():
            yield

    def _make_distribution(self, names: list[str]) -> Any:
        """Returns Keras' distribution of variables over the named devices."""
        import keras

        return keras.distribution.DataParallel(devices=names, auto_shard_dataset=False)

    def _context(self) -> ReplicaContext:
        def everywhere(tensor: Any) -> Any:
            return jax.lax.with_sharding_constraint(tensor, self._copied)

        return ReplicaContext(num_replicas=self.num_replicas, everywhere=everywhere)

    def shard_batch(self, batch: Any) -> DeviceBatch:
        """Splits the inputs over the devices, and copies all else to each of them."""
        import keras

        def put(leaf: Any, sharding: NamedSharding) -> Any:
            return None if leaf is None else jax.device_put(leaf, sharding)

        inputs = batch.inputs
        if isinstance(inputs, CachedRows):
            kept = inputs.kept.copies(lambda arrays: jax.device_put(arrays, self._copied))
            inputs = self._take(kept, put(inputs.numbers, self._split))
        else:
            inputs = keras.tree.map_structure(lambda leaf: put(leaf, self._split), inputs)
        rest = (batch.targets, batch.sample_weight, batch.indices.astype("int32"))
        return DeviceBatch(inputs, *keras.tree.map_structure(lambda leaf: put(leaf, self._copied), rest))

    @contextlib.contextmanager
    def running(self, model: Any) -> Iterator[None]:
        """Keeps Keras from sharding batches again, within `fit`, `evaluate` and `predict`."""
        import keras

        distribution = keras.distribution.distribution()
        keras.distribution.set_distribution(None)
        try:
            yield
        finally:
            keras.distribution.set_distribution(distribution)

    def step_functions(self, model: Any, run_state: RunState) -> StepFunctions:
        """Makes jitted train, test and predict functions for Keras' `fit`.

        Each is one program for the whole global batch, which XLA splits over the devices. The padding that makes
        the rows divide by the devices is removed INSIDE the program: within it XLA splits uneven shapes itself
        (only inputs and outputs must divide), so every layer, loss and metric sees the batch of one device.
        """
        import keras

        own_train_step = type(model).train_step is not keras.Model.train_step
        context = self._context() if self.num_replicas > 1 else None
        shardings = self._variable_shardings(model)
        trainable, non_trainable, _, metrics = shardings

        def jit(step: Callable[..., Any], state_shardings: tuple[Any, ...]) -> Callable[..., Any]:
            # JAX's own compiler, or eagerly, as Keras decides for its own functions.
            if not model.run_eagerly and model.jit_compile:
                step = jax.jit(step, donate_argnums=0, out_shardings=(None, state_shardings))
            left = None  # the state after the last step, which Keras hands back as it is

            def run(state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
                nonlocal left
                if state is not left:  # the first one; or a callback has set variables
                    state = jax.device_put(state, state_shardings)
                outputs, left = step(state, data)
                return outputs, left

            return run

        def train_step(detail: Detail, state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
            with use(context):
                data = _cut(data)
                if own_train_step:
                    logs, state = model.train_step(state, data)
                    return (logs.get("loss"), None, logs, {}), state
                return _train_step(model, state, data, detail)

        def test_step(state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
            return model.test_step(state, _cut(data))

        def predict_step(state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
            outputs, non_trainable_variables = model.predict_step(state, _cut(data))
            return outputs, (state[0], non_trainable_variables)

        jitted_train_steps = jit(_several(functools.partial(train_step, Detail.NOTHING)), shardings)
        jitted_train_step = {detail: jit(functools.partial(train_step, detail), shardings) for detail in Detail}
        jitted_test_step = jit(test_step, (trainable, non_trainable, metrics))
        jitted_predict_step = jit(predict_step, (trainable, non_trainable))

        def train_function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            def train_one(detail: Detail, batch: DeviceBatch) -> Any:
                nonlocal state
                outputs, state = jitted_train_step[detail](state, batch)
                return outputs

            def train_several(batches: list[DeviceBatch]) -> Any:
                nonlocal state
                outputs, state = jitted_train_steps(state, batches)
                return outputs

            logs = train_on_next_batches(iterator, model, run_state, train_one, train_several)
            return logs, state

        def test_function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            for batch in next_batches(iterator, model):
                logs, state = jitted_test_step(state, batch)
            return logs, state

        return StepFunctions(
            train=train_function,
            test=test_function,
            predict=lambda state, iterator: jitted_predict_step(state, require_device_batch(next(iterator))),
        )

    def _variable_shardings(self, model: Any) -> tuple[list[NamedSharding], ...]:
        """Returns the shardings of a model's variables, in the four lists of Keras' state."""
        optimizer = getattr(model, "optimizer", None)  # there is none before `compile`
        lists = (
            model.trainable_variables,
            model.non_trainable_variables,
            [] if optimizer is None else optimizer.variables,
            model.metrics_variables,
        )
        return tuple([self._variable_sharding(variable) for variable in variables] for variables in lists)

    def _variable_sharding(self, variable: Any) -> NamedSharding:
        """Returns the sharding of a variable.

        For a value that is on one device without having been sent there, as that of a new variable or a reset metric,
        JAX (0.10.2) compiles another program: it would compile the first training step three times.
        """
        sharding = variable.value.sharding
        return sharding if isinstance(sharding, NamedSharding) else self._copied

    def variables_outside_scope(self, model: Any) -> list[str]:
        """Returns the paths of the variables that are not on all devices."""
        devices = set(self.devices)
        return [variable.path for variable in all_variables(model) if variable.value.sharding.device_set != devices]

    def diverged_variables(self, model: Any) -> list[str]:
        """Returns the paths of variables, seeds included, with a shard that differs between devices that hold it."""
        different = []
        for variable in model.variables:
            shards = variable.value.addressable_shards
            values = {(str(shard.index), np.asarray(shard.data).tobytes()) for shard in shards}
            if len(values) > len({shard for shard, _ in values}):
                different.append(variable.path)
        return different

    def peak_memory_by_device(self) -> list[int]:
        """Returns the most bytes that each device has used; nothing if they share one process."""
        statistics = [device.memory_stats() or {} for device in self.devices]
        return [figures["peak_bytes_in_use"] for figures in statistics if "peak_bytes_in_use" in figures]

    def peak_memory_bytes(self) -> int:
        """Returns the most bytes that a device (on the CPU: this process) has used."""
        return max(self.peak_memory_by_device(), default=0) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _several(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Trains on several batches of one shape; returns their losses and rates, and the last one's logs."""

    def step(state: Any, batch: DeviceBatch) -> tuple[Any, Any]:
        (loss, rate, logs, _), state = train_step(state, batch)
        return state, (loss, rate, logs)

    def train_steps(state: Any, batches: list[DeviceBatch]) -> tuple[Any, Any]:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        state, (losses, rates, logs) = jax.lax.scan(step, state, stacked)
        return (losses, rates, jax.tree.map(lambda leaf: leaf[-1], logs)), state

    return train_steps


def _take(arrays: Any, rows: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[rows], arrays)


def _cut(data: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Inputs without their padding, targets, sample weights."""
    inputs, targets, sample_weight, indices = data
    return jax.tree.map(lambda leaf: leaf[: len(indices)], inputs), targets, sample_weight


def _train_step(model: Any, state: Any, data: tuple[Any, Any, Any], detail: Detail) -> tuple[Any, Any]:
    """Runs Keras' training step, and also returns this batch's loss (Keras' logs hold the epoch's mean) and rate."""
    import keras

    from kerasdp.backends.observer import forward_pass, observed, watched_layers
    from kerasdp.keras_compat import update_loss_metric

    trainable, non_trainable, optimizer, metrics = state
    inputs, targets, sample_weight = data

    def loss_and_updates(trainable: Any) -> tuple[Any, Any]:
        # What layers gave must leave through here: JAX lets nothing else out of a function that it differentiates.
        with watched_layers(detail, model), forward_pass(detail, inputs) as found:
            loss, updates = model.compute_loss_and_updates(
                trainable, non_trainable, metrics, *data, training=True, optimizer_variables=optimizer
            )
        return loss, (updates, found)

    (_, (updates, found)), gradients = jax.value_and_grad(loss_and_updates, has_aux=True)(trainable)
    loss, outputs, non_trainable, metrics = updates
    seen = observed(detail, gradients, found)
    with keras.StatelessScope(zip(model.optimizer.variables, optimizer)):
        rate = learning_rate(model.optimizer)
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    with keras.StatelessScope(list(zip(model.metrics_variables, metrics))) as scope:
        update_loss_metric(model, loss, jax.tree.leaves(inputs)[0].shape[0])
        logs = model.compute_metrics(inputs, targets, outputs, sample_weight)
    metrics = [scope.get_current_value(variable) for variable in model.metrics_variables]
    return (loss, rate, logs, seen), (trainable, non_trainable, optimizer, metrics)
