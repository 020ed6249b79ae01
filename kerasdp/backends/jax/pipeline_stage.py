"""JAX: compiles the programs of one stage of a pipeline."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from kerasdp.backends.base import DeviceBatch, Structure, Tensor
from kerasdp.backends.jax.devices import shardings_over
from kerasdp.portability.replica_context import ReplicaContext, use

if TYPE_CHECKING:
    import keras

    from kerasdp.pipeline.plan import Plan


class StageProgram:
    """Compiles the programs of a stage.

    Attributes:
        trainable: variables of the stage.
        non_trainable: likewise.
        slots: what the whole model's optimizer keeps for weights of the stage.
        shared: what it keeps for all weights together, as the step counter.
        replicated: the sharding of a tensor that each device of the stage holds the whole of.
    """

    def __init__(self, model: "keras.Model", plan: "Plan", number: int, devices: Sequence[jax.Device]):
        from kerasdp.keras_compat.layers import seed_variables

        self.plan, self.whole_model, self.model, self.number = plan, model, plan.stages[number].model, number
        self.is_first, self.is_last = number == 0, number == len(plan.stages) - 1
        self.num_devices = len(devices)
        self.replicated, self.by_rows = shardings_over(devices)
        self.trainable, self.non_trainable = self.model.trainable_variables, self.model.non_trainable_variables
        seeds = {id(variable) for variable in seed_variables(self.model)}
        self.seeds = [index for index, variable in enumerate(self.non_trainable) if id(variable) in seeds]
        self.optimizer: Any = None
        self.slots: list[keras.Variable] = []
        self.shared: list[keras.Variable] = []
        if getattr(model, "optimizer", None) is not None:
            self._clone_optimizer(model.optimizer)
        self.differentiable = [_is_float(tensor.dtype) for tensor in self.model.inputs]
        self.forward = jax.jit(self._forward)
        self.infer = jax.jit(self._infer)
        self.gradients = jax.jit(self._gradients)
        self.zeros = jax.jit(lambda values: jax.tree.map(jnp.zeros_like, values), out_shardings=self.replicated)
        self.accumulate = jax.jit(self._accumulate, donate_argnums=8)
        self.finish = jax.jit(self._finish, donate_argnums=1)
        self.update = jax.jit(self._update, donate_argnums=(0, 1))
        self.penalty = jax.jit(self._weight_penalty)
        self.joined = jax.jit(lambda outputs: [jnp.concatenate(leaves) for leaves in zip(*outputs)])
        self._measured = jax.jit(self._measure)
        self.backward = jax.jit(self._backward, donate_argnums=2)
        self.times = jax.jit(lambda share, value: share * value)
        self.total = jax.jit(lambda values: sum(values, jnp.zeros(())))
        self._constants: dict[Any, Tensor] = {}

    def sharding_for(self, num_rows: int) -> NamedSharding:
        """Returns the sharding of a tensor of so many rows: split over the devices if they divide, else replicated."""
        return self.replicated if num_rows % self.num_devices else self.by_rows

    def put(self, data: Structure, rows: slice = slice(None)) -> Structure:
        """Brings rows of targets or weights, in NumPy arrays, to the stage's devices."""
        return jax.device_put(jax.tree.map(lambda leaf: leaf[rows], data), self.replicated)

    def constant(self, value: float | np.generic) -> Tensor:
        """Returns a number that programs are called with, on the stage's devices: the same few in each step.

        A Python number takes the type of what it is multiplied with there, too.
        """
        key = type(value), value
        if key not in self._constants:
            self._constants[key] = jax.device_put(value, self.replicated)
        return self._constants[key]

    def _clone_optimizer(self, optimizer: "keras.Optimizer") -> None:
        """Makes an optimizer of this stage's weights; the whole model's optimizer holds its values."""
        from kerasdp.keras_compat.layers import set_raw_value
        from kerasdp.keras_compat.optimizers import copy_decay_exclusions, slots_of

        clone = type(optimizer).from_config(optimizer.get_config())
        copy_decay_exclusions(optimizer, clone)
        clone.build(self.trainable)
        weights = self.whole_model.trainable_variables
        place_of = {id(weight): place for place, weight in enumerate(weights)}
        slot_variables = slots_of(optimizer, len(weights))
        pairs = {
            id(variable): slot_variables[name, place_of[id(self.trainable[index])]]
            for (name, index), variable in slots_of(clone, len(self.trainable)).items()
        }
        own = [variable for variable in clone.variables if id(variable) in pairs]
        self.slots = [pairs[id(variable)] for variable in own]
        # Those of all weights together: in the same order, but not always of the same name.
        slots = {id(variable) for variable in slot_variables.values()}
        self.shared = [variable for variable in optimizer.variables if id(variable) not in slots]
        shared = [variable for variable in clone.variables if id(variable) not in pairs]
        self.optimizer, self.clone_variables = clone, own + shared
        for variable in clone.variables:  # their values are the whole one's; they only name them
            set_raw_value(variable, None)
        scale = getattr(clone, "dynamic_scale", None)
        scales = [index for index, variable in enumerate(self.clone_variables) if variable is scale]
        self.scale_index = scales[0] if scales else None

    def loss_scale(self, slots: list[Any]) -> Any:
        """Returns the factor of the loss that keeps small gradients from being lost in float16."""
        if self.scale_index is not None:
            return slots[self.scale_index]
        return self.constant(np.float32(getattr(self.optimizer, "loss_scale_factor", None) or 1.0))

    def _call(self, trainable: Any, non_trainable: Any, inputs: Any, first_row: Any, training: bool) -> Any:
        from kerasdp.portability.row_search import row_axes_of

        # The program is one for all of the stage's devices.
        rows, row_axes = inputs[0].shape[0], row_axes_of(self.whole_model)
        context = ReplicaContext(
            num_replicas=self.num_devices, num_rows=rows, rows=rows, first_row=first_row, row_axes=row_axes
        )
        with use(context):
            outputs, non_trainable = self.model.stateless_call(
                trainable, non_trainable, list(inputs), training=training
            )
        return jax.tree.leaves(outputs), sum(context.penalties, jnp.zeros(())), non_trainable

    def _forward(self, trainable: Any, non_trainable: Any, inputs: Any, first_row: Any) -> Any:
        """Computes outputs, penalty, and the function that gives the gradients, which JAX returns from a jitted one."""
        fixed = [None if is_float else value for is_float, value in zip(self.differentiable, inputs)]

        def call(trainable: Any, floats: Any) -> Any:
            floats = iter(floats)
            merged = [next(floats) if value is None else value for value in fixed]
            outputs, penalty, new = self._call(trainable, non_trainable, merged, first_row, training=True)
            return ([output for output in outputs if _is_float(output.dtype)], penalty), (outputs, penalty, new)

        floats = [value for is_float, value in zip(self.differentiable, inputs) if is_float]
        if self.is_first:  # the gradient of the data is not needed
            _, pullback, (outputs, penalty, new) = jax.vjp(lambda values: call(values, floats), trainable, has_aux=True)
        else:
            _, pullback, (outputs, penalty, new) = jax.vjp(call, trainable, floats, has_aux=True)
        return outputs, penalty, pullback, new

    def _backward(self, pullback: Any, gradients: Any, sums: Any, share: Any, scale: Any) -> tuple[Any, Any]:
        """Adds to the gradients of the weights; returns those of the inputs, too (zero-sized for integers).

        `share`: of the micro-batch's penalty in that of the batch, made of a Python number. `scale`: of the loss,
        float32.
        """
        given = [gradient for gradient in gradients if gradient is not None]
        found = pullback((given, share * jnp.asarray(scale, jnp.zeros(()).dtype)))
        of_weights, passed_on = found[0], iter(() if self.is_first else found[1])
        sums = of_weights if sums is None else jax.tree.map(jnp.add, sums, of_weights)
        return sums, [next(passed_on) if is_float else None for is_float in self.differentiable] if found[1:] else None

    def _accumulate(
        self, trainable: Any, non_trainable: Any, inputs: Any, targets: Any, sample_weight: Any, first_row: Any,
        shares: Any, scale: Any, sums: Any,
    ) -> Any:  # fmt: skip
        """Computes outputs and penalty of a micro-batch with the whole model; adds its gradients to `sums`.

        `shares`: the weights of the micro-batch's loss and penalty in those of the batch, made of Python numbers.
        """

        def loss_of(trainable: Any) -> Any:
            outputs, penalty, new = self._call(trainable, non_trainable, inputs, first_row, training=True)
            loss = self._loss_alone(outputs, targets, sample_weight)
            return (loss * shares[0] + penalty * shares[1]) * scale, (outputs, penalty, new)

        gradients, (outputs, penalty, new) = jax.grad(loss_of, has_aux=True)(trainable)
        return outputs, penalty, new, jax.tree.map(jnp.add, sums, gradients)

    def _infer(self, trainable: Any, non_trainable: Any, inputs: Any) -> tuple[Any, Any]:
        return self._call(trainable, non_trainable, inputs, np.int32(0), training=False)[:2]

    def _compiled_loss(self, outputs: list[Any], targets: Any, sample_weight: Any) -> Any:
        from kerasdp.keras_compat.models import compiled_loss

        loss = compiled_loss(self.whole_model)
        return jnp.zeros(()) if loss is None else loss(targets, self.plan.outputs(outputs), sample_weight)

    def _loss_alone(self, outputs: list[Any], targets: Any, sample_weight: Any) -> Any:
        """Computes the loss of some rows, for its gradients: no metric changes."""
        import keras

        metrics = [(variable, jnp.zeros(variable.shape)) for variable in self.whole_model.metrics_variables]
        with keras.StatelessScope(state_mapping=metrics):  # the losses of several outputs are metrics, too
            return self._compiled_loss(outputs, targets, sample_weight)

    def _gradients(self, outputs: Any, targets: Any, sample_weight: Any, share: Any, scale: Any) -> Any:
        """Computes the gradients of the joint loss of some micro-batches, times `share * scale`, for each of them."""

        def loss_of(floats: Any) -> Any:
            floats = iter(floats)
            merged = [[next(floats) if _is_float(leaf.dtype) else leaf for leaf in leaves] for leaves in outputs]
            joined = [jnp.concatenate(leaves) for leaves in zip(*merged)]
            return self._loss_alone(joined, targets, sample_weight) * scale * share

        # A whole number beside the logits, the class say, has no gradient.
        found = iter(jax.grad(loss_of)([leaf for leaves in outputs for leaf in leaves if _is_float(leaf.dtype)]))
        return [[next(found) if _is_float(leaf.dtype) else None for leaf in leaves] for leaves in outputs]

    def _weight_penalty(self, trainable: Any) -> Any:
        import keras

        from kerasdp.keras_compat.layers import weight_penalties

        with keras.StatelessScope(state_mapping=list(zip(self.model.trainable_variables, trainable))):
            return sum(weight_penalties(self.model), jnp.zeros(()))

    def _finish(self, trainable: Any, gradients: Any, scale: Any) -> tuple[Any, Any, Any]:
        """Adds the gradients of weight penalties; returns them, penalty, squared norm, and whether all is finite."""
        penalty, of_penalty = jax.value_and_grad(self._weight_penalty)(trainable)
        gradients = jax.tree.map(lambda leaf, other: leaf + (scale * other).astype(leaf.dtype), gradients, of_penalty)
        squares = sum((jnp.sum(jnp.square(leaf / scale)) for leaf in gradients), jnp.zeros(()))
        return gradients, penalty, (squares, jnp.isfinite(squares))

    def _update(self, trainable: Any, slots: Any, gradients: Any, totals: Any) -> tuple[Any, Any]:
        from kerasdp.keras_compat.optimizers import global_clipnorm, updating_some

        if not trainable:
            return trainable, slots
        limit = global_clipnorm(self.optimizer)
        if limit:
            norm = jnp.sqrt(sum(squares for squares, _ in totals))
            gradients = [gradient * (limit / jnp.maximum(norm, limit)) for gradient in gradients]
        if self.scale_index is not None:  # an overflow in one stage is one in all
            is_finite = functools.reduce(jnp.logical_and, (finite for _, finite in totals))
            gradients = [jnp.where(is_finite, gradient, jnp.nan) for gradient in gradients]
        by_variable = {id(variable): value for variable, value in zip(self.clone_variables, slots, strict=True)}
        ordered = [by_variable[id(variable)] for variable in self.optimizer.variables]
        with updating_some(self.optimizer, self.trainable):
            trainable, ordered = self.optimizer.stateless_apply(ordered, gradients, trainable)
        new = {id(variable): value for variable, value in zip(self.optimizer.variables, ordered)}
        return trainable, [new[id(variable)] for variable in self.clone_variables]

    def measure(self, outputs: Any, penalties: Any, batch: DeviceBatch, metrics: Any) -> tuple[Any, ...]:
        """Computes the loss with all penalties, Keras' logs, and the new values of the metrics."""
        penalties = [jax.device_put(penalty, self.replicated) for penalty in penalties]
        return self._measured(outputs, penalties, *self.put((batch.targets, batch.sample_weight)), metrics)

    def _measure(self, outputs: Any, penalties: Any, targets: Any, sample_weight: Any, metrics: Any) -> Any:
        import keras

        from kerasdp.keras_compat.models import update_loss_metric

        num_rows = outputs[0].shape[0]
        with keras.StatelessScope(state_mapping=list(zip(self.whole_model.metrics_variables, metrics))) as scope:
            loss = sum(penalties, self._compiled_loss(outputs, targets, sample_weight))
            update_loss_metric(self.whole_model, loss, num_rows)
            logs = self.whole_model.compute_metrics(None, targets, self.plan.outputs(outputs), sample_weight)
        new = [scope.get_current_value(variable) for variable in self.whole_model.metrics_variables]
        kept = [old if value is None else value for old, value in zip(metrics, new)]
        return loss, logs, kept


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)
