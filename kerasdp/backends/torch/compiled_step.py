"""PyTorch: captures the steps of `fit`, `evaluate` and `predict` as one graph each, and compiles it with Inductor.

A training step is one graph: forward pass, loss, gradients, their mean over the replicas, update and metrics. No Python
runs between the operations. What Keras does on torch (3.15: eager layer calls, or `torch.compile` of them, with a graph
break at each layer) is slower.
"""

import abc
import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kerasdp.backends.torch.gradients import detached
from kerasdp.backends.torch.graph_passes import (
    bring_to_device,
    keep_channels_last,
    number_messages,
    overlap_parts,
    refuse_draws,
    refuse_exchanges,
)
from kerasdp.backends.torch.private import (
    all_reduce_async,
    compile_with_inductor,
    wait,
)
from kerasdp.backends.torch.train_step import RankSteps, flat, unflat
from kerasdp.backends.torch.update import updating
from kerasdp.contract import DeviceBatch
from kerasdp.processes import watchdog
from kerasdp.processes.error_text import in_a_line
from kerasdp.reporting import report
from kerasdp.run_state import Detail
from kerasdp.step.fit_step import fit_step
from kerasdp.step.replica import (
    Found,
    Gradients,
    LossOfPass,
    Pass,
    Received,
    TrainedWeights,
    all_variables,
    optimizers_of,
    require_leaves,
    variables_of_own_step,
)

# Batches of many shapes (texts, say) would be compiled forever.
_MOST_GRAPHS = 8


class CompiledStep(abc.ABC):
    """One step of one model, compiled: a graph for each kind of batch.

    Attributes:
        name: of the step: `train`, `test` or `predict`.
        variables: that the step reads or changes.
        reason: why there is no graph for the next kind of batch; empty if there may be.
    """

    def __init__(self, strategy: Any, steps: RankSteps, name: str, variables: list[Any], parts: Any = None):
        """Made once for each compiled model; `parts`: what this process holds parts of, if it does."""
        from kerasdp.keras_compat.layers import raw_value

        self.strategy, self.steps, self.name, self.variables = strategy, steps, name, variables
        self.parts, self.model, self.weights = parts, steps.model, TrainedWeights(steps.model)
        # Keras assigns in place, so these stay the variables' own memory.
        self.values = [raw_value(variable).detach() for variable in variables]
        self.graphs: dict[Any, tuple[Callable[..., Any], Any]] = {}
        self.reason = ""

    @abc.abstractmethod
    def step(self, values: list[torch.Tensor], batch: DeviceBatch, detail: Detail) -> Any:
        """Runs the step on this process's rows; changes `values`, of the variables, in place, and no variable.

        `detail`: how much is recorded.
        """

    def kind(self) -> Any:
        """Returns which weights are trained: on torch Keras freezes a layer at once, with or without `compile`."""
        return self.weights.key() if self.name == "train" else None

    def uncompiled(self, batch: DeviceBatch, detail: Detail = Detail.NOTHING) -> Any:
        """Runs the step operation by operation."""
        self.kind()  # refuses weights that the optimizer does not know
        return self.step(self.values, batch, detail)

    def scope(self, values: list[tuple[Any, torch.Tensor]]) -> Any:
        """Returns the scope of a step's passes, in which variables have these values; see `Parts.scope`."""
        import keras

        return keras.StatelessScope(values, collect_losses=True) if self.parts is None else self.parts.scope(values)

    def write(self, values: list[torch.Tensor], scope: Any) -> None:
        """Gives `values` what was assigned in a scope.

        Raises:
            ValueError: if others are assigned than the model's: the graph would forget what.
        """
        if unknown := scope.state_mapping.keys() - {id(variable) for variable in self.variables}:
            raise ValueError(
                f"{len(unknown)} variables are assigned that are not the model's, as the seed of a keras.random call "
                "without a SeedGenerator"
            )
        changed = [
            (variable, value, detached(new))
            for variable, value in zip(self.variables, values)
            if (new := scope.state_mapping.get(id(variable), value)) is not value
        ]
        for _, value, new in changed if self.parts is None else self.parts.take(changed):
            value.copy_(new)

    def __call__(self, batch: DeviceBatch, detail: Detail = Detail.NOTHING) -> Any:
        """Runs the step on a batch; returns its result, or None if it cannot be compiled."""
        import keras

        parts = keras.tree.flatten(tuple(batch[:3]))
        leaves = [leaf for leaf in parts if leaf is not None]
        shapes = [None if leaf is None else (leaf.shape, leaf.dtype) for leaf in parts]
        key = (detail, len(batch.indices), self.strategy.split.micro_batch_rows, self.kind(), *shapes)
        if key not in self.graphs and not self.reason:
            with watchdog.current.compiling():
                self._compile(key, batch, detail, leaves)
        if key not in self.graphs:
            return None
        graph, result = self.graphs[key]
        found = graph(*self.values, *leaves)
        if self.strategy.is_gpu:  # a CUDA graph gives the same memory each time, and losses are read later
            found = [tensor.clone() for tensor in found]
        return _filled(result, found)

    def _compile(self, key: Any, batch: DeviceBatch, detail: Detail, leaves: list[torch.Tensor]) -> None:
        """Compiles the step for a kind of batch, on all ranks; sets `reason` if one cannot."""
        if len(self.graphs) == _MOST_GRAPHS:
            self._give_up(f"batches of more than {_MOST_GRAPHS} shapes are not compiled")
            return
        reason, any_rank, begun = "", self.strategy.processes.any_rank, time.monotonic()
        try:
            graph, result = self._captured(batch, detail, leaves)
        except Exception as error:  # whatever a layer's Python does with fake tensors
            reason = f"{_place(error)} cannot be captured as a graph: {in_a_line(error, 1)}"
            # cuDNN's kernel of LSTM and GRU cannot be differentiated without its buffer of weights, of which a capture
            # (torch 2.13) knows nothing. It is as fast as a graph of all of its steps.
            if "weight_buf" in str(error):
                reason = f"a recurrent layer of {self.model.name} runs by cuDNN's own kernel, which no graph holds"
        # What Inductor (torch 2.13) takes on CPUs, for nets of 2 to 24 blocks, where its cache has nothing.
        watchdog.current.seconds_to_compile = 20 + 14 * (time.monotonic() - begun)
        if any_rank(bool(reason)):  # or some ranks would wait for others in a step of another kind
            self._give_up(reason or "another rank cannot capture the step as a graph")
            return
        try:
            compiled = compile_with_inductor(
                graph, [*self.values, *leaves], len(self.values), inductor_options(self.strategy)
            )
        except Exception as error:
            reason = in_a_line(error, 0)
        if any_rank(bool(reason)):
            self._give_up(f"the step cannot be compiled ({reason or 'on another rank'})")
            return
        self.graphs[key] = compiled, result

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        if self.strategy.processes.rank == 0:
            report.warn(f"{reason}: {self.name} runs without --compile, which is slower")

    def _captured(
        self, batch: DeviceBatch, detail: Detail, leaves: list[torch.Tensor]
    ) -> tuple[torch.fx.GraphModule, Any]:
        """Returns the step as a graph of the variables' values and these leaves of the batch.

        Also returns the structure of the step's result. The graph returns its tensors as a flat tuple.
        """
        import keras

        from kerasdp.keras_compat.layers import all_layers

        for layer in all_layers(self.model):  # whose weights are torch parameters, not Keras variables
            if isinstance(layer, keras.layers.TorchModuleWrapper):
                raise ValueError(f"{layer.name} wraps a torch.nn.Module")

        num_values = len(self.values)
        results = list[Any]()

        def step(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # What is written to a float64 without axes, `aot_autograd` (torch 2.13) loses, since it takes it for a
            # Python number. Not what is written to a view of it.
            values = [value if value.ndim else value.view(()) for value in inputs[:num_values]]
            data = _filled(tuple(batch[:3]), inputs[num_values:])
            inputs_of_step = DeviceBatch(data[0], data[1], data[2], range(len(batch.indices)))
            results.append(self.step(values, inputs_of_step, detail))
            return tuple(leaf for leaf in keras.tree.flatten(results[0]) if leaf is not None)

        graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*self.values, *leaves)
        refuse_exchanges(graph.graph)
        refuse_draws(graph.graph)
        if self.strategy.split.num_replicas > 1:  # with one replica, batch norm is fused with what surrounds it
            keep_channels_last(graph.graph)
        if self.strategy.is_gpu:
            self._bring_to_device(graph)
        if self.parts is not None:
            overlap_parts(graph.graph)
        number_messages(graph.graph)
        graph.recompile()
        return graph, keras.tree.map_structure(lambda leaf: None if leaf is None else 0, results[0])

    def _bring_to_device(self, graph: torch.fx.GraphModule) -> None:
        left = bring_to_device(graph, self.strategy.device)
        if left and not self.graphs and self.strategy.processes.rank == 0:
            report.warn(
                f"each compiled step of {self.model.name} waits for the CPU, for {', '.join(dict.fromkeys(left))}: "
                "make tensors by keras.ops, which computes on the GPU"
            )


class CompiledTraining(CompiledStep):
    """Compiled training steps of a model: each gives loss, learning rate, Keras' logs and what `observed` recorded."""

    def __init__(self, strategy: Any, steps: RankSteps, parts: Any = None):
        super().__init__(strategy, steps, "train", all_variables(steps.model), parts)

    def step(self, values: list[torch.Tensor], batch: DeviceBatch, detail: Detail) -> Any:
        """See `CompiledStep`."""
        replica = RankInGraph(self, values)
        with torch.no_grad(), self.scope(replica.begun) as replica.scope:
            trained = fit_step(replica, batch, detail)
        self.write(values, replica.scope)
        return tuple(trained)


class RankInGraph(RankSteps):
    """Runs one training step on given values of the variables, in a scope that holds what is assigned.

    Attributes:
        begun: the variables with these values; weights that are trained as leaves.
        scope: is set once there is one.
    """

    scope: Any

    def __init__(self, compiled: CompiledTraining, values: list[torch.Tensor]):
        from kerasdp.keras_compat.layers import is_next_value

        super().__init__(compiled.strategy, compiled.model)
        self.parts, self._variables, self._values = compiled.parts, compiled.variables, values
        self._trained = {id(variable) for variable in self.model.trainable_weights}
        leaves = {
            id(variable): value.detach().requires_grad_()
            for variable, value in zip(self._variables, values)
            if id(variable) in self._trained
        }
        self.begun = [(variable, leaves.get(id(variable), value)) for variable, value in zip(self._variables, values)]
        self._leaves = [leaves[id(variable)] for variable in self.model.trainable_weights]
        own = {id(each) for each in self.model.trainable_weights if is_next_value(each)}
        if self.parts is not None and self.parts.holds_weights:
            own |= self.parts.axes.keys()  # of these the backward pass gives this process its own part of the mean
        self._buckets = GradientBuckets(self.strategy.split.num_replicas, own, self.parts)

    def differentiate(self, compute: LossOfPass, one: Pass) -> tuple[list[torch.Tensor | None], Any, Found]:
        """See `Replica`. With one pass, gradients are sent as they come."""
        from kerasdp.keras_compat.layers import InnerScope

        variables = self.model.trainable_weights
        if one.total_rows is None:
            self._buckets.register_hooks({id(each): leaf for each, leaf in zip(variables, self._leaves)})
        with torch.enable_grad(), InnerScope() as scope:
            loss, global_batch, found = compute(one)
        require_leaves(variables, scope.assigned)
        gradients: list[Any] = []
        if variables:
            gradients = list(torch.autograd.grad(loss, self._leaves, allow_unused=True))
        scope.write_back(list(map(detached, scope.assigned_values())))  # without what led to them
        return gradients, global_batch, found

    def all_reduce(self, gradients: Gradients, to_reduce: dict[str, torch.Tensor]) -> Callable[[], Received]:
        """See `Replica`."""
        variables = self.model.trainable_weights
        if not self._buckets.has_hooks:
            self._buckets.take({id(variable): gradient for variable, gradient in zip(variables, gradients)})
        means, sums = self._buckets.mean(gradients, variables, flat(to_reduce))
        if self.strategy.split.num_replicas > 1:
            means = self.with_next_values(means, self.next_values(means, variables))
        received = means, unflat(sums, to_reduce)
        return lambda: received

    def whole_gradients(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """See `Replica`."""
        return gradients if self.parts is None else self.parts.whole_gradients(gradients)

    def update(self, update: Callable[[], None]) -> None:
        """See `Replica`. This rank updates its parts, if it has parts."""
        from kerasdp.keras_compat.layers import InnerScope

        optimizer, scope = self.model.optimizer, self.scope
        values = [
            (variable, value if id(variable) in self._trained else scope.state_mapping[id(variable)])
            for variable, value in zip(self._variables, self._values)
        ]
        with contextlib.ExitStack() as stack:
            if self.parts is not None:
                values = [(variable, self.parts.own(variable, value)) for variable, value in values]
                stack.enter_context(self.parts.updating(optimizer))
            stack.enter_context(updating(optimizer))
            updated = stack.enter_context(InnerScope(values))
            update()
        # Not `assign`, which takes no parts; and of all: Keras (3.15) changes values of an eager step in place.
        for variable, _ in values:
            scope.state_mapping[id(variable)] = updated.get_current_value(variable)


class CompiledOwnStep(CompiledStep):
    """Compiled user-defined training steps of a model, whose gradients are those of `kerasdp.value_and_grad`."""

    def __init__(self, strategy: Any, steps: RankSteps):
        super().__init__(strategy, steps, "train", variables_of_own_step(steps.model))
        self.optimizers = optimizers_of(steps.model)

    def step(self, values: list[torch.Tensor], batch: DeviceBatch, detail: Detail) -> Any:
        """See `CompiledStep`."""
        from kerasdp.keras_compat.layers import InnerScope

        begun = zip(self.variables, values)
        with torch.no_grad(), InnerScope(begun) as scope, contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(updating(optimizer))
            logs, _ = self.steps.own_step("train_step", batch)
        with torch.no_grad():
            self.write(values, scope)
        return logs.get("loss"), None, logs, {}


class CompiledEvaluation(CompiledStep):
    """Compiled steps of `evaluate` or `predict` of one model: `test` or `predict` of `RankSteps`."""

    def __init__(self, strategy: Any, steps: RankSteps, name: str, parts: Any = None):
        model = steps.model
        super().__init__(
            strategy, steps, name, [*model.variables, *(model.metrics_variables if name == "test" else ())], parts
        )

    def step(self, values: list[torch.Tensor], batch: DeviceBatch, detail: Detail) -> Any:
        """See `CompiledStep`."""
        with torch.no_grad():
            with self.scope(list(zip(self.variables, values))) as scope:
                result = getattr(self.steps, self.name)(batch)
            self.write(values, scope)
        return result


def inductor_options(strategy: Any) -> dict[str, bool]:
    """Returns the options of Inductor (2.13)."""
    # It takes every tensor of four axes for NCHW, and would permute Keras' NHWC.
    options = {"layout_optimization": False}
    if strategy.is_gpu and (strategy.split.num_replicas == 1 or strategy.config.compile == "cudagraphs"):
        # Its first run warms up, the second records, the others replay: on all ranks alike, so NCCL's messages in it
        # meet. Not seen on several GPUs yet, and so only where it is asked for.
        options["triton.cudagraphs"] = True
    if strategy.is_gpu and (strategy.split.num_replicas > 1 or strategy.config.deterministic):
        # It times several ways to sum, and to multiply with padding, and takes the fastest: another one in a resumed
        # run, or on another rank, whose weights would differ from then on.
        options["deterministic"] = True
    return options


def _filled(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Returns a structure with other tensors, in the order in which `keras.tree.flatten` gives them; None stays None.

    `keras.tree.map_structure` (3.15) goes through a dictionary in another order.
    """
    import keras

    given = iter(tensors)
    leaves = [None if leaf is None else next(given) for leaf in keras.tree.flatten(structure)]
    return keras.tree.pack_sequence_as(structure, leaves)


def _place(error: Exception) -> str:
    """Returns the innermost layer in whose call an error was raised, if it is known."""
    import keras

    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    layers = [owner.name for owner in owners if isinstance(owner, keras.layers.Layer)]
    return f"layer {layers[-1]}" if layers else "the step"


# The bucket size of DistributedDataParallel.
_BUCKET_BYTES = 25 * 2**20
# In the place of a variable's `id`: what is sent beside gradients.
_TO_REDUCE = 0


class GradientBuckets:
    """Averages gradients across replicas in buckets, overlapping with the backward pass."""

    def __init__(self, num_replicas: int, own: set[int], parts: Any = None):
        """Takes no gradients yet.

        Args:
            num_replicas: of the run.
            own: the variables whose gradients are not averaged, by `id`.
            parts: that are averaged, if any.
        """
        self.num_replicas, self.own, self.parts, self.has_hooks = num_replicas, own, parts, False
        # What waits to be sent, by the id of the variable: gradients that are cut, and all others.
        self.buckets: dict[bool, list[tuple[int, torch.Tensor]]] = {False: [], True: []}
        # Of each bucket that was sent: the ids, and a function that waits for the means.
        self.sent: list[tuple[Sequence[int], Callable[[], list[torch.Tensor]]]] = []

    def register_hooks(self, leaves: dict[int, torch.Tensor]) -> None:
        """Hooks itself to the leaves: the next backward pass gives each gradient as soon as it has it.

        It does not keep the leaves: their hooks refer to it, and gradients in a cycle stay until Python collects it.
        """
        self.has_hooks = True
        for key, leaf in leaves.items():
            leaf.register_hook(lambda gradient, key=key: self.take({key: gradient}))

    def take(self, gradients: dict[int, torch.Tensor | None]) -> None:
        """Takes gradients by the id of their variable; sends those that fill a bucket."""
        for key, gradient in gradients.items() if self.num_replicas > 1 else ():
            if gradient is None or key in self.own:
                continue
            if self.parts is not None and key in self.parts.axes:
                self._add(True, key, gradient)
            else:
                self._add(False, key, gradient / self.num_replicas)

    def _add(self, is_cut: bool, key: int, tensor: torch.Tensor) -> None:
        bucket = self.buckets[is_cut]
        if bucket and bucket[0][1].dtype != tensor.dtype:
            self._send(is_cut)
        self.buckets[is_cut].append((key, tensor))
        if sum(waiting.nbytes for _, waiting in self.buckets[is_cut]) >= _BUCKET_BYTES:
            self._send(is_cut)

    def _send(self, is_cut: bool) -> None:
        if not self.buckets[is_cut]:
            return
        keys, tensors = zip(*self.buckets[is_cut])
        self.buckets[is_cut] = []
        if is_cut and self.parts is not None:
            axes = [self.parts.axes[key] for key in keys]
            take = self.parts.average(tensors, axes, tensors[0].dtype)
        else:
            take = functools.partial(_sums, all_reduce_async(torch.cat([one.reshape(-1) for one in tensors])), tensors)
        self.sent.append((keys, take))

    def mean(
        self, gradients: list[torch.Tensor | None], variables: list[Any], to_reduce: torch.Tensor | None
    ) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
        """Returns the averaged gradients of these variables, and the sum of `to_reduce`.

        `to_reduce` is sent together with the last gradients: each collective costs a wait for all ranks.
        """
        if self.num_replicas == 1:
            return gradients, to_reduce
        if to_reduce is not None:
            self._add(False, _TO_REDUCE, to_reduce)
        self._send(False)
        self._send(True)
        own = {id(variable): gradient for variable, gradient in zip(variables, gradients) if id(variable) in self.own}
        found: dict[int, Any] = own | {key: mean for keys, take in self.sent for key, mean in zip(keys, take())}
        return [found.get(id(variable)) for variable in variables], found.get(_TO_REDUCE)


def _sums(sent: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Waits for the sums of tensors that were joined and sent."""
    parts = wait(sent).split([tensor.numel() for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors)]
