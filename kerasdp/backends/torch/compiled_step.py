"""Captures each step of `fit`, `evaluate` and `predict` as one graph on torch, and compiles the graph with Inductor.

The graph of a training step contains the forward pass, the loss, the gradients, their average over the replicas, the
update and the metrics. No Python code runs between these operations. Without this module, Keras (3.15) runs layers
eagerly on torch, or uses `torch.compile` with a graph break at each layer. Both ways are slower.
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
    """Compiles one step of a model. Each kind of batch, with its shapes and dtypes, gets a separate graph.

    Attributes:
        name: the name of the step: `train`, `test` or `predict`.
        variables: the variables that the step reads or changes.
        reason: why the object makes no more graphs. An empty string: it may make more graphs.
    """

    def __init__(self, strategy: Any, steps: RankSteps, name: str, variables: list[Any], parts: Any = None):
        """Stores the variables and their tensors. The first call of the object makes the first graph.

        After each `compile`, the model needs a new object.

        Args:
            strategy: the strategy of the run.
            steps: the uncompiled steps of the model.
            name: the name of the step: `train`, `test` or `predict`.
            variables: the variables that the step reads or changes.
            parts: the sharded variables, or None if no variables are sharded.
        """
        from kerasdp.keras_compat.layers import raw_value

        self.strategy, self.steps, self.name, self.variables = strategy, steps, name, variables
        self.parts, self.model, self.weights = parts, steps.model, TrainedWeights(steps.model)
        # Keras assigns in place, so these stay the variables' own memory.
        self.values = [raw_value(variable).detach() for variable in variables]
        self.graphs: dict[Any, tuple[Callable[..., Any], Any]] = {}
        self.reason = ""

    @abc.abstractmethod
    def step(self, values: list[torch.Tensor], batch: DeviceBatch, detail: Detail) -> Any:
        """Runs the step on this process's rows. Changes the tensors in `values` in place, and changes no variable.

        Args:
            values: the values of the variables.
            batch: this process's rows.
            detail: how much the step records.
        """

    def kind(self) -> Any:
        """Returns a key of the currently trainable weights, or None if the step does not train.

        On torch, Keras freezes a layer immediately, without another call of `compile`.
        """
        return self.weights.key() if self.name == "train" else None

    def uncompiled(self, batch: DeviceBatch, detail: Detail = Detail.NOTHING) -> Any:
        """Runs the step eagerly, without a graph."""
        self.kind()  # raises for weights that the optimizer does not know
        return self.step(self.values, batch, detail)

    def scope(self, values: list[tuple[Any, torch.Tensor]]) -> Any:
        """Returns a stateless scope in which the variables have the given values.

        See `kerasdp.scale.torch_shards.Parts.scope` for sharded variables.
        """
        import keras

        return keras.StatelessScope(values, collect_losses=True) if self.parts is None else self.parts.scope(values)

    def write(self, values: list[torch.Tensor], scope: Any) -> None:
        """Copies all values that a step assigned to variables from the scope to the tensors in `values`.

        Raises:
            ValueError: if the step assigned to variables that do not belong to the model. A graph would lose their
                values.
        """
        if unknown := scope.state_mapping.keys() - {id(variable) for variable in self.variables}:
            raise ValueError(
                f"the step changes {len(unknown)} variables that do not belong to the model, for example the seed of a "
                "keras.random call without a SeedGenerator; make them attributes of the model"
            )
        changed = [
            (variable, value, detached(new))
            for variable, value in zip(self.variables, values)
            if (new := scope.state_mapping.get(id(variable), value)) is not value
        ]
        for _, value, new in changed if self.parts is None else self.parts.take(changed):
            value.copy_(new)

    def __call__(self, batch: DeviceBatch, detail: Detail = Detail.NOTHING) -> Any:
        """Runs the compiled step on a batch. Returns the result of the step, or None if the step cannot be compiled."""
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
        """Compiles the step for one kind of batch, on all ranks together.

        If any rank cannot compile the step, this method sets `reason` on all ranks, and no rank uses the graph.
        """
        if len(self.graphs) == _MOST_GRAPHS:
            self._give_up(f"more than {_MOST_GRAPHS} shapes of batches occur; pad all batches to a few shapes")
            return
        reason, any_rank, begun = "", self.strategy.processes.any_rank, time.monotonic()
        try:
            graph, result = self._captured(batch, detail, leaves)
        except Exception as error:  # whatever a layer's Python does with fake tensors
            reason = f"{_place(error)} cannot be captured as a graph: {in_a_line(error, 1)}"
            # The gradient of cuDNN's kernel for LSTM and GRU needs its buffer of weights, which a capture (torch 2.13)
            # does not know. The kernel is as fast as a graph of all time steps.
            if "weight_buf" in str(error):
                reason = f"a recurrent layer of {self.model.name} uses cuDNN's kernel, which a graph cannot contain"
        # The time that Inductor (torch 2.13) takes on CPUs for nets of 2 to 24 blocks, with an empty cache.
        watchdog.current.seconds_to_compile = 20 + 14 * (time.monotonic() - begun)
        if any_rank(bool(reason)):  # otherwise ranks with different kinds of steps would wait for each other
            self._give_up(reason or "another rank cannot capture the step as a graph")
            return
        try:
            compiled = compile_with_inductor(
                graph, [*self.values, *leaves], len(self.values), inductor_options(self.strategy)
            )
        except Exception as error:
            reason = in_a_line(error, 0)
        if any_rank(bool(reason)):
            self._give_up(f"Inductor cannot compile the step: {reason or 'see the error of another rank'}")
            return
        self.graphs[key] = compiled, result

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        if self.strategy.processes.rank == 0:
            report.warn(f"--compile: {self.name} steps are not compiled, so they run slower. Reason: {reason}")

    def _captured(
        self, batch: DeviceBatch, detail: Detail, leaves: list[torch.Tensor]
    ) -> tuple[torch.fx.GraphModule, Any]:
        """Captures the step as a graph. The graph's inputs are the variables' values, then the leaves of the batch.

        Returns:
            The graph and the structure of the step's result. The graph returns the tensors of this result as a flat
            tuple.
        """
        import keras

        from kerasdp.keras_compat.layers import all_layers

        for layer in all_layers(self.model):  # whose weights are torch parameters, not Keras variables
            if isinstance(layer, keras.layers.TorchModuleWrapper):
                raise ValueError(f"{layer.name} wraps a torch.nn.Module; use a Keras layer instead")

        num_values = len(self.values)
        results = list[Any]()

        def step(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # `aot_autograd` (torch 2.13) takes a float64 without axes for a Python number, and loses writes to it. It
            # keeps writes to a view.
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
                f"each compiled step of {self.model.name} waits for CPU operations: {', '.join(dict.fromkeys(left))}"
                "; create tensors with keras.ops, which creates them on the GPU"
            )


class CompiledTraining(CompiledStep):
    """Compiles training steps of a model.

    Each step returns the loss, the learning rate, Keras' logs and the recorded values.
    """

    def __init__(self, strategy: Any, steps: RankSteps, parts: Any = None):
        super().__init__(strategy, steps, "train", all_variables(steps.model), parts)

    def step(self, values: list[torch.Tensor], batch: DeviceBatch, detail: Detail) -> Any:
        """Runs a training step (`fit_step`) on this process's rows. See `CompiledStep.step`."""
        replica = RankInGraph(self, values)
        with torch.no_grad(), self.scope(replica.begun) as replica.scope:
            trained = fit_step(replica, batch, detail)
        self.write(values, replica.scope)
        return tuple(trained)


class RankInGraph(RankSteps):
    """Runs one training step. Given tensors replace the variables' values, and `scope` collects the assigned values.

    Attributes:
        begun: pairs of a variable and its value at the start of the step. The step computes gradients with respect to
            the values of the trainable weights.
        scope: the scope of the step. The caller sets this attribute.
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
            own |= self.parts.axes.keys()  # their backward pass returns this process's shard of the mean
        self._buckets = GradientBuckets(self.strategy.split.num_replicas, own, self.parts)

    def differentiate(self, compute: LossOfPass, one: Pass) -> tuple[list[torch.Tensor | None], Any, Found]:
        """Computes the gradients of one pass.

        If the step has a single pass, each gradient is sent to the other ranks as soon as it is computed.
        """
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
        scope.write_back(list(map(detached, scope.assigned_values())))  # without their graph of gradients
        return gradients, global_batch, found

    def all_reduce(self, gradients: Gradients, to_reduce: dict[str, torch.Tensor]) -> Callable[[], Received]:
        """Averages gradients over the replicas, and sums `to_reduce` over the replicas. See `Replica.all_reduce`."""
        variables = self.model.trainable_weights
        if not self._buckets.has_hooks:
            self._buckets.take({id(variable): gradient for variable, gradient in zip(variables, gradients)})
        means, sums = self._buckets.mean(gradients, variables, flat(to_reduce))
        if self.strategy.split.num_replicas > 1:
            means = self.with_next_values(means, self.next_values(means, variables))
        received = means, unflat(sums, to_reduce)
        return lambda: received

    def whole_gradients(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gathers the gradients of sharded weights. The gradients of all other weights are returned unchanged."""
        return gradients if self.parts is None else self.parts.whole_gradients(gradients)

    def update(self, update: Callable[[], None]) -> None:
        """Runs the optimizer's update. If variables are sharded, this rank updates only its shards."""
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
        # Not `assign`, which rejects shards. All variables, because Keras (3.15) changes eager values in place.
        for variable, _ in values:
            scope.state_mapping[id(variable)] = updated.get_current_value(variable)


class CompiledOwnStep(CompiledStep):
    """Compiles user-defined training steps that compute gradients with `kerasdp.value_and_grad`."""

    def __init__(self, strategy: Any, steps: RankSteps):
        super().__init__(strategy, steps, "train", variables_of_own_step(steps.model))
        self.optimizers = optimizers_of(steps.model)

    def step(self, values: list[torch.Tensor], batch: DeviceBatch, detail: Detail) -> Any:
        """Runs the user-defined `train_step` on this process's rows. See `CompiledStep.step`."""
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
    """Compiles steps of `evaluate` and `predict`: the methods `test` and `predict` of `RankSteps`."""

    def __init__(self, strategy: Any, steps: RankSteps, name: str, parts: Any = None):
        model = steps.model
        super().__init__(
            strategy, steps, name, [*model.variables, *(model.metrics_variables if name == "test" else ())], parts
        )

    def step(self, values: list[torch.Tensor], batch: DeviceBatch, detail: Detail) -> Any:
        """Runs `test` or `predict` on this process's rows. See `CompiledStep.step`."""
        with torch.no_grad():
            with self.scope(list(zip(self.variables, values))) as scope:
                result = getattr(self.steps, self.name)(batch)
            self.write(values, scope)
        return result


def inductor_options(strategy: Any) -> dict[str, bool]:
    """Returns the options of Inductor (torch 2.13) for the steps of a strategy."""
    # It takes every tensor of four axes for NCHW, and would permute Keras' NHWC.
    options = {"layout_optimization": False}
    if strategy.is_gpu and (strategy.split.num_replicas == 1 or strategy.config.compile == "cudagraphs"):
        # The first run warms up, the second records, later runs replay. All ranks do the same, so NCCL's messages
        # match. This is untested on several GPUs, so there it needs --compile=cudagraphs.
        options["triton.cudagraphs"] = True
    if strategy.is_gpu and (strategy.split.num_replicas > 1 or strategy.config.deterministic):
        # By default Inductor times several kernels for sums and padded products, and takes the fastest. A resumed run
        # or another rank may take another kernel, and its weights would differ from then on.
        options["deterministic"] = True
    return options


def _filled(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Replaces the leaves of a structure by tensors, in the order of `keras.tree.flatten`. None leaves stay None.

    The function does not use `keras.tree.map_structure` (3.15). It visits the entries of a dictionary in another order
    than `keras.tree.flatten`.
    """
    import keras

    given = iter(tensors)
    leaves = [None if leaf is None else next(given) for leaf in keras.tree.flatten(structure)]
    return keras.tree.pack_sequence_as(structure, leaves)


def _place(error: Exception) -> str:
    """Returns the name of the innermost layer whose call raised an error, or "the step" if no layer is known."""
    import keras

    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    layers = [owner.name for owner in owners if isinstance(owner, keras.layers.Layer)]
    return f"layer {layers[-1]}" if layers else "the step"


# The bucket size of DistributedDataParallel.
_BUCKET_BYTES = 25 * 2**20
# The key of `to_reduce` in a bucket. Gradients have the `id` of their variable.
_TO_REDUCE = 0


class GradientBuckets:
    """Averages gradients over the replicas in buckets, while the backward pass runs."""

    def __init__(self, num_replicas: int, own: set[int], parts: Any = None):
        """Creates empty buckets.

        Args:
            num_replicas: the number of replicas in the run.
            own: the `id`s of the variables whose gradients are not averaged.
            parts: the sharded variables, or None if no variables are sharded. Each rank gets only its shard of their
                averaged gradients.
        """
        self.num_replicas, self.own, self.parts, self.has_hooks = num_replicas, own, parts, False
        # Tensors that wait to be sent, with the `id` of their variable: gradients of sharded variables, and all others.
        self.buckets: dict[bool, list[tuple[int, torch.Tensor]]] = {False: [], True: []}
        # For each bucket that was sent: the ids, and a function that waits for the means.
        self.sent: list[tuple[Sequence[int], Callable[[], list[torch.Tensor]]]] = []

    def register_hooks(self, leaves: dict[int, torch.Tensor]) -> None:
        """Registers a hook on each leaf tensor. The hook adds the gradient to a bucket as soon as it is computed.

        The buckets keep no reference to the leaf tensors, because the hooks of these tensors refer to the buckets. A
        reference cycle would keep gradients in memory until Python's garbage collector runs.
        """
        self.has_hooks = True
        for key, leaf in leaves.items():
            leaf.register_hook(lambda gradient, key=key: self.take({key: gradient}))

    def take(self, gradients: dict[int, torch.Tensor | None]) -> None:
        """Adds gradients to the buckets, and sends each bucket that is full.

        Args:
            gradients: the gradients, by the `id` of their variable. None: the variable has no gradient.
        """
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
        """Returns the averaged gradients of the given variables, and the sum of `to_reduce` over the replicas.

        The last bucket of gradients contains `to_reduce`, too. A separate collective for `to_reduce` would wait once
        more for all ranks.
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
    """Waits for the sum of concatenated tensors over the replicas. Splits the sum into the shapes of these tensors."""
    parts = wait(sent).split([tensor.numel() for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors)]
