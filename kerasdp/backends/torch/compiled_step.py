"""PyTorch: captures the training step from Keras' Python as one graph, and compiles it with Inductor.

Forward pass, loss, gradients, their mean over the replicas, update and metrics: no Python runs between them. What Keras
does on torch (3.15: eager layer calls, or `torch.compile` of them, with a graph break at each layer) is slower.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kerasdp.backends.base import DeviceBatch
from kerasdp.backends.steps import TrainedWeights, all_variables, learning_rate
from kerasdp.backends.torch.gradient_buckets import GradientBuckets
from kerasdp.backends.torch.graph_passes import (
    fold_padding,
    keep_channels_last,
    refuse_exchanges,
    remove_layout_round_trips,
)
from kerasdp.backends.torch.private import (
    compile_error,
    compile_with_inductor,
    mark_static_addresses,
)
from kerasdp.backends.torch.train_step import ShardSteps, flat, unflat
from kerasdp.portability.replica_context import use
from kerasdp.reporting import report
from kerasdp.runtime.ranks import Processes

# Batches of many shapes (texts, say) would be compiled forever.
_MOST_GRAPHS = 8


class CompiledSteps:
    """Training steps of one model, a graph for each kind of batch.

    Attributes:
        reason: why there are none for the next kind of batch; empty if there may be.
    """

    def __init__(self, strategy: Any, model: Any, steps: ShardSteps):
        """Made once for each compiled model."""
        from kerasdp.keras_compat import all_layers

        self.strategy, self.model, self.steps = strategy, model, steps
        self.layers, self.weights = all_layers(model), TrainedWeights(model)
        self.variables = list({id(variable): variable for variable in all_variables(model)}.values())
        # Keras assigns in place, so these stay the variables' own memory.
        self.values = [variable.value.detach() for variable in self.variables]
        if strategy.is_gpu:
            mark_static_addresses(self.values)
        self.graphs: dict[Any, Callable[..., Any]] = {}
        self.reason = ""

    def __call__(self, batch: DeviceBatch, detail: Any) -> tuple[Any, Any, dict[str, Any], dict[str, Any]] | None:
        """Trains a step; returns loss, learning rate, Keras' logs and what `observed` recorded; None if it cannot."""
        import keras

        data = tuple(batch[:3])
        shapes = [None if leaf is None else (leaf.shape, leaf.dtype) for leaf in keras.tree.flatten(data)]
        # On torch Keras freezes a layer at once, with or without `compile`.
        key = (detail, len(batch.indices), self.weights.key(), *shapes)
        if key not in self.graphs:
            return self._first(key, data, detail)
        return self._run(self.graphs[key], data)

    def _run(self, graph: Callable[..., Any], data: Any) -> Any:
        with torch.no_grad():
            result = graph(self.values, data)
        if not self.strategy.is_gpu:
            return result
        import keras

        # A CUDA graph gives the same memory each time, and losses are read later.
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf.clone(), result)

    def _first(self, key: Any, data: Any, detail: Any) -> Any:
        if self.reason:
            return None
        if len(self.graphs) == _MOST_GRAPHS:
            self._give_up(f"batches of more than {_MOST_GRAPHS} shapes are not compiled")
            return None
        reason = ""
        try:
            graph = self._captured(data, detail, key[1])
        except Exception as error:  # whatever a layer's Python does with fake tensors
            reason = f"{_place(error)} cannot be captured as a graph ({_line(error)})"
        processes = self.strategy.processes
        if processes.any_rank(bool(reason)):  # or some ranks would wait for others in a step of another kind
            self._give_up(reason or "another rank cannot capture the step as a graph")
            return None
        compiler = _Compiler(
            processes,
            {
                # Inductor (2.13) takes every tensor of four axes for NCHW, and would permute Keras' NHWC.
                "layout_optimization": False,
                "triton.cudagraphs": self.strategy.is_gpu and self.strategy.num_replicas == 1,
            },
        )
        compiled = torch.compile(graph, backend=compiler, dynamic=False, fullgraph=True)
        try:
            result = self._run(compiled, data)
        except compile_error() as error:  # raised while compiling, before anything ran
            if not compiler.has_agreed:  # it was never called, and the other ranks wait for this one's answer
                processes.any_rank(True)
            self._give_up(f"the step cannot be compiled ({_line(compiler.error or error)})")
            return None
        self.graphs[key] = compiled
        return result

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        if self.strategy.processes.rank == 0:
            report.warn(f"{reason}: trained without --compile, which is slower")

    def _captured(self, data: Any, detail: Any, num_rows: int) -> torch.fx.GraphModule:
        import keras

        from kerasdp.keras_compat import updating_one_by_one

        for layer in self.layers:
            if isinstance(
                layer, keras.layers.TorchModuleWrapper
            ):  # its weights are torch parameters, not Keras variables
                raise ValueError(f"{layer.name} wraps a torch.nn.Module")

        def step(values: list[torch.Tensor], data: Any) -> Any:
            return self._step(values, data, detail, num_rows)

        with updating_one_by_one(self.model.optimizer), _unfiltered_tracebacks():
            graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(self.values, data)
        refuse_exchanges(graph.graph)
        remove_layout_round_trips(graph.graph)
        fold_padding(graph.graph)
        if self.strategy.num_replicas > 1:  # with one replica, batch norm is fused with what surrounds it
            keep_channels_last(graph.graph)
        graph.recompile()
        return graph

    def _step(self, values: list[torch.Tensor], data: Any, detail: Any, num_rows: int) -> Any:
        """Runs a step that changes `values` in place, and no variable."""
        import keras

        from kerasdp.backends.observer import forward_pass, observed, watched_layers

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
        with torch.no_grad(), keras.StatelessScope(between) as updates:
            loss = whole.take(unflat(shared, whole.shared))
            whole.move_statistics()
            seen = observed(detail, gradients, found)
            rate = learning_rate(model.optimizer)
            model.optimizer.apply(gradients, variables)
            logs = whole.update_metrics(loss)
        _refuse_others({*passes.state_mapping, *updates.state_mapping} - {id(variable) for variable in self.variables})
        for variable, value in zip(self.variables, values):
            new = updates.get_current_value(variable)
            if new is not value:
                value.copy_(new)
        return loss, rate, logs, seen


class _Compiler:
    """Compiles a graph with Inductor, and raises on all ranks if it raises on one.

    torch.compile calls it before the graph first runs: in that run, a rank that has a graph would wait in its first
    collective for one that has none.

    Attributes:
        has_agreed: whether it has been called.
        error: of this rank, or that there is one elsewhere.
    """

    def __init__(self, processes: Processes, options: dict[str, bool]):
        self.processes, self.options = processes, options
        self.has_agreed = False
        self.error: Exception | None = None

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor | int | torch.SymInt | None]
    ) -> Callable[..., Any]:
        self.error = None  # torch.compile (2.13) takes some for an order to begin anew, and calls this again
        try:
            compiled = compile_with_inductor(graph, inputs, self.options)
        except Exception as error:
            self.error = error
        self.has_agreed = True
        if self.processes.any_rank(self.error is not None):
            self.error = self.error or RuntimeError("on another rank")
            raise self.error
        return compiled


def _unless_kept(value: torch.Tensor, is_trained: bool, new: torch.Tensor) -> torch.Tensor:
    """Returns what the update sees of a variable: what the passes assigned; weights as they were."""
    return value if is_trained or new is value else new.detach()


@contextlib.contextmanager
def _unfiltered_tracebacks() -> Iterator[None]:
    """Lets errors keep the frames of the layers that they come from."""
    import keras

    was_filtering = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if was_filtering:
            keras.config.enable_traceback_filtering()


def _refuse_others(unknown: set[int]) -> None:
    """Raises if there are variables that are not the model's: the graph would forget what is assigned to them."""
    if unknown:
        raise ValueError(
            f"{len(unknown)} variables are assigned that are not the model's, as the seed of a keras.random call "
            "without a SeedGenerator"
        )


def _place(error: Exception) -> str:
    """Returns the innermost layer in whose call an error was raised, else the part of the step."""
    import keras

    place = "the training step"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.Model):
            place = f"the {frame.f_code.co_name} of {owner.name}"
        elif isinstance(owner, keras.layers.Layer):
            place = f"layer {owner.name}"
        elif isinstance(owner, (keras.metrics.Metric, keras.losses.Loss, keras.optimizers.Optimizer)):
            place = f"{type(owner).__name__} {owner.name}"
    return place


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
