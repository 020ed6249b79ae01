"""Defines the base classes and helper functions of the training steps of all backends."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kerasdp.contract import DeviceBatch, ShardPass, Structure, Tensor
from kerasdp.data.sampling import ReplicaRows, Split
from kerasdp.errors import UserError
from kerasdp.same.replica_context import ReplicaContext, use
from kerasdp.sharding import bytes_of

if TYPE_CHECKING:
    from kerasdp.step.global_batch import GlobalBatch


class DeviceScalar:
    """Holds one scalar of a tensor on the device, so that its value can be read later.

    One call may run several steps, and returns their losses as one tensor. Splitting the tensor would cost one call per
    loss.
    """

    def __init__(self, values: Tensor, index: int):
        self.values, self.index = values, index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import keras

        return np.asarray(keras.ops.convert_to_numpy(self.values)[self.index])

    def __float__(self) -> float:
        return float(self.__array__())

    def is_ready(self) -> bool:
        """Returns whether the device has computed the value. With PyTorch and TensorFlow, always returns True."""
        return getattr(self.values, "is_ready", lambda: True)()

    @classmethod
    def each(cls, values: Any, number: int) -> list[Any]:
        """Returns `number` objects, one for each scalar in `values`. If `values` is None, returns a list of Nones."""
        return [None if values is None else cls(values, index) for index in range(number)]


def all_variables(model: Any) -> list[Any]:
    """Returns the variables of a model, of its metrics and of its optimizer, without duplicates."""
    optimizer = getattr(model, "optimizer", None)  # there is none before `compile`
    found = *model.variables, *model.metrics_variables, *(optimizer.variables if optimizer is not None else [])
    return list({id(variable): variable for variable in found}.values())


def optimizers_of(model: Any) -> list[Any]:
    """Returns the optimizer given to `compile`, and the optimizers that a model holds for a user-defined step."""
    from kerasdp.checkpoint.names import names_in

    of_compile = getattr(model, "optimizer", None)
    return [*filter(None, [of_compile]), *(optimizer for _, optimizer in names_in(model).optimizers)]


def variables_of_own_step(model: Any) -> list[Any]:
    """Returns the variables that a user-defined step may change, including the variables of all optimizers."""
    slots = [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    return list({id(variable): variable for variable in (*all_variables(model), *slots)}.values())


def compared_variables(model: Any, state_only: bool) -> list[Any]:
    """Returns the variables of a model that are compared between replicas.

    With `state_only`, these are only the non-trainable variables.
    """
    return model.non_trainable_variables if state_only else model.variables


def held_in_words(model: Any, shard: str, num_devices: int) -> str:
    """Returns a text that says how many bytes of variables one device holds under `Config.shard`.

    The text is empty if each device holds all variables.
    """
    if shard == "none" or num_devices == 1:
        return ""
    slots = [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    parts = num_devices if shard == "weights" else 1
    held = bytes_of(model.weights, parts) + bytes_of(slots, num_devices)
    return f"a device holds {held:,} of {bytes_of((*model.weights, *slots)):,} bytes of weights and optimizer"


class TrainedWeights:
    """Detects which weights of a model are trainable now, since callbacks and scripts may freeze layers.

    If a layer is frozen, Keras (3.15) applies the change at once on torch, and only after the next `compile` on
    TensorFlow. On JAX, Keras fails.
    """

    def __init__(self, model: Any):
        """Collects the layers and weights of a model once.

        Without this list, each step would read `model.trainable_weights`, which visits all layers.
        """
        from kerasdp.keras_compat.layers import all_layers

        self._model = model
        self._parts = [*all_layers(model), *model.weights]
        self._known: set[tuple[bool, ...]] = set()

    def key(self) -> tuple[bool, ...]:
        """Returns a tuple that says for each layer and weight whether it is trainable now.

        Raises:
            UserError: if the optimizer was not built for a trainable weight.
        """
        key = tuple([part.trainable for part in self._parts])
        if key not in self._known:
            require_known_weights(self._model)
            self._known.add(key)
        return key


def require_known_weights(model: Any) -> None:
    """Raises `UserError` if the optimizer was not built for one of the trainable weights."""
    from kerasdp.keras_compat.optimizers import weights_unknown_to

    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return
    for weight in weights_unknown_to(optimizer, model.trainable_weights)[:1]:
        raise UserError(
            f"{weight.path} of {model.name} is trainable, but was frozen or did not exist when the optimizer was "
            "built; call model.compile again, with a new optimizer"
        )


def learning_rate(optimizer: Any) -> Any:
    """Returns the learning rate of the current step as a tensor, without waiting for the device.

    Call this function within the step, before the optimizer update.
    """
    import keras

    return keras.ops.convert_to_tensor(optimizer.learning_rate) * 1.0


class Pass(NamedTuple):
    """Describes one pass of a training step on a replica, over the batch or over a micro-batch.

    Attributes:
        batch: the replica's rows, with padding. The length of its indices is the number of real rows of all replicas.
        replicas: the rows of each replica in the batch or in the micro-batch.
        total_rows: the number of rows of the global batch, if this pass is over a micro-batch. None if this pass is
            over the whole batch.
        share: the weight of the micro-batch's loss in the loss of the global batch.
        is_last: whether this pass is the last pass of the step.
    """

    batch: DeviceBatch
    replicas: tuple[ReplicaRows, ...]
    total_rows: int | None = None
    share: float = 1.0
    is_last: bool = True


def add_gradients(sums: list[Tensor | None], gradients: list[Tensor | None]) -> None:
    """Adds the gradients of a micro-batch to `sums` in place. An entry is None if a weight has no gradient.

    The entries of `gradients` become None, so that each gradient is freed as soon as it is added.
    """
    for place, total in enumerate(sums):
        gradient, gradients[place] = gradients[place], None
        sums[place] = gradient if total is None else total if gradient is None else total + gradient


def restart_seeds(begun: list[tuple[Any, Tensor]]) -> None:
    """Resets seeds, so that the rows of a micro-batch get the same random values as in the whole batch.

    Args:
        begun: pairs of a seed variable and its value at the start of the step.
    """
    for seed, value in begun:
        seed.assign(value)


def require_leaves(weights: list[Any], assigned: list[Any]) -> None:
    """Raises `UserError` if a forward pass assigns to a trainable weight.

    The gradient would depend on the kind of step. A step in a `StatelessScope` differentiates with respect to the value
    before the assignment. A step that assigns in place differentiates with respect to the value after it.

    Args:
        weights: the trainable weights.
        assigned: the variables to which the forward pass assigned.
    """
    trained = set(map(id, weights))
    for variable in assigned:
        if id(variable) in trained:
            raise UserError(
                f"a layer assigns to the trainable weight {variable.path} in its call, so --backend=jax, --shard or "
                "--compile=on would change the gradient; assign to the weight in a callback, or train with "
                "--backend=torch or --backend=tensorflow, without --shard and --compile=on"
            )


# The record of a forward pass.
Found = dict[str, Any]
# Computes for a pass: the loss to differentiate, the loss and metrics of its rows, the record of the forward pass.
LossOfPass = Callable[[Pass], tuple[Tensor, "GlobalBatch", Found]]
# The gradient of each trained weight; None if a weight has no gradient.
Gradients = list[Tensor | None]
# Gradients, averaged over the replicas, and sums.
Received = tuple[Gradients, dict[str, Tensor]]


class Replica(abc.ABC):
    """Defines the operations of a replica that a training step needs: see `kerasdp.step.fit_step`.

    Attributes:
        model: the built model.
        module: the model or its wrapper. A training step computes the gradients of a call of `module`.
    """

    def __init__(self, model: Any):
        """Stores the model. Each compiled model has a separate `Replica`."""
        self.model = self.module = model

    @abc.abstractmethod
    def training_split(self) -> Split:
        """Returns how a training batch is split over replicas, and possibly into micro-batches."""

    @abc.abstractmethod
    def rows_of(self, leaf: Tensor, rows: slice, num_rows: int) -> Tensor:
        """Returns this replica's rows of a micro-batch.

        Args:
            leaf: a tensor with the replica's rows of a batch.
            rows: the slice of rows that belong to the micro-batch.
            num_rows: the number of rows of the micro-batch on all replicas.
        """

    def passes(self, batch: DeviceBatch) -> list[Pass]:
        """Returns the passes of a training step over this batch, in order."""
        import keras

        from kerasdp.step.global_batch import shares_of

        total_rows, is_weighted = len(batch.indices), batch.sample_weight is not None
        micro_batches = self.training_split().micro_batches(total_rows)
        if len(micro_batches) == 1:
            return [Pass(batch, micro_batches[0])]
        counts = [sum(each.num_rows for each in replicas) for replicas in micro_batches]
        shares = shares_of(self.model, counts, is_weighted=is_weighted, instead="leave out --accumulate")
        found, first = list[Pass](), 0
        for replicas, count, share in zip(micro_batches, counts, shares):
            rows = slice(first, first := first + replicas[0].size)
            inputs, targets, weights = keras.tree.map_structure(
                lambda leaf, rows=rows, count=count: None if leaf is None else self.rows_of(leaf, rows, count),
                tuple(batch[:3]),
            )
            own, is_last = DeviceBatch(inputs, targets, weights, range(count)), len(found) == len(counts) - 1
            found.append(Pass(own, replicas, total_rows, share, is_last))
        return found

    @abc.abstractmethod
    def context_of_pass(self, one: Pass) -> ReplicaContext | None:
        """Returns the `ReplicaContext` for a pass of a training step; None if each layer gets the whole batch."""

    @abc.abstractmethod
    def differentiate(self, compute: "LossOfPass", one: Pass) -> tuple[list[Tensor | None], "GlobalBatch", Found]:
        """Runs `compute` on a pass, and differentiates the loss that it returns.

        Returns:
            The gradients of the trainable weights, the `GlobalBatch` of the pass, and the record of the forward pass.
        """

    @abc.abstractmethod
    def all_reduce(self, gradients: Gradients, to_reduce: dict[str, Tensor]) -> Callable[[], Received]:
        """Averages gradients over the replicas, and sums the tensors of `to_reduce` over the replicas.

        Tensors that `differentiate` has already sent are not sent again.

        Returns:
            A function that returns the averages and the sums. The function sends nothing, and may be called again.
        """

    @abc.abstractmethod
    def update(self, update: Callable[[], None]) -> None:
        """Runs a function that assigns the new values of a step to the variables of this replica."""

    def wait_for(self, gradients: Gradients, one: Pass) -> Pass:
        """Returns the pass `one`. If needed, its inputs depend on `gradients`, so that it runs after them."""
        return one

    def whole_gradients(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Returns the full gradients. If each replica holds a shard of a gradient, the shards are gathered."""
        return gradients

    def add_up_passes(
        self, compute: "LossOfPass", passes: list[Pass]
    ) -> tuple[list[Tensor | None], "GlobalBatch", Found]:
        """Differentiates each pass of a step in order, and adds up the gradients and sums of the passes.

        See `differentiate` for the results.
        """
        from keras import ops

        from kerasdp.keras_compat.layers import seed_variables
        from kerasdp.step.global_batch import added

        if len(passes) == 1:
            return self.differentiate(compute, passes[0])
        seeds = [(seed, ops.copy(seed.value)) for seed in seed_variables(self.model)]
        gradients: list[Tensor | None] = [None for _ in self.model.trainable_weights]
        sums = None
        for one in passes:
            restart_seeds(seeds)
            own, global_batch, found = self.differentiate(compute, self.wait_for(gradients, one))
            add_gradients(gradients, own)
            sums = global_batch.sums = added(sums, global_batch.sums)
        return gradients, global_batch, found

    def scaled_loss(self, global_batch: "GlobalBatch") -> Tensor:
        """Returns the loss of the replica's rows for differentiation, after scaling by a `LossScaleOptimizer`."""
        divisor = self.loss_divisor()
        return self.model.optimizer.scale_loss(global_batch.loss if divisor == 1 else global_batch.loss / divisor)

    def loss_divisor(self) -> int:
        """Returns the number by which a replica divides its loss before differentiation."""
        return 1

    @abc.abstractmethod
    def add_up(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the replicas."""

    def forward(self, module: Any, inputs: Any, training: bool) -> Any:
        """Computes the outputs of the replica's rows with `module`, which is the model or its wrapper."""
        return module(inputs, **{"training": training} if "training" in self.model.call_signature_parameters else {})

    def global_batch(
        self, batch: DeviceBatch, outputs: Any, context: ReplicaContext | None, *, training: bool,
        total_rows: int | None = None, share: float = 1.0,
    ) -> "GlobalBatch":  # fmt: skip
        """Returns the `GlobalBatch` of a pass, with the loss from the outputs of the replica's rows.

        See `Pass` for `total_rows` and `share`.
        """
        from kerasdp.step.global_batch import Data, GlobalBatch

        inputs, targets, sample_weight, indices = batch
        return GlobalBatch(
            self.model,
            context,
            Data(inputs, targets, outputs, sample_weight),
            len(indices),
            training=training,
            add_up=self.add_up,
            total_rows=total_rows,
            share=share,
        )

    def loss_of_pass(self, one: Pass, outputs: Any, context: ReplicaContext | None) -> "GlobalBatch":
        """Returns the `GlobalBatch` of a training pass, with the loss from the outputs of the replica's rows."""
        return self.global_batch(one.batch, outputs, context, training=True, total_rows=one.total_rows, share=one.share)


class ShardSteps(Replica):
    """Runs the steps of a model on a replica's padded shard of a batch, and sums results over all replicas.

    Attributes:
        strategy: the strategy of the run.
        own: the names of the steps that the user defined for the model.
    """

    def __init__(self, strategy: Any, model: Any):
        """Stores the strategy and the model. Each compiled model has a separate object of this class."""
        from kerasdp.keras_compat.models import own_steps

        super().__init__(model)
        self.strategy, self.own = strategy, own_steps(model)

    @abc.abstractmethod
    def sums(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums tensors over the replicas, with at most one message for each dtype."""

    @abc.abstractmethod
    def own_step(self, name: str, batch: DeviceBatch, is_trial: bool = False) -> tuple[Any, Any]:
        """Runs a user-defined step. Returns Keras' logs and the records of a trial, both for the global batch."""

    def build_optimizer(self, optimizer: Any, variables: list[Any]) -> None:
        """Builds an optimizer once for all replicas of this process. Must be called within a replica."""
        optimizer.build(variables)

    @abc.abstractmethod
    def rank(self) -> int:
        """Returns the index of the replica."""

    @abc.abstractmethod
    def gather_statistics(self, statistics: Tensor, weight: float = 1.0) -> Tensor:
        """Stacks the tensors of all replicas along a new first axis: see `gather` of `ReplicaContext`."""

    @abc.abstractmethod
    def gather_shards(self, rows: Tensor, own: ReplicaRows, replicas: tuple[ReplicaRows, ...]) -> Tensor:
        """Gathers the rows of all replicas, without padding: see `replica_context.gather_shards`.

        The backward pass multiplies the gradient of this replica's rows by the number of replicas. So if all replicas
        compute a loss from the gathered rows, the mean of a weight's gradients over the replicas is the gradient of the
        global batch's loss.
        """

    def gather(self, outputs: Structure, num_rows: int) -> Structure:
        """Gathers the rows of all replicas. On axis 0, a tensor may hold several entries for each row.

        `num_rows` is the number of rows of the batch.
        """
        import keras

        if self.strategy.split.num_replicas == 1:
            return outputs
        replicas, rank = self.strategy.split.replicas(num_rows), self.rank()
        return keras.tree.map_structure(lambda rows: self.gather_shards(rows, replicas[rank], replicas), outputs)

    @abc.abstractmethod
    def largest(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Returns the elementwise maximum over the replicas of each tensor. For None, the result is None."""

    def next_values(self, gradients: list[Tensor | None], variables: list[Any]) -> list[Tensor | None]:
        """Returns the next values of float8 variables, combined over all replicas; None for all other variables.

        For a float8 variable, the gradient is the next value.
        """
        from kerasdp.keras_compat.layers import is_next_value

        return self.largest([each if is_next_value(variable) else None for each, variable in zip(gradients, variables)])

    def with_next_values(self, means: list[Tensor | None], next_values: list[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients of the global batch's loss, from averaged gradients and next values of variables.

        Args:
            means: the gradients, averaged over the replicas.
            next_values: the result of the method `next_values`.
        """
        divisor = self.loss_divisor()
        if divisor == 1:
            return means
        means = [None if mean is None else mean * divisor for mean in means]
        return [mean if value is None else value for mean, value in zip(means, next_values)]

    def loss_divisor(self) -> int:
        """Returns the number of replicas if the model trains in float8, else 1.

        The loss of a replica's rows is multiplied by the number of replicas, because gradients are averaged later. But
        float8 layers record how large gradients are. So with float8, the loss is divided by the number of replicas
        before differentiation. Later, `with_next_values` multiplies the averaged gradients by this number.
        """
        from kerasdp.keras_compat.layers import is_next_value

        return self.strategy.split.num_replicas if any(map(is_next_value, self.model.trainable_weights)) else 1

    def training_split(self) -> Split:
        """Returns how a training batch is split: see `Replica`."""
        return self.strategy.split

    def rows_of(self, leaf: Tensor, rows: slice, num_rows: int) -> Tensor:
        """Returns this replica's rows of a micro-batch: see `Replica`."""
        return leaf[rows]

    def context(
        self, batch: DeviceBatch, step: str = "call", replicas: tuple[ReplicaRows, ...] = (),
        total_rows: int | None = None,
    ) -> ReplicaContext | None:  # fmt: skip
        """Returns the `ReplicaContext` for a step on this batch; None for one replica without micro-batches.

        Args:
            batch: the replica's rows.
            step: the name of the step: see `row_layout_of`.
            replicas: see `Pass`.
            total_rows: see `Pass`.
        """
        from kerasdp.step.row_search import context_of

        if self.strategy.split.num_replicas == 1 and total_rows is None:
            return None
        num_rows = len(batch.indices)
        return context_of(
            self.model,
            step,
            self.rank(),
            replicas or self.strategy.split.replicas(num_rows),
            gather=self.gather_statistics,
            gather_rows=lambda rows: self.gather(rows, num_rows),
            total_rows=total_rows,
        )

    def context_of_pass(self, one: Pass) -> ReplicaContext | None:
        """Returns the `ReplicaContext` for a pass of a training step."""
        return self.context(one.batch, "call", one.replicas, one.total_rows)

    def test(self, batch: DeviceBatch) -> dict[str, Any]:
        """Evaluates the model on the global batch; returns Keras' logs."""
        if "test_step" in self.own:
            return self.own_step("test_step", batch)[0]
        with use(self.context(batch)) as context:
            outputs = self.forward(self.model, batch.inputs, training=False)
        global_batch = self.global_batch(batch, outputs, context, training=False)
        global_batch.count_metrics()
        return global_batch.update_metrics(global_batch.store_sums(self.sums(global_batch.sums.to_reduce)))

    def predict(self, batch: DeviceBatch) -> Any:
        """Computes the outputs of the global batch."""
        from kerasdp.keras_compat.models import as_keras_gives

        if "predict_step" in self.own:
            with use(self.context(batch, "predict_step")):
                outputs = self.model.predict_step(as_keras_gives((batch.inputs, None, None)))
            return self.gather(outputs, len(batch.indices))
        with use(self.context(batch)) as context:
            outputs = self.forward(self.model, batch.inputs, training=False)
            return outputs if context is None else context.whole_outputs(outputs)

    def shard_of(self, batch: DeviceBatch) -> DeviceBatch:
        """Returns this replica's rows of a batch that `shard_batch` returned."""
        return batch

    def try_own_step(self, batch: DeviceBatch) -> list[tuple[str, Any]]:
        """Runs the model's custom `train_step` on this replica's rows, without an update.

        Args:
            batch: a batch that `shard_batch` returned.

        Returns:
            The records of the trial: see `kerasdp.step.custom_steps.Share`.
        """
        return self.own_step("train_step", self.shard_of(batch), is_trial=True)[1]

    def shard_pass(self, batch: DeviceBatch, with_loss: bool) -> ShardPass:
        """Runs a training forward pass on this replica's rows. No variable changes.

        Args:
            batch: a batch that `shard_batch` returned.
            with_loss: whether to compute the loss.
        """
        import keras

        from kerasdp.step.observer import shard_outputs
        from kerasdp.step.row_search import fixed_values

        batch, own = self.shard_of(batch), self.strategy.split.replicas(len(batch.indices))[self.rank()]
        with keras.StatelessScope(fixed_values(self.model), collect_losses=True):
            with use(self.context(batch)) as context, shard_outputs(self.model) as layers:
                outputs = self.forward(self.model, batch.inputs, training=True)
            if not with_loss:
                return ShardPass(layers, keras.tree.flatten(outputs), keras.ops.zeros(()), *own)
            global_batch = self.global_batch(batch, outputs, context, training=True)
            loss = global_batch.store_sums(self.sums(global_batch.sums.to_reduce))
        outputs = outputs if global_batch.is_of_own_rows else global_batch.whole().outputs
        return ShardPass(layers, keras.tree.flatten(outputs), loss, *own)
