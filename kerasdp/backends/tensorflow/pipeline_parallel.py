"""TensorFlow: trains models in stages: one graph calls the functions of each in the order of the schedule.

With `--accumulate`, a model on one device: by micro-batches in a loop, with the activations of one in memory.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdp.backends.base import (
    DeviceBatch,
    PipelineEngine,
    StagedModels,
    StepFunctions,
    Structure,
    Tensor,
    Trained,
)
from kerasdp.backends.tensorflow.devices import TensorFlowStrategy, put_on_device
from kerasdp.backends.tensorflow.gradients import dense
from kerasdp.backends.tensorflow.pipeline_stage import PipelineStep, StageProgram, total
from kerasdp.backends.tensorflow.train_step import Graphs, kind_of
from kerasdp.config import Config
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.ranks import Processes
from kerasdp.runtime.run_state import Detail, RunState

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch


class PipelineParallel(TensorFlowStrategy):
    """The stages of a run. See `kerasdp.backends.base.Strategy`."""

    num_replicas = 1
    splits_batches = True

    def __init__(self, devices: Devices, config: Config):
        super().__init__(devices, config)
        self.stages: StagedModels[Pipeline] = StagedModels(config, self._make_engine, self.shard_batch)

    def scope(self) -> AbstractContextManager[None]:
        """Returns the context in which models are made: in host memory, which may hold more than a device does."""
        return tf.device("CPU:0")

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Brings the inputs to the first stage's device, all else to the last one's."""
        inputs = put_on_device(batch.inputs, self.device_names[0])
        rest = (batch.targets, batch.sample_weight, batch.indices)
        return DeviceBatch(inputs, *put_on_device(rest, self.device_names[-1]))

    def _make_engine(self, model: "keras.Model") -> "Pipeline":
        """Makes an engine for a model."""
        kind = Accumulation if self.config.accumulate > 1 else Pipeline
        return kind(model, self.config, self.device_names, self.processes)

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Makes train, test and predict functions that work on all stages."""
        pipeline = self.stages.engine_of(model)
        pipeline.build_programs()
        train_step, watched_step, test_step, predict_step = (
            self._function(model, step)
            for step in (pipeline.train_step, pipeline.train_step, pipeline.test_step, pipeline.predict_step)
        )

        def train(batch: DeviceBatch, _: Detail) -> Trained:
            loss, logs = (train_step if pipeline.timeline is None else watched_step)(batch)
            return Trained(loss, None, logs, {})

        return StepFunctions(train=train, test=test_step, predict=predict_step)

    def _function(self, model: "keras.Model", step: Callable[[DeviceBatch], Any]) -> Callable[[DeviceBatch], Any]:
        """Returns a step of the engine as a graph, unless the model runs eagerly."""
        # XLA (2.21) takes no variables of several devices, whatever `jit_compile` says.
        jit_compile = (model.jit_compile or None) if self.config.accumulate > 1 else False
        graphs = Graphs(self.must_be_deterministic)
        return step if model.run_eagerly else lambda batch: graphs.run(kind_of(batch), step, [batch], jit_compile)

    def diverged_variables(self, model: "keras.Model", state_only: bool = False) -> list[str]:
        """Returns none: each weight exists once."""
        return []


class Pipeline(PipelineEngine):
    """Trains a model on its stages' devices.

    `Accumulation` makes the passes in another way: `_forward` and `_passes`, which all else here calls.
    """

    def __init__(self, model: "keras.Model", config: Config, device_names: list[str], processes: Processes):
        from kerasdp.pipeline.plan import make_plan

        plan = make_plan(model, config, len(device_names), processes.broadcast_from_rank0)
        super().__init__(model, plan, processes)
        self.device_names = device_names
        self._timed: dict[int, Callable[..., Any]] = {}
        self.move_to_stage_devices()
        self.build_programs()

    def move_to_stage_devices(self) -> None:
        """Replaces all variables by new ones on the devices of their stages: neither moves to the other by itself."""
        from kerasdp.keras_compat.layers import raw_value, set_raw_value
        from kerasdp.keras_compat.optimizers import rebind_weights, slots_of, weights_without_decay, wrapped_optimizers

        weights = self.model.trainable_variables
        optimizers = wrapped_optimizers(self.optimizer)
        spared = [weights_without_decay(optimizer, weights) for optimizer in optimizers]
        slots = slots_of(self.optimizer, len(weights)) if self.optimizer is not None else {}
        indices = {id(variable): index for index, variable in enumerate(weights)}
        for name, stage in zip(self.device_names, self.plan.stages):
            own = {indices[id(variable)] for variable in stage.model.trainable_variables}
            for variable in (*stage.model.variables, *(slot for (_, index), slot in slots.items() if index in own)):
                with tf.device(name):
                    value = raw_value(variable)
                    value = tf.Variable(value, dtype=value.dtype, trainable=variable.trainable, name=variable.name)
                    set_raw_value(variable, value)
        self._values = [(variable, raw_value(variable)) for variable in self.model.variables]
        # Optimizers know variables by what was just replaced.
        for optimizer, without_decay in zip(optimizers, spared):
            rebind_weights(optimizer, weights, without_decay)

    @property
    def is_stale(self) -> bool:
        """Returns whether the model was compiled again since, or shares a layer with one of a later engine."""
        from kerasdp.keras_compat.layers import raw_value

        return super().is_stale or any(raw_value(variable) is not value for variable, value in self._values)

    def build_programs(self) -> None:
        """Makes the stages' functions again, for the layers and the settings as they are now."""
        self.programs = [
            StageProgram(self.model, self.plan, number, name) for number, name in enumerate(self.device_names)
        ]

    def _forward(self, batch: DeviceBatch) -> tuple[Structure, list[Tensor]]:
        """Computes outputs of the global batch, not for training, and penalties of activities."""
        micro_batches = self.plan.micro_batches(batch.indices.shape[0])
        step = PipelineStep(self.programs, micro_batches, self.plan.inputs(batch.inputs), training=False)
        step.run([[("forward", number) for number in range(len(micro_batches))] for _ in self.programs])
        return self._joined(step.outputs), step.penalties

    def _joined(self, pieces: list[list[Tensor]]) -> Structure:
        """Returns what the model returns, from what the last stage returns for each of some micro-batches."""
        with tf.device(self.device_names[-1]):
            return self.plan.outputs([tf.concat(leaves, 0) for leaves in zip(*pieces)])

    def _loss(self, batch: DeviceBatch, outputs: Structure, penalties: list[Tensor]) -> Tensor:
        """Computes the loss with all penalties, and counts the losses of several outputs."""
        from kerasdp.keras_compat.layers import weight_penalties

        with tf.device(self.device_names[-1]):
            loss = self._compiled_loss(batch.targets, outputs, batch.sample_weight)
            return total([loss, *penalties, *weight_penalties(self.model)])

    def _compiled_loss(self, targets: Structure, outputs: Structure, sample_weight: Structure) -> Tensor:
        from kerasdp.keras_compat.models import compiled_loss

        loss_of = compiled_loss(self.model)
        return total() if loss_of is None else loss_of(targets, outputs, sample_weight)

    def _loss_alone(self, targets: Structure, outputs: Structure, sample_weight: Structure) -> Tensor:
        """Computes the loss of some rows, without penalties, for its gradients: no metric changes."""
        import keras

        with keras.StatelessScope():  # the losses of several outputs are metrics, too
            return self._compiled_loss(targets, outputs, sample_weight)

    def _logs(self, batch: DeviceBatch, outputs: Structure, loss: Tensor) -> Any:
        from kerasdp.keras_compat.models import update_loss_metric

        with tf.device(self.device_names[-1]):
            update_loss_metric(self.model, loss, batch.indices.shape[0])
            return self.model.compute_metrics(batch.inputs, batch.targets, outputs, sample_weight=batch.sample_weight)

    def train_step(self, batch: DeviceBatch) -> tuple[Tensor, Any]:
        """Trains on the global batch; returns its loss, and Keras' logs."""
        loss, outputs, gradients = self._passes(batch)
        self.model.optimizer.apply_gradients(zip(gradients, self.model.trainable_weights, strict=True))
        return loss, self._logs(batch, outputs, loss)

    def _passes(self, batch: DeviceBatch) -> tuple[Tensor, Structure, list[Tensor]]:
        """Computes loss and outputs of the global batch, and the gradients."""
        from kerasdp.pipeline.plan import actions

        weights, micro_batches = self.model.trainable_weights, self.plan.micro_batches(batch.indices.shape[0])
        schedule, num_stages = self.plan.schedule_for(len(micro_batches)), len(self.programs)
        parts = [(slice(None), 1.0)]  # GPipe: of one loss
        if schedule != "gpipe":
            shares = micro_batches.shares(self.model, is_weighted=batch.sample_weight is not None)
            parts = [(micro_batches.rows(number), share) for number, share in enumerate(shares)]
        step = PipelineStep(
            self.programs, micro_batches, self.plan.inputs(batch.inputs), training=True, timeline=self.timeline
        )
        of_outputs: list[list[Tensor | None]] = []
        sums: list[Tensor | None] = [None] * len(weights)

        def gradients_of(number: int) -> list[Tensor | None]:
            if number == len(of_outputs):
                found, direct = self._gradients_of_loss(step.outputs[number:], batch, *parts[number])
                of_outputs.extend(found)
                sums[:] = _added(sums, direct)
            return of_outputs[number]

        orders = [actions(schedule, stage, num_stages, len(micro_batches)) for stage in range(num_stages)]
        step.run(orders, gradients_of, self.model.optimizer.scale_loss(total([tf.ones(())])))
        by_weight = {
            id(weight): gradient
            for program, gradients in zip(self.programs, step.sums)
            for weight, gradient in zip(program.weights, gradients or ())
        }
        sums = _added(sums, [by_weight.get(id(weight)) for weight in weights])
        outputs = self._joined(step.outputs)
        return self._loss(batch, outputs, step.penalties), outputs, self._with_weight_penalties(sums)

    def _gradients_of_loss(
        self, pieces: list[list[Tensor]], batch: DeviceBatch, rows: slice, share: float
    ) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
        """Computes gradients of the joint loss of some micro-batches: of their outputs, and of weights that it uses.

        Args:
            pieces: outputs of each of them.
            batch: the global batch.
            rows: that these micro-batches are of the global batch.
            share: of their loss in its loss.
        """
        targets, sample_weight = tf.nest.map_structure(
            lambda leaf: None if leaf is None else leaf[rows], (batch.targets, batch.sample_weight)
        )
        floats = [leaf for leaves in pieces for leaf in leaves if leaf.dtype.is_floating]
        with tf.device(self.device_names[-1]), tf.GradientTape() as tape:
            tape.watch(floats)
            loss = self._loss_alone(targets, self._joined(pieces), sample_weight)
            scaled_loss = self.model.optimizer.scale_loss(loss * share)
        found = iter(dense(tape.gradient(scaled_loss, [*floats, *self.model.trainable_weights])))
        # A whole number beside the logits, the class say, has no gradient.
        return [[next(found) if leaf.dtype.is_floating else None for leaf in leaves] for leaves in pieces], list(found)

    def _with_weight_penalties(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Adds the gradients of the penalties of weights, each on its stage's device."""
        from kerasdp.keras_compat.layers import weight_penalties

        for name, stage in zip(self.device_names, self.plan.stages):
            with tf.device(name):
                with tf.GradientTape() as tape:
                    penalty = self.model.optimizer.scale_loss(total(weight_penalties(stage.model)))
                gradients = _added(gradients, dense(tape.gradient(penalty, self.model.trainable_weights)))
        return gradients

    def seconds_without_update(self, batch: DeviceBatch) -> float:
        """See `kerasdp.backends.base.PipelineEngine`."""

        def gradients(batch: DeviceBatch) -> list[Tensor]:
            return [gradient for gradient in self._passes(batch)[-1] if gradient is not None]

        variables = self.model.non_trainable_variables + self.model.metrics_variables
        saved = [(variable, tf.identity(variable.value)) for variable in variables]
        passes = self._timed.get(self.plan.size)
        if passes is None:
            passes = self._timed[self.plan.size] = tf.function(gradients, jit_compile=False, autograph=False)
        begin = time.perf_counter()
        for gradient in passes(batch):
            gradient.numpy()
        seconds = time.perf_counter() - begin
        for variable, value in saved:
            variable.assign(value)
        return seconds

    def test_step(self, batch: DeviceBatch) -> Any:
        """Evaluates the global batch; returns Keras' logs."""
        outputs, penalties = self._forward(batch)
        return self._logs(batch, outputs, self._loss(batch, outputs, penalties))

    def predict_step(self, batch: DeviceBatch) -> Structure:
        """Computes the outputs of the global batch."""
        return self._forward(batch)[0]


def _added(gradients: list[Tensor | None], others: list[Tensor | None]) -> list[Tensor | None]:
    """Adds up gradients of the same weights; None is nothing."""
    return [
        one if other is None else other if one is None else one + other
        for one, other in zip(gradients, others, strict=True)
    ]


class Accumulation(Pipeline):
    """Trains a model on one device, by micro-batches: a pipeline of one stage that makes its passes in a loop.

    With micro-batches side by side in a graph, as in `Pipeline`, TensorFlow would run all forward passes at once. As
    with 1F1B, gradients are there before all outputs are: a loss must be a sum over the samples.

    A subclass, as all that it does otherwise is two methods, `_forward` and `_passes`, and these need the plan (which
    changes), the seeds, the penalties and the loss of the engine.
    """

    def _forward(self, batch: DeviceBatch) -> tuple[Structure, list[Tensor]]:
        def work(first: Tensor, rows: int) -> tuple[list[Tensor], Structure]:
            outputs, penalty = self._micro_batch(batch, first, rows, [], training=False)
            return outputs, [penalty]

        return self._sum_over_micro_batches(batch.indices.shape[0], work)

    def _passes(self, batch: DeviceBatch) -> tuple[Tensor, Structure, list[Tensor]]:
        num_rows, weights, optimizer = batch.indices.shape[0], self.model.trainable_weights, self.model.optimizer
        micro_batches = self.plan.micro_batches(num_rows)
        shares = micro_batches.shares(self.model, is_weighted=batch.sample_weight is not None)
        # A micro-batch draws what its rows draw in the whole batch.
        seeds = [tf.identity(seed.value) for seed in self.programs[0].seeds]

        def work(first: Tensor, rows: int) -> tuple[list[Tensor], Structure]:
            share = shares[0] if rows == self.plan.size else shares[-1]
            with tf.GradientTape() as tape:
                outputs, penalty = self._micro_batch(batch, first, rows, seeds, training=True)
                targets, sample_weight = tf.nest.map_structure(
                    lambda leaf: _rows(leaf, first, rows), (batch.targets, batch.sample_weight)
                )
                loss = self._loss_alone(targets, self.plan.outputs(outputs), sample_weight)
                scaled_loss = optimizer.scale_loss(loss * share + penalty)
            return outputs, (penalty, dense(tape.gradient(scaled_loss, weights)))

        outputs, (penalty, gradients) = self._sum_over_micro_batches(num_rows, work)
        return self._loss(batch, outputs, [penalty]), outputs, self._with_weight_penalties(gradients)

    def _micro_batch(
        self, batch: DeviceBatch, first: Tensor, rows: int, seeds: list[Tensor], training: bool
    ) -> tuple[list[Tensor], Tensor]:
        """Computes outputs of some rows of the global batch, and their share of the activity penalties."""
        num_rows = batch.indices.shape[0]
        values = [_rows(leaf, first, rows) for leaf in self.plan.inputs(batch.inputs)]
        outputs, penalties = self.programs[0].compute(first, seeds, values, rows, num_rows, training)
        return outputs, total(penalties) * (rows / num_rows)

    def _sum_over_micro_batches(
        self, num_rows: int, work: Callable[[Any, int], tuple[list[Any], Any]]
    ) -> tuple[Any, Any]:
        """Computes outputs of the global batch, and sums over its micro-batches.

        Args:
            num_rows: of the global batch.
            work: takes first row and number of rows of a micro-batch; returns its outputs, and what is to be summed.
                None, in place of a tensor, stays None.
        """
        size = self.plan.size
        num_full, rest = divmod(num_rows, size)
        outputs, sums = work(tf.constant(0), min(size, num_rows))
        pieces, structure = [[leaf] for leaf in outputs], sums

        def add(first: Tensor, rows: int, sums: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            outputs, summands = work(first, rows)
            summands = [value for value in tf.nest.flatten(summands) if value is not None]
            return outputs, [total + value for total, value in zip(sums, summands, strict=True)]

        def body(number: Tensor, arrays: list[tf.TensorArray], sums: list[Tensor]) -> tuple[Any, ...]:
            outputs, sums = add(number * size, size, sums)
            arrays = [array.write(number - 1, leaf) for array, leaf in zip(arrays, outputs, strict=True)]
            return _after(sums, number + 1), arrays, sums

        sums = [value for value in tf.nest.flatten(sums) if value is not None]
        if num_full > 1:
            arrays = [tf.TensorArray(leaf.dtype, num_full - 1, element_shape=leaf.shape) for leaf in outputs]
            begin = _after(sums, tf.constant(1)), arrays, sums
            _, arrays, sums = tf.while_loop(lambda number, *_: number < num_full, body, begin, parallel_iterations=1)
            for leaves, array, leaf in zip(pieces, arrays, outputs, strict=True):
                leaves.append(tf.reshape(array.stack(), ((num_full - 1) * size, *leaf.shape[1:])))
        if num_full and rest:
            outputs, sums = add(_after(sums, tf.constant(num_full * size)), rest, sums)
            for leaves, leaf in zip(pieces, outputs, strict=True):
                leaves.append(leaf)
        whole = self.plan.outputs([tf.concat(leaves, 0) for leaves in pieces])
        values = iter(sums)
        return whole, tf.nest.map_structure(lambda value: None if value is None else next(values), structure)


def _after(work: list[Tensor], number: Tensor) -> Tensor:
    """Returns a number that is ready once the work is done, so that what needs it starts no sooner."""
    with tf.control_dependencies(work):
        return tf.identity(number)


def _rows(leaf: Tensor | None, first: Tensor, rows: int) -> Tensor | None:
    """Returns some rows of a tensor, with a known shape."""
    if leaf is None:
        return None
    return tf.slice(leaf, [first] + [0] * (len(leaf.shape) - 1), [rows, *leaf.shape[1:]])
