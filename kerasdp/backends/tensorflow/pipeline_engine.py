"""TensorFlow: trains a model in stages, in one graph that calls the functions of each in the order of the schedule."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdp.backends.base import DeviceBatch, Structure, Tensor, Work
from kerasdp.backends.tensorflow.optimizer_update import dense
from kerasdp.backends.tensorflow.pipeline_stage import ForwardPass, StageProgram, total
from kerasdp.config import Config
from kerasdp.runtime.ranks import Processes

if TYPE_CHECKING:
    import keras

    from kerasdp.pipeline.plan import MicroBatches


class Pipeline:
    """Trains a model on its stages' devices.

    `Accumulation` makes the passes in another way: `_forward` and `_passes`, which all else here calls.

    Attributes:
        plan: how it is cut.
        timeline: if a list, takes `(stage, "forward" or "backward", micro-batch, begin, end)`, in seconds, of all work.
    """

    def __init__(self, model: "keras.Model", config: Config, device_names: list[str], processes: Processes):
        from kerasdp.pipeline.plan import make_plan

        self.model, self.optimizer, self.device_names = model, getattr(model, "optimizer", None), device_names
        self.processes = processes
        self.timeline: list[Work] | None = None
        self._timed: dict[int, Callable[..., Any]] = {}
        self.plan = make_plan(model, config, len(device_names), processes.broadcast_from_rank0)
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

        return self.optimizer is not getattr(self.model, "optimizer", None) or any(
            raw_value(variable) is not value for variable, value in self._values
        )

    def build_programs(self) -> None:
        """Makes the stages' functions again, for the layers and the settings as they are now."""
        self.programs = [
            StageProgram(self.model, self.plan, number, name) for number, name in enumerate(self.device_names)
        ]

    def _forward(self, inputs: Structure, num_rows: int) -> tuple[Structure, list[Tensor]]:
        """Computes outputs of the global batch, not for training, and penalties of activities."""
        micro_batches = self.plan.micro_batches(num_rows)
        step = PipelineStep(self.programs, micro_batches, self.plan.inputs(inputs), training=False)
        step.run([[("forward", number) for number in range(len(micro_batches))] for _ in self.programs])
        return self._joined(step.outputs), step.penalties

    def _joined(self, pieces: list[list[Tensor]]) -> Structure:
        """Returns what the model returns, from what the last stage returns for each of some micro-batches."""
        with tf.device(self.device_names[-1]):
            return self.plan.outputs([tf.concat(leaves, 0) for leaves in zip(*pieces)])

    def _loss(self, batch: tuple[Structure, ...], penalties: list[Tensor]) -> Tensor:
        """Computes the loss with all penalties, and counts the losses of several outputs."""
        from kerasdp.keras_compat.layers import weight_penalties
        from kerasdp.keras_compat.models import compiled_loss

        loss_of, (_, targets, outputs, sample_weight) = compiled_loss(self.model), batch
        with tf.device(self.device_names[-1]):
            loss = total() if loss_of is None else loss_of(targets, outputs, sample_weight)
            return total([loss, *penalties, *weight_penalties(self.model)])

    def _logs(self, batch: tuple[Structure, ...], loss: Tensor, num_rows: int) -> Any:
        from kerasdp.keras_compat.models import update_loss_metric

        inputs, targets, outputs, sample_weight = batch
        with tf.device(self.device_names[-1]):
            update_loss_metric(self.model, loss, num_rows)
            return self.model.compute_metrics(inputs, targets, outputs, sample_weight=sample_weight)

    def _loss_of_part(self, targets: Structure, outputs: Structure, sample_weight: Structure) -> Tensor:
        """Computes the loss of some rows, without penalties, for its gradients."""
        import keras

        from kerasdp.keras_compat.models import compiled_loss

        loss_of = compiled_loss(self.model)
        with keras.StatelessScope():  # the losses of several outputs are metrics, too
            return total() if loss_of is None else loss_of(targets, outputs, sample_weight)

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
        from kerasdp.pipeline.plan import actions

        weights, micro_batches = self.model.trainable_weights, self.plan.micro_batches(indices.shape[0])
        schedule, num_stages = self.plan.schedule_for(len(micro_batches)), len(self.programs)
        parts = [(slice(None), 1.0)]  # GPipe: of one loss
        if schedule != "gpipe":
            shares = micro_batches.shares(self.model, is_weighted=sample_weight is not None)
            parts = [(micro_batches.rows(number), share) for number, share in enumerate(shares)]
        step = PipelineStep(
            self.programs, micro_batches, self.plan.inputs(inputs), training=True, timeline=self.timeline
        )
        of_outputs: list[list[Tensor | None]] = []
        sums: list[Tensor | None] = [None] * len(weights)

        def gradients_of(number: int) -> list[Tensor | None]:
            if number == len(of_outputs):
                found, direct = self._gradients_of_loss(step.outputs[number:], targets, sample_weight, *parts[number])
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
        batch = (inputs, targets, self._joined(step.outputs), sample_weight)
        return self._loss(batch, step.penalties), batch, self._with_weight_penalties(sums)

    def _gradients_of_loss(
        self, pieces: list[list[Tensor]], targets: Structure, sample_weight: Structure, rows: slice, share: float
    ) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
        """Computes gradients of the joint loss of some micro-batches: of their outputs, and of weights that it uses.

        Args:
            pieces: outputs of each of them.
            targets: of the global batch.
            sample_weight: likewise.
            rows: that these micro-batches are of the global batch.
            share: of their loss in its loss.
        """
        data = tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[rows], (targets, sample_weight))
        floats = [leaf for leaves in pieces for leaf in leaves if leaf.dtype.is_floating]
        with tf.device(self.device_names[-1]), tf.GradientTape() as tape:
            tape.watch(floats)
            loss = self._loss_of_part(data[0], self._joined(pieces), data[1])
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

    def _gradients(self, *data: Structure) -> list[Tensor]:
        """Returns the gradients of a step."""
        return [gradient for gradient in self._passes(*data)[-1] if gradient is not None]

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
        outputs, penalties = self._forward(inputs, num_rows)
        batch = (inputs, targets, outputs, sample_weight)
        return self._logs(batch, self._loss(batch, penalties), num_rows)

    def predict_step(
        self, inputs: Structure, targets: Structure, sample_weight: Structure, indices: Tensor
    ) -> Structure:
        """Computes the outputs of the global batch."""
        return self._forward(inputs, indices.shape[0])[0]


def _added(gradients: list[Tensor | None], others: list[Tensor | None]) -> list[Tensor | None]:
    """Adds up gradients of the same weights; None is nothing."""
    return [
        one if other is None else other if one is None else one + other
        for one, other in zip(gradients, others, strict=True)
    ]


class PipelineStep:
    """Makes the passes of a step, and passes activations and gradients between the stages.

    Each pass of a stage waits for the one before it in the stage's order: TensorFlow would otherwise begin whatever has
    its inputs, all forward passes first, and keep all that they leave in memory.

    Args:
        programs: of the stages.
        micro_batches: of the batch.
        inputs: of the first stage, for the global batch.
        training: as for a Keras layer.
        timeline: takes the work that is done; None: it is not watched.

    Attributes:
        outputs: of the last stage, by micro-batch.
        sums: gradients of each stage's weights; None of a stage that has made no backward pass.
        penalties: of activities, scalar tensors, each by its share of the global batch.
    """

    def __init__(
        self,
        programs: list[StageProgram],
        micro_batches: "MicroBatches",
        inputs: list[Tensor],
        *,
        training: bool,
        timeline: list[Work] | None = None,
    ):
        self._programs, self._micro_batches, self._inputs, self._training = programs, micro_batches, inputs, training
        self._timeline, self._begun = timeline, dict[tuple[int, str, int], float]()
        # The seeds of random layers, as they are in the whole batch: each micro-batch begins with these.
        self._seeds = [[tf.identity(seed.value) for seed in program.seeds] if training else [] for program in programs]
        self._made: list[dict[int, ForwardPass]] = [{} for _ in programs]
        # Activations for the next stage, and gradients for the one before.
        self._given: list[dict[int, list[Tensor]]] = [{} for _ in programs]
        self._passed_on: list[dict[int, list[Tensor | None]]] = [{} for _ in programs]
        # What each stage has made last.
        self._last: list[list[Tensor]] = [[] for _ in programs]
        self.outputs: list[list[Tensor]] = []
        self.sums: list[list[Tensor | None] | None] = [None] * len(programs)
        self.penalties: list[Tensor] = []

    def run(
        self,
        orders: list[list[tuple[str, int]]],
        gradients_of: Callable[[int], list[Tensor | None]] = lambda number: [],
        scale: Tensor = 1.0,
    ) -> None:
        """Makes the passes.

        Args:
            orders: what each stage does, see `kerasdp.pipeline.plan.actions`.
            gradients_of: returns the gradients of the last stage's outputs for a micro-batch, once `outputs` has them.
            scale: of these gradients.
        """
        for stage, kind, number in _in_turns(orders):
            program = self._programs[stage]
            with tf.device(program.device_name):
                if kind == "forward":
                    self._forward(stage, number)
                else:
                    is_last = stage == len(self._programs) - 1
                    gradients = gradients_of(number) if is_last else self._passed_on[stage].pop(number)
                    self._backward(stage, number, gradients, scale)

    def _forward(self, stage: int, number: int) -> None:
        program, rows = self._programs[stage], self._micro_batches.rows(number)
        values = self._given[stage - 1].pop(number) if stage else [leaf[rows] for leaf in self._inputs]
        with tf.control_dependencies(self._last[stage]):
            values = self._marked(values, (stage, "forward", number), is_begin=True)
            made = program.forward(values, rows, self._micro_batches.num_rows, self._seeds[stage], self._training)
            outputs = self._marked(made.outputs, (stage, "forward", number), is_begin=False)
        self._made[stage][number], self._last[stage] = made, outputs
        share = self._micro_batches.share_of_rows(number)
        self.penalties += [penalty * share for penalty in made.penalties]
        if stage == len(self._programs) - 1:
            self.outputs.append(outputs)
        else:
            self._given[stage][number] = outputs

    def _backward(self, stage: int, number: int, gradients: list[Tensor | None], scale: Tensor) -> None:
        program, made = self._programs[stage], self._made[stage].pop(number)
        with tf.control_dependencies(self._last[stage]):
            gradients = self._marked(gradients, (stage, "backward", number), is_begin=True)
            of_penalty = scale * self._micro_batches.share_of_rows(number)
            of_inputs, of_weights = program.backward(made, gradients, of_penalty)
            found = self._marked([*of_inputs, *of_weights], (stage, "backward", number), is_begin=False)
        of_inputs, of_weights = found[: len(of_inputs)], found[len(of_inputs) :]
        if stage:
            self._passed_on[stage - 1][number] = of_inputs
        sums = self.sums[stage] = program.add(self.sums[stage], of_weights)
        self._last[stage] = [leaf for leaf in (*of_inputs, *sums) if leaf is not None] or self._last[stage]

    def _marked(self, values: list[Any], key: tuple[int, str, int], *, is_begin: bool) -> list[Any]:
        """Returns the tensors (and None); records in the timeline when they are ready."""
        if self._timeline is None:
            return values

        def note(*arrays: Any) -> Any:
            now = time.perf_counter()
            if is_begin:
                self._begun[key] = now
            elif self._timeline is not None:
                self._timeline.append((*key, self._begun.pop(key, now), now))
            return arrays

        tensors = [leaf for leaf in values if leaf is not None]
        # Stateless to TensorFlow, which would otherwise run all such functions one after the other.
        marked = tf.numpy_function(note, tensors, [leaf.dtype for leaf in tensors], stateful=False)
        for leaf, own in zip(marked, tensors):
            leaf.set_shape(own.shape)
        left = iter(marked)
        return [None if leaf is None else next(left) for leaf in values]


def _in_turns(orders: list[list[tuple[str, int]]]) -> Iterator[tuple[int, str, int]]:
    """Returns stage, kind and micro-batch of all passes of all stages, each after those that it needs."""
    left, made = [deque(order) for order in orders], set()
    while any(left):
        for stage, queue in enumerate(left):
            if not queue:
                continue
            kind, number = queue[0]
            before = stage - 1 if kind == "forward" else stage + 1
            if 0 <= before < len(left) and (before, kind, number) not in made:
                continue
            made.add((stage, *queue.popleft()))
            yield stage, kind, number
