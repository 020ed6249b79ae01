"""PyTorch: captures what a model's step does as one graph, and compiles it with Inductor; the same for all steps.

No Python runs between the operations. What Keras does on torch (3.15: eager layer calls, or `torch.compile` of them,
with a graph break at each layer) is slower.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kerasdp.backends.base import DeviceBatch
from kerasdp.backends.torch.graph_passes import (
    bring_to_device,
    fold_padding,
    keep_channels_last,
    refuse_exchanges,
    remove_layout_round_trips,
    send_early,
)
from kerasdp.backends.torch.private import (
    compile_error,
    compile_with_inductor,
    mark_static_addresses,
)
from kerasdp.reporting import report
from kerasdp.runtime.ranks import Processes
from kerasdp.runtime.run_state import Detail

# Batches of many shapes (texts, say) would be compiled forever.
_MOST_GRAPHS = 8
# What is done with the batches that a step takes, for messages.
_DONE = {"train": "trained", "test": "evaluated", "predict": "predicted"}

# Runs a step. Takes the values of the variables, which it changes in place, inputs, targets and weights of this
# process's rows, the number of rows of the global batch, and how much is recorded.
Step = Callable[[list[torch.Tensor], Any, int, Detail], Any]


class CompiledGraphs:
    """One step of one model, compiled: a graph for each kind of batch.

    Attributes:
        reason: why there is none for the next kind of batch; empty if there may be.
    """

    def __init__(self, strategy: Any, model: Any, name: str, step: Step, variables: list[Any]):
        """Made once for each compiled model.

        Args:
            strategy: of the run.
            model: built.
            name: of the step: `train`, `test` or `predict`.
            step: what is compiled.
            variables: that the step reads or changes.
        """
        from kerasdp.keras_compat.layers import all_layers

        self.strategy, self.model, self.name, self.step = strategy, model, name, step
        self.layers = all_layers(model)
        # Keras assigns in place, so these stay the variables' own memory.
        self.values = [variable.value.detach() for variable in variables]
        if strategy.is_gpu:
            mark_static_addresses(self.values)
        self.graphs: dict[Any, Callable[..., Any]] = {}
        self.reason = ""

    def __call__(self, batch: DeviceBatch, detail: Detail = Detail.NOTHING, kind: Any = None) -> Any:
        """Runs the step on a batch; returns its result, or None if it cannot be compiled.

        `kind`: hashable; the graph of another one does not serve.
        """
        import keras

        data = tuple(batch[:3])
        shapes = [None if leaf is None else (leaf.shape, leaf.dtype) for leaf in keras.tree.flatten(data)]
        key = (detail, len(batch.indices), kind, *shapes)
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
        compiler = _Compiler(processes, inductor_options(self.strategy, graph.meta["keeps_order"]))
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
            report.warn(f"{reason}: {_DONE[self.name]} without --compile, which is slower")

    def _captured(self, data: Any, detail: Any, num_rows: int) -> torch.fx.GraphModule:
        import keras

        for layer in self.layers:
            if isinstance(
                layer, keras.layers.TorchModuleWrapper
            ):  # its weights are torch parameters, not Keras variables
                raise ValueError(f"{layer.name} wraps a torch.nn.Module")

        def step(values: list[torch.Tensor], data: Any) -> Any:
            return self.step(values, data, num_rows, detail)

        with _unfiltered_tracebacks():
            graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(self.values, data)
        refuse_exchanges(graph.graph)
        remove_layout_round_trips(graph.graph)
        fold_padding(graph.graph)
        if self.strategy.num_replicas > 1:  # with one replica, batch norm is fused with what surrounds it
            keep_channels_last(graph.graph)
        if self.strategy.is_gpu:
            self._bring_to_device(graph)
        graph.meta["keeps_order"] = send_early(graph.graph)
        graph.recompile()
        return graph

    def _bring_to_device(self, graph: torch.fx.GraphModule) -> None:
        left = bring_to_device(graph, self.strategy.device)
        if left and not self.graphs and self.strategy.processes.rank == 0:
            report.warn(
                f"each compiled step of {self.model.name} waits for the CPU, for {', '.join(dict.fromkeys(left))}: "
                "make tensors by keras.ops, which computes on the GPU"
            )


def inductor_options(strategy: Any, keeps_order: bool) -> dict[str, bool]:
    """Returns what Inductor (2.13) is told; `keeps_order`: whether a step exchanges messages in an order of its own."""
    # It takes every tensor of four axes for NCHW, and would permute Keras' NHWC.
    options = {"layout_optimization": False}
    if strategy.is_gpu and strategy.num_replicas == 1:
        options["triton.cudagraphs"] = True
    if strategy.is_gpu and (strategy.num_replicas > 1 or strategy.config.deterministic):
        # It times several ways to sum, and to multiply with padding, and takes the fastest: another one in a resumed
        # run, or on another rank, whose weights would differ from then on.
        options["deterministic"] = True
    if keeps_order:  # it would send late, and receive at once
        options |= {"reorder_for_locality": False, "reorder_for_peak_memory": False}
    return options


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


def _place(error: Exception) -> str:
    """Returns the innermost layer in whose call an error was raised, else the part of the step."""
    import keras

    place = "the step"
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
