"""PyTorch: the steps of `fit`, `evaluate` and `predict` as functions of all variables' values, to be compiled.

A training step is one graph: forward pass, loss, gradients, their mean over the replicas, update and metrics.
"""

from typing import Any

import torch

from kerasdp.backends.base import DeviceBatch
from kerasdp.backends.steps import TrainedWeights, all_variables, learning_rate
from kerasdp.backends.torch.compiled_graphs import CompiledGraphs
from kerasdp.backends.torch.gradient_buckets import GradientBuckets
from kerasdp.backends.torch.train_step import ShardSteps, flat, unflat
from kerasdp.portability.replica_context import use
from kerasdp.runtime.run_state import Detail


class CompiledTraining:
    """Compiled training steps of one model."""

    def __init__(self, strategy: Any, model: Any, steps: ShardSteps):
        """Made once for each compiled model."""
        self.strategy, self.model, self.steps, self.weights = strategy, model, steps, TrainedWeights(model)
        self.variables = list({id(variable): variable for variable in all_variables(model)}.values())
        self.graphs = CompiledGraphs(strategy, model, "train", self._step, self.variables)

    def __call__(self, batch: DeviceBatch, detail: Detail) -> tuple[Any, Any, dict[str, Any], dict[str, Any]] | None:
        """Trains a step; returns loss, learning rate, Keras' logs and what `observed` recorded; None if it cannot."""
        # On torch Keras freezes a layer at once, with or without `compile`.
        return self.graphs(batch, detail, self.weights.key())

    def _step(self, values: list[torch.Tensor], data: Any, num_rows: int, detail: Detail) -> Any:
        """Runs a step that changes `values` in place, and no variable."""
        import keras

        from kerasdp.backends.observer import forward_pass, observed, watched_layers
        from kerasdp.keras_compat.optimizers import deciding_on_device, updating_one_by_one

        model, strategy = self.model, self.strategy
        inputs, targets, sample_weight = data
        batch = DeviceBatch(inputs, targets, sample_weight, range(num_rows))
        trained = {id(variable) for variable in model.trainable_weights}
        leaves = {
            id(variable): value.detach().requires_grad_()
            for variable, value in zip(self.variables, values)
            if id(variable) in trained
        }
        buckets = GradientBuckets(strategy, leaves)
        # What is assigned stays in the scope.
        begun = [(variable, leaves.get(id(variable), value)) for variable, value in zip(self.variables, values)]
        with torch.enable_grad(), keras.StatelessScope(begun, collect_losses=True) as passes:
            context = strategy.context(model, num_rows)
            with use(context), watched_layers(detail, model), forward_pass(detail, batch.inputs) as found:
                outputs = self.steps.forward(model, batch.inputs, context, training=True)
            whole = self.steps.global_batch(batch, outputs, context, training=True)
            scaled_loss = model.optimizer.scale_loss(whole.loss)
        with torch.no_grad():
            whole.share_metrics()
        variables = model.trainable_weights[:]
        wanted = [leaves[id(variable)] for variable in variables]
        own = torch.autograd.grad(scaled_loss, wanted, allow_unused=True) if wanted else ()
        gradients, shared = buckets.mean(own, variables, flat(whole.shared))
        between = [
            (variable, _unless_kept(value, id(variable) in trained, passes.get_current_value(variable)))
            for variable, value in zip(self.variables, values)
        ]
        with torch.no_grad(), keras.StatelessScope(between) as updates, updating_one_by_one(model.optimizer):
            loss = whole.take(unflat(shared, whole.shared))
            whole.move_statistics()
            seen = observed(detail, gradients, found)
            rate = learning_rate(model.optimizer)
            with deciding_on_device(model.optimizer):
                model.optimizer.apply(gradients, variables)
            logs = whole.update_metrics(loss)
        _write(self.variables, values, passes, updates)
        return loss, rate, logs, seen


class CompiledEvaluation:
    """Compiled steps of `evaluate` or `predict` of one model."""

    def __init__(self, strategy: Any, model: Any, steps: ShardSteps, name: str):
        """Made once for each compiled model. `name`: `test` or `predict`."""
        self.strategy, self.model, self.steps, self.name = strategy, model, steps, name
        known = [*model.variables, *(model.metrics_variables if name == "test" else ())]
        self.variables = list({id(variable): variable for variable in known}.values())
        self.graphs = CompiledGraphs(strategy, model, name, self._step, self.variables)

    def __call__(self, batch: DeviceBatch) -> Any:
        """Returns what `ShardSteps.test` or `predict` does; None if it cannot be compiled."""
        return self.graphs(batch)

    def _step(self, values: list[torch.Tensor], data: Any, num_rows: int, _: Detail) -> Any:
        import keras

        inputs, targets, sample_weight = data
        batch = DeviceBatch(inputs, targets, sample_weight, range(num_rows))
        context = self.strategy.context(self.model, num_rows)
        begun = list(zip(self.variables, values))
        with torch.no_grad(), keras.StatelessScope(begun, collect_losses=True) as scope:
            result = getattr(self.steps, self.name)(batch, context)
        with torch.no_grad():
            _write(self.variables, values, scope)
        return result


def _write(variables: list[Any], values: list[torch.Tensor], *scopes: Any) -> None:
    """Gives `values` what was assigned in these scopes, of which the last knows what holds.

    Raises:
        ValueError: if others are assigned than the model's: the graph would forget what.
    """
    assigned = {key for scope in scopes for key in scope.state_mapping}
    if unknown := assigned - {id(variable) for variable in variables}:
        raise ValueError(
            f"{len(unknown)} variables are assigned that are not the model's, as the seed of a keras.random call "
            "without a SeedGenerator"
        )
    for variable, value in zip(variables, values):
        new = scopes[-1].get_current_value(variable)
        if new is not value:
            value.copy_(new)


def _unless_kept(value: torch.Tensor, is_trained: bool, new: torch.Tensor) -> torch.Tensor:
    """Returns what the update sees of a variable: what the passes assigned; weights as they were."""
    return value if is_trained or new is value else new.detach()
