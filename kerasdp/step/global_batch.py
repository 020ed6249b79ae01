"""Computes the loss and metrics of a global batch from the rows of each replica, in one pass or in several passes.

If a loss is a sum over rows, each replica sums the losses of its rows. Then each replica divides its sum by the divisor
of the whole batch's loss. If a metric adds up over rows, each replica computes how its rows change the metric. kerasdp
knows which losses and metrics of Keras add up over rows. For custom losses and metrics, users declare this property
with `per_sample`. For all other losses and metrics, the replicas gather the outputs of the whole batch.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import keras
import numpy as np
from keras import ops

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import InnerScope, has_mask, is_of_keras, mask_of, set_mask, with_mask
from kerasdp.keras_compat.models import (
    compiled_loss,
    compiled_metrics,
    compiled_variables,
    compute_loss,
    is_metric_of_keras,
    loss_options,
    losses_of_whole_batch,
    metric_function,
    of_same_rank,
    output_losses,
    reducing_losses,
    update_compiled_metrics,
    update_loss_metric,
)
from kerasdp.same.random import portable_draws
from kerasdp.same.replica_context import ReplicaContext, RowOrder

Tensor = Any

# Keras' functions (3.15) that return a loss for each row, from that row only. `dice`, for example, does not.
BY_ROWS = {
    getattr(keras.losses, name)
    for name in (
        "binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy",
        "categorical_focal_crossentropy", "categorical_hinge", "cosine_similarity", "ctc", "hinge", "huber",
        "kl_divergence", "log_cosh", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error",
        "mean_squared_logarithmic_error", "poisson", "sparse_categorical_crossentropy", "squared_hinge",
    )
}  # fmt: skip

Definition = TypeVar("Definition")
_DECLARED = "is_per_sample"


def per_sample(definition: Definition) -> Definition:
    """Declares that a loss or a metric treats each sample independently. Use it as a decorator.

    On several devices, each device then computes the loss or the metric for its samples. Without the declaration, the
    outputs of the whole batch are gathered. The losses and metrics of Keras need no declaration.

    Args:
        definition: a loss or a metric. A loss function, and the `call` of a subclass of `keras.losses.Loss`, must
            return values for each sample, of shape `(samples, ...)`. The variables of a subclass of
            `keras.metrics.Metric` must be sums over the samples.

    Returns:
        `definition`.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        @kerasdp.per_sample
        def asymmetric_error(y_true, y_pred):
            error = y_true - y_pred
            return keras.ops.mean(keras.ops.maximum(0.9 * error, -0.1 * error), axis=-1)

        def train(runner):
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", asymmetric_error)
            model.fit(np.random.rand(64, 8), np.random.rand(64, 1))

        kerasdp.launch(train, num_devices=2, device="cpu")
        ```
    """
    setattr(definition, _DECLARED, True)
    return definition


def _is_declared(*definitions: Any) -> bool:
    """Returns whether `per_sample` was applied to one of these objects."""
    return any(getattr(definition, _DECLARED, False) for definition in definitions)


def is_by_rows(loss: keras.losses.Loss) -> bool:
    """Returns whether each value of a loss is known to depend on one row only."""
    function = getattr(loss, "fn", None)
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return False
    if _is_declared(function, type(loss)):
        return True
    return is_of_keras(type(loss)) and function in BY_ROWS and loss_options(loss).get("axis", -1) == -1


def is_loss_of_keras(loss: keras.losses.Loss) -> bool:
    """Returns whether Keras defines the class and the function of a loss."""
    return is_of_keras(type(loss)) and is_of_keras(getattr(loss, "fn", type(loss)))


def shares_of(model: keras.Model, counts: list[int], *, is_weighted: bool, instead: str) -> list[float]:
    """Returns the weight of each micro-batch's loss in the loss of the global batch.

    Args:
        model: a compiled model with built losses.
        counts: the number of rows of each micro-batch.
        is_weighted: whether the samples have weights.
        instead: advice for the user if a loss needs the whole batch, for the message.

    Raises:
        UserError: if the loss of the global batch is not a sum over the micro-batches.
    """
    # The losses that Keras has built from the arguments of `compile`, for each output.
    losses = output_losses(model)
    for loss in losses:
        # A loss with `ignore_class` takes the mean of the remaining values (Keras 3.15).
        if not is_by_rows(loss) or loss_options(loss).get("ignore_class") is not None:
            raise UserError(
                f"the loss {loss.name} of {model.name} needs the whole batch at once; {instead}. Or declare the loss "
                "with kerasdp.per_sample, if each value of the loss depends on one sample only"
            )
    reductions = {loss.reduction for loss in losses}
    if reductions == {"sum"}:
        return [1.0] * len(counts)
    means = {"sum_over_batch_size", "mean"} | (set() if is_weighted else {"mean_with_sample_weight"})
    if not reductions <= means:
        raise UserError(
            f"the losses of {model.name} have the reduction {', '.join(map(str, sorted(map(str, reductions))))}, which "
            f"needs the whole batch at once; {instead}"
        )
    return [count / sum(counts) for count in counts]


def state_of_losses(model: keras.Model, targets: Any, symbols: Any) -> list[keras.Variable]:
    """Returns the variables to which custom losses of `compile` assign. These variables belong to no model.

    Args:
        model: a model with built losses.
        targets: a few rows as NumPy arrays.
        symbols: `KerasTensor`s for the outputs of the model, in the structure of the outputs. Axis 0 may have any size.
    """
    numbers, num_rows = np.random.RandomState(0), len(keras.tree.flatten(targets)[0])

    def random(tensor: Any) -> Any:
        """Returns random outputs between 0 and 1, which are valid as probabilities and as other outputs."""
        values = numbers.uniform(0.05, 0.95, (num_rows, *tensor.shape[1:]))
        return ops.convert_to_tensor(values.astype("float32"), dtype=tensor.dtype)

    with contextlib.suppress(Exception), InnerScope() as scope:  # they may not expect such outputs
        cast(Any, compiled_loss(model))(targets, keras.tree.map_structure(random, symbols))
    known = set(map(id, compiled_variables(model)[0]))
    # Seed generators are left out: they draw portably.
    return [each for each in scope.assigned if id(each) not in known and each.name != "seed_generator_state"]


def adds_up(metric: keras.metrics.Metric) -> bool:
    """Returns whether separate updates with subsets of the rows change a metric like one update with all rows."""
    function, options = metric_function(metric)
    if _is_declared(function, type(metric)):  # TensorFlow does not sum bools, and a bool of all rows is no sum
        return not any(variable.dtype == "bool" for variable in metric.variables)
    if is_of_keras(type(metric)) and function is None:
        return bool(metric.variables)
    is_known = function in BY_ROWS or (inspect.isfunction(function) and is_metric_of_keras(function))
    return is_of_keras(type(metric)) and is_known and options.get("axis", -1) == -1


def reasons_to_gather_for_loss(model: keras.Model) -> list[str]:
    """Returns the reasons why the loss of a compiled model needs the outputs of the whole batch.

    The list is empty if the loss does not need them.
    """
    if _overrides(model, "compute_loss"):
        return [f"compute_loss of {type(model).__name__}"]
    coupling = [loss for loss in output_losses(model) if not is_by_rows(loss) or loss.reduction in (None, "none")]
    return [f"the loss {loss.name} (not known to treat each sample independently)" for loss in coupling]


def reasons_to_gather_for_metrics(model: keras.Model) -> list[str]:
    """Returns the reasons why the metrics of a compiled model need the outputs of the whole batch.

    The list is empty if the metrics do not need them.
    """
    own = [f"compute_metrics of {type(model).__name__}"] if _overrides(model, "compute_metrics") else []
    coupling = [metric for _, metric in compiled_metrics(model) if not adds_up(metric)]
    return own + [f"the metric {metric.name} (not known to add up)" for metric in coupling]


def _overrides(model: keras.Model, method: str) -> bool:
    """Returns whether a model's class overrides a method of `keras.Model`."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


class Data(NamedTuple):
    """Holds a batch, or some of its rows, and the model's outputs for these rows, as structures of tensors.

    Attributes:
        inputs: the inputs of the model, which user-defined methods may use.
        targets: the targets, with as many rows as `outputs`; may be None.
        outputs: the outputs of the model.
        sample_weight: the sample weights; may be None.
    """

    inputs: Any
    targets: Any
    outputs: Any
    sample_weight: Any


class Sums(NamedTuple):
    """Holds sums that a pass computes and that the step uses at its end.

    `added` adds up the sums of several micro-batches.

    Attributes:
        to_reduce: tensors that must still be summed over the replicas, by name.
        complete: tensors that are already sums over all replicas, by name.
    """

    to_reduce: dict[str, Tensor]
    complete: dict[str, Tensor]


def added(before: Sums | None, sums: Sums) -> Sums:
    """Adds the sums of a pass to the sums of the earlier passes."""
    if before is None:
        return sums

    def both(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
        return one | {name: one[name] + value if name in one else value for name, value in other.items()}

    return Sums(both(before.to_reduce, sums.to_reduce), both(before.complete, sums.complete))


class GlobalBatch:
    """Computes loss and metrics of a global batch on one replica, after its forward pass.

    Each micro-batch has a separate object. The object of the last micro-batch gets the sums of all micro-batches.

    Attributes:
        loss: the loss to differentiate. Its gradients must be averaged over the replicas and added up over the
            micro-batches. The result is the gradients of the global batch's loss.
        sums: the sums of this pass; after all passes were added up, the sums of all passes.
        is_of_own_rows: whether each replica computes the loss of its rows only. If False, each replica computes the
            loss from the rows of all replicas.
    """

    def __init__(
        self, model: keras.Model, context: ReplicaContext | None, padded: Data, num_rows: int, *, training: bool,
        add_up: Callable[[Tensor], Tensor], total_rows: int | None = None, share: float = 1.0,
    ):  # fmt: skip
        """Computes the loss.

        Args:
            model: a built and compiled model.
            context: the context of the forward pass. None: the replica has the whole batch.
            padded: the replica's rows, with padding.
            num_rows: the number of rows of the global batch, or of the micro-batch.
            training: the argument `training` of Keras.
            add_up: a function that sums a value over the replicas, for the divisor of the loss.
            total_rows: the number of rows of the global batch. None: `num_rows`.
            share: the weight of the micro-batch's loss in the loss of the global batch.
        """
        from kerasdp.same.layers import pack_moving

        self.model, self.context, self.num_rows, self.training = model, context, num_rows, training
        self._total_rows, self._share = total_rows or num_rows, share
        self._is_part = context is not None and context.is_micro_batch
        self.sums = Sums({}, {})
        # The replica's rows with padding and without padding, and the rows of all replicas.
        self._padded, self._add_up = padded, add_up
        self._unpadded = padded if context is None else _without_padding(padded, context)
        self._whole: Data | None = None
        self._sums_of_all: dict[str, Tensor] = {}
        if self._is_part:
            refuse_masks(model, padded.outputs)
        self._has_own_rows = self._is_by_rows()
        self.is_of_own_rows = self._has_own_rows and not reasons_to_gather_for_loss(model)
        self._add_up_metrics = self._is_part or (self._has_own_rows and not reasons_to_gather_for_metrics(model))
        self.loss = self._loss_of_own_rows() if self.is_of_own_rows else self._loss_of_all_rows()
        if context is not None and context.moving:
            self.sums.to_reduce["moving"] = pack_moving(context.moving)

    def tensors(self) -> Any:
        """Returns the tensors that a differentiated function must return on JAX, for `with_tensors`."""
        outputs = self._padded.outputs
        return self.sums, outputs, keras.tree.map_structure(mask_of, outputs)

    def with_tensors(self, tensors: Any) -> "GlobalBatch":
        """Stores the result of `tensors` outside of the differentiated function; returns this object."""
        self.sums, outputs, masks = tensors
        self._padded = self._padded._replace(outputs=keras.tree.map_structure(set_mask, outputs, masks))
        return self

    def whole(self) -> Data:
        """Returns all rows of the global batch. The first call gathers them."""
        # No `cached_property`: it (Python 3.11) lets in only one thread, and TensorFlow traces replicas in turns.
        padded, context = self._padded, self.context
        if self._whole is None and context is not None:
            self._whole = Data(
                padded.inputs,
                _each(context.gather_rows, padded.targets),
                context.whole_outputs(padded.outputs),
                _each(context.gather_rows, padded.sample_weight),
            )
        return self._whole or padded

    def count_metrics(self) -> None:
        """Computes how the replica's rows change the metrics.

        This method must be called outside of the differentiated function.
        """
        if self._add_up_metrics:
            rows = self._unpadded if self._has_own_rows else self.whole()
            _, variables = compiled_variables(self.model)
            # A copy: Keras (3.15) multiplies sample weights by the outputs' mask in place.
            weights, outputs = _each(ops.copy, rows.sample_weight), _each(ops.stop_gradient, rows.outputs)
            with keras.StatelessScope(_zeros(variables)) as scope:
                update_compiled_metrics(self.model, rows.targets, outputs, weights)
            self._note_changes("metrics", variables, scope, self._has_own_rows)

    def store_sums(self, sums: dict[str, Tensor]) -> Tensor:
        """Stores the sums over all replicas, from which metrics and moving statistics are updated.

        Args:
            sums: the tensors of `self.sums.to_reduce`, summed over the replicas.

        Returns:
            The loss of the global batch.
        """
        self._sums_of_all = added(Sums(sums, {}), Sums(self.sums.complete, {})).to_reduce
        return self._sums_of_all["loss"]

    def update_moving_statistics(self) -> None:
        """Updates the moving statistics of layers that compute separate statistics on each replica."""
        from kerasdp.same.layers import move_together

        if "moving" in self._sums_of_all and self.context is not None:
            move_together(self.context.moving or [], self._sums_of_all["moving"])

    def update_metrics(self, loss: Tensor) -> dict[str, Any]:
        """Updates the metrics with the global batch and its loss; returns Keras' logs."""
        update_loss_metric(self.model, loss, self._total_rows)
        for name, variables in zip(("losses", "metrics"), compiled_variables(self.model)):
            for place, variable in enumerate(variables):
                if (change := self._sums_of_all.get(f"{name}/{place}")) is not None:
                    variable.assign(variable + ops.cast(change, variable.dtype))
        if self._add_up_metrics:
            return self.model.get_metrics_result()
        whole, inputs = self.whole(), self._inputs_for("compute_metrics")
        outputs = _each(ops.stop_gradient, whole.outputs)
        return self.model.compute_metrics(inputs, whole.targets, outputs, sample_weight=whole.sample_weight)

    def _is_by_rows(self) -> bool:
        """Returns whether each replica has rows, and each output has exactly one entry for each row."""
        context, outputs = self.context, keras.tree.flatten(self._padded.outputs)
        if context is None or context.rows is None or not all(each.num_rows for each in context.replicas):
            return False
        # Without a second axis, Keras takes the mean over the rows.
        return all(
            len(leaf.shape) > 1
            and leaf.shape[0] == context.rows
            and context.output_order(number, leaf) is RowOrder.FIRST
            for number, leaf in enumerate(outputs)
        )

    def _loss_of_all_rows(self) -> Tensor:
        whole = self.whole()
        # Copies, as above. The thread of a replica does not have the context of the run.
        targets, weights = _each(ops.copy, whole.targets), _each(ops.copy, whole.sample_weight)
        with losses_of_whole_batch(self._factor_of_means()), portable_draws("a loss"):
            if self._is_part and (compiled := compiled_loss(self.model)) is not None:
                loss = self._with_added(compiled(targets, whole.outputs, weights))
            else:
                inputs = self._inputs_for("compute_loss")
                loss = compute_loss(self.model, inputs, targets, whole.outputs, weights, training=self.training)
        self.sums.complete["loss"] = ops.stop_gradient(loss)
        return loss

    def _with_added(self, loss: Tensor | None) -> Tensor:
        """Adds the losses of layers and the penalties of weights to a loss.

        In a micro-batch, the loss is multiplied by its weight, and all added losses by the micro-batch's share of the
        rows.
        """
        loss = loss * self._share if self._is_part and loss is not None else loss
        for penalty in map(ops.sum, self.model.losses):  # each replica has all penalties
            penalty = penalty * (self.num_rows / self._total_rows) if self._is_part else penalty
            loss = penalty if loss is None else loss + penalty
        if loss is None:
            raise UserError(f"{self.model.name} has no loss; pass a loss to model.compile")
        return loss

    def _factor_of_means(self) -> float:
        """Returns the factor by which to multiply the micro-batch's loss in Keras' loss metrics.

        These metrics are means, weighted by rows.
        """
        return self._share * self._total_rows / self.num_rows

    def _inputs_for(self, method: str) -> Any:
        """Returns the inputs of the global batch for a user-defined method.

        If the model does not override the method, this function returns the inputs of the replica, because Keras'
        method does not use the inputs.
        """
        inputs = self._padded.inputs
        if self.context is None or not _overrides(self.model, method):
            return inputs
        return _each(self.context.gather_rows, inputs)

    def _loss_of_own_rows(self) -> Tensor:
        rows, context = self._unpadded, cast(ReplicaContext, self.context)
        variables, _ = compiled_variables(self.model)
        compiled = compiled_loss(self.model)
        # Keras keeps a mean of each output's loss, weighted by the rows.
        factor = self._factor_of_means() * self.num_rows / (context.num_rows * context.num_replicas)
        with (
            keras.StatelessScope(_zeros(variables)) as scope,
            losses_of_whole_batch(factor),
            reducing_losses(self._share_of_loss),
        ):
            loss = None if compiled is None else compiled(rows.targets, rows.outputs, rows.sample_weight)
        self._note_changes("losses", variables, scope, True)
        loss = self._with_added(loss)
        self.sums.to_reduce["loss"] = ops.stop_gradient(loss) / context.num_replicas
        return loss

    def _share_of_loss(self, loss: keras.losses.Loss, targets: Any, outputs: Any, sample_weight: Any) -> Tensor:
        """Computes this replica's share of the global batch's `loss`, multiplied by the number of replicas.

        The code follows `keras.losses.Loss.__call__` and `reduce_weighted_values` of Keras 3.15. But the divisor of the
        loss counts the rows of all replicas.
        """
        context = cast(ReplicaContext, self.context)
        masks, dtype = [mask_of(outputs)], loss.dtype
        targets, outputs = _each(lambda leaf: ops.convert_to_tensor(leaf, dtype=dtype), (targets, outputs))
        values = loss.call(targets, outputs)
        if not len(values.shape) or values.shape[0] != context.num_rows:
            raise UserError(
                f"the loss {loss.name}, declared per_sample: expected a value for each of the {context.num_rows} "
                f"samples. Received: shape {tuple(values.shape)}; return values of shape (samples, ...)"
            )
        masks = [mask for mask in (*masks, mask_of(values)) if mask is not None]
        values = ops.convert_to_tensor(values, dtype=dtype)
        weights = None if sample_weight is None else ops.convert_to_tensor(sample_weight, dtype=dtype)
        if masks:
            mask = ops.cast(functools.reduce(ops.logical_and, masks), dtype)
            if loss.reduction != "sum" and loss.reduction != "mean_with_sample_weight":
                left = self._add_up(ops.stop_gradient(ops.sum(mask)))
                mask *= ops.divide_no_nan(ops.cast(self._num_values(mask), dtype), left)
            if weights is None:
                weights = mask
            else:
                mask, weights = of_same_rank(mask, weights)
                weights = weights * mask
        if weights is not None:
            values, weights = of_same_rank(values, weights)
            values = values * weights
        total = ops.sum(values) * context.num_replicas
        if loss.reduction == "sum":
            return total
        if loss.reduction == "mean_with_sample_weight" and weights is not None:
            return ops.divide_no_nan(total, self._add_up(ops.stop_gradient(ops.sum(weights))))
        return total / self._num_values(values)

    def _num_values(self, values: Tensor) -> int:
        """Returns the number of values in the global batch, computed from the shape of the replica's values."""
        return math.prod(values.shape[1:]) * self.num_rows

    def _note_changes(
        self, name: str, variables: list[keras.Variable], scope: keras.StatelessScope, is_to_reduce: bool
    ) -> None:
        sums = self.sums.to_reduce if is_to_reduce else self.sums.complete
        for place, variable in enumerate(variables):
            sums[f"{name}/{place}"] = ops.stop_gradient(ops.convert_to_tensor(scope.get_current_value(variable)))


def refuse_masks(model: keras.Model, outputs: Any) -> None:
    """Raises `UserError` if outputs of a micro-batch carry masks. With masks, the loss needs the whole batch."""
    if any(map(has_mask, keras.tree.flatten(outputs))):
        raise UserError(
            f"--accumulate: the outputs of {model.name} carry a mask, so the loss needs the whole batch at once; train "
            "without --accumulate"
        )


def _without_padding(padded: Data, context: ReplicaContext) -> Data:
    if context.num_rows == context.rows:  # the gradient of a slice would be a copy of all outputs
        return padded
    return Data(*(_each(lambda leaf: leaf[: context.num_rows], part) for part in padded))


def _zeros(variables: list[keras.Variable]) -> list[tuple[keras.Variable, Tensor]]:
    return [(variable, ops.zeros(variable.shape, variable.dtype)) for variable in variables]


def _each(function: Callable[[Tensor], Tensor] | None, data: Any) -> Any:
    """Calls a function on each tensor, and on the mask of each tensor. For None, the result is None."""
    if function is None:
        return data
    return keras.tree.map_structure(lambda leaf: None if leaf is None else with_mask(function, leaf), data)
