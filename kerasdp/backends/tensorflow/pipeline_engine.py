"""TensorFlow: trains a model in stages, all in one graph; the runtime runs what has its inputs."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdp.backends.base import DeviceBatch, Structure, Tensor, Work
from kerasdp.backends.tensorflow.optimizer_update import dense
from kerasdp.config import Config
from kerasdp.portability.replica_context import ReplicaContext, use
from kerasdp.runtime.ranks import Processes

if TYPE_CHECKING:
    import keras


class Pipeline:
    """Trains a model on its stages' devices.

    `Accumulation` makes the passes in another way: `_forward` and `_passes`, which all else here calls.

    Attributes:
        plan: how it is cut.
        timeline: if a list, takes `(stage, "forward" or "backward", micro-batch, begin, end)`, in seconds, of all work.
    """

    def __init__(self, model: "keras.Model", config: Config, device_names: list[str], processes: Processes):
        from kerasdp.keras_compat import seed_variables
        from kerasdp.pipeline.plan import make_plan
        from kerasdp.portability.activity_regularization import WholeBatchPenalties

        self.model, self.optimizer, self.device_names = model, getattr(model, "optimizer", None), device_names
        self.processes = processes
        self.timeline: list[Work] | None = None
        self._begun: dict[tuple[int, str, int], float] = {}
        self._timed: dict[int, Callable[..., Any]] = {}
        self.plan = make_plan(model, config, len(device_names), processes.broadcast_from_rank0)
        self.penalties = WholeBatchPenalties(model)
        self.seeds = [seed_variables(stage.model) for stage in self.plan.stages]
        self.move_to_stage_devices()

    def move_to_stage_devices(self) -> None:
        """Replaces all variables by new ones on the devices of their stages: neither moves to the other by itself."""
        from kerasdp.keras_compat import (
            raw_value,
            rebind_weights,
            set_raw_value,
            slots_of,
            weights_without_decay,
            wrapped_optimizers,
        )

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
        from kerasdp.keras_compat import raw_value

        return self.optimizer is not getattr(self.model, "optimizer", None) or any(
            raw_value(variable) is not value for variable, value in self._values
        )

    def _forward(
        self, inputs: Structure, num_rows: int, training: bool, tape: tf.GradientTape | None = None
    ) -> tuple[Structure, list[Tensor]]:
        """Computes outputs of the global batch, and penalties of activities."""
        from kerasdp.portability.row_search import row_axes_of

        micro_batches = self.plan.micro_batches(num_rows)
        # The seeds of random layers, as they are in the whole batch: each micro-batch begins with these.
        seeds = [[(seed, tf.identity(seed.value)) for seed in own] for own in self.seeds] if training else []
        inputs, outputs, penalties, self._watched = self.plan.inputs(inputs), [], [], []
        for number in range(len(micro_batches)):
            rows = micro_batches.rows(number)
            values = [leaf[rows] for leaf in inputs]
            if self.timeline is not None and tape is not None:
                values = [tf.cast(leaf, own.dtype) for leaf, own in zip(values, self.plan.stages[0].model.inputs)]
                for leaf in values:  # else nothing would show when the first stage's backward pass is over
                    tape.watch(leaf)
                self._watched += values
            context = ReplicaContext.of_micro_batch(
                rows.start,
                rows.stop - rows.start,
                total_rows=num_rows,
                row_axes=row_axes_of(self.model),
                gather=lambda statistics: statistics[None],
            )
            for index, (name, stage) in enumerate(zip(self.device_names, self.plan.stages)):
                with tf.device(name), use(context), self.penalties.active():
                    for seed, value in seeds[index] if training and number else ():
                        seed.assign(value)
                    values = self._marked(values, index, number, is_begin=True) if training else values
                    values = stage(values, training=training)
                    values = self._marked(values, index, number, is_begin=False) if training else values
            outputs.append(values)
            penalties += [penalty * micro_batches.share_of_rows(number) for penalty in context.penalties]
        with tf.device(self.device_names[-1]):
            return self.plan.outputs([tf.concat(leaves, 0) for leaves in zip(*outputs)]), penalties

    def _loss(self, batch: tuple[Structure, ...], penalties: list[Tensor], training: bool) -> Tensor:
        from kerasdp.keras_compat import compute_loss

        with tf.device(self.device_names[-1]):
            return sum(penalties, compute_loss(self.model, *batch, training=training))

    def _logs(self, batch: tuple[Structure, ...], loss: Tensor, num_rows: int) -> Any:
        from kerasdp.keras_compat import update_loss_metric

        inputs, targets, outputs, sample_weight = batch
        with tf.device(self.device_names[-1]):
            update_loss_metric(self.model, loss, num_rows)
            return self.model.compute_metrics(inputs, targets, outputs, sample_weight=sample_weight)

    def train_step(
        self, inputs: Structure, targets: Structure, sample_weight: Structure, indices: Tensor
    ) -> tuple[Tensor, Any]:
        """Trains on the global batch; returns its loss, and Keras' logs."""
        loss, batch, gradients = self._passes(inputs, targets, sample_weight, indices)
        variables = self.model.trainable_weights
        self.model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss, self._logs(batch, loss, indices.shape[0])

    def _passes(
        self, inputs: Structure, targets: Structure, sample_weight: Structure, indices: Tensor
    ) -> tuple[Tensor, tuple[Structure, ...], list[Tensor]]:
        """Computes the loss of the global batch, what it is made of, and its gradients."""
        num_rows = indices.shape[0]
        with tf.GradientTape() as tape:
            outputs, penalties = self._forward(inputs, num_rows, training=True, tape=tape)
            batch = (inputs, targets, outputs, sample_weight)
            loss = self._loss(batch, penalties, training=True)
            scaled_loss = self.model.optimizer.scale_loss(loss)
        gradients = dense(tape.gradient(scaled_loss, [*self.model.trainable_weights, *self._watched]))
        own = gradients[: len(self.model.trainable_weights)]
        with tf.control_dependencies([leaf for leaf in gradients[len(own) :] if leaf is not None]):
            return tf.identity(loss), batch, own

    def _gradients(self, *data: Structure) -> list[Tensor]:
        """Returns the gradients of a step."""
        return [gradient for gradient in self._passes(*data)[-1] if gradient is not None]

    def _marked(self, values: list[Tensor], stage: int, number: int, is_begin: bool) -> list[Tensor]:
        """Returns the tensors; records in the timeline when they, and later their gradients, are ready."""
        if self.timeline is None:
            return values

        def noting(kind: str, begins: bool) -> Callable[..., Any]:
            def note(*arrays: Any) -> Any:
                key, now = (stage, kind, number), time.perf_counter()
                if begins:
                    self._begun[key] = now
                elif self.timeline is not None:
                    self.timeline.append((*key, self._begun.pop(key, now), now))
                return arrays

            # Stateless to TensorFlow, which would otherwise run all such functions one after the other.
            return lambda *tensors: tf.numpy_function(note, tensors, [leaf.dtype for leaf in tensors], stateful=False)

        @tf.custom_gradient
        def mark(*tensors: Any) -> Any:
            marked = noting("forward", is_begin)(*tensors)
            for leaf, own in zip(marked, tensors):
                leaf.set_shape(own.shape)
            return marked, lambda *gradients: noting("backward", not is_begin)(*gradients)

        return list(mark(*values))

    def gather_variables(self) -> None:
        """See `kerasdp.backends.base.PipelineEngine`: the one process has them all."""

    def seconds_without_update(self, batch: DeviceBatch) -> float:
        """Returns the seconds of a training step's passes, which leave no trace in any variable."""
        variables = self.model.non_trainable_variables + self.model.metrics_variables
        saved = [(variable, tf.identity(variable.value)) for variable in variables]
        passes = self._timed.get(self.plan.size)
        if passes is None:
            step = tf.autograph.experimental.do_not_convert(self._gradients)
            passes = self._timed[self.plan.size] = tf.function(step, jit_compile=False)
        begin = time.perf_counter()
        for gradient in passes(*batch):
            gradient.numpy()
        seconds = time.perf_counter() - begin
        for variable, value in saved:
            variable.assign(value)
        return seconds

    def test_step(self, inputs: Structure, targets: Structure, sample_weight: Structure, indices: Tensor) -> Any:
        """Evaluates the global batch; returns Keras' logs."""
        num_rows = indices.shape[0]
        outputs, penalties = self._forward(inputs, num_rows, training=False)
        batch = (inputs, targets, outputs, sample_weight)
        return self._logs(batch, self._loss(batch, penalties, training=False), num_rows)

    def predict_step(
        self, inputs: Structure, targets: Structure, sample_weight: Structure, indices: Tensor
    ) -> Structure:
        """Computes the outputs of the global batch."""
        return self._forward(inputs, indices.shape[0], training=False)[0]
