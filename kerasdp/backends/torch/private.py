"""Wraps the private functions of PyTorch that kerasdp uses."""

import contextlib
import functools
import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@contextlib.contextmanager
def tensors_let_go() -> Iterator[None]:
    """Returns a context that frees the tensors of a rematerialized layer after the backward pass has recomputed it.

    Torch 2.13 stops a recomputation with the exception `torch.utils.checkpoint._StopRecomputationError`, as soon as all
    saved tensors are computed. In each layer, Keras (3.15) raises another exception from this exception. The stack
    frames of these exceptions keep the layers' tensors until Python's garbage collector runs. Without this context, the
    peak memory of a GPT step is 1.4 times as high. `keras.tree.flatten` and similar functions (3.15) also keep tensors
    that long, in reference cycles of PyTorch's `tree_flatten`. So the context also collects young garbage.
    """
    ends = torch.utils.checkpoint._StopRecomputationError
    try:
        yield
    except ends as error:
        one: BaseException | None = error
        while isinstance(one, ends):  # an error that other code handles now keeps its frames
            traceback.clear_frames(one.__traceback__)
            one.__traceback__, one.__context__, one = None, None, one.__context__
        raise
    finally:
        gc.collect(1)


# Torch 2.13: functions of lists of tensors. The public optimizers count steps themselves, and divide by the count.
foreach_mul, foreach_mul_ = torch._foreach_mul, torch._foreach_mul_
fused_adam_, fused_sgd_ = torch._fused_adam_, torch._fused_sgd_


def compile_with_inductor(
    graph: torch.fx.GraphModule, inputs: list[Any], num_static: int, options: dict[str, bool]
) -> Callable[..., Any]:
    """Compiles a graph of tensor operations with Inductor, without running the graph.

    Torch 2.13: the function uses `torch._inductor.compile_fx`. The public `torch.compile` traces the whole graph again.
    It also checks each input before each call.

    Args:
        graph: a graph that `make_fx` made.
        inputs: example inputs, with the shapes and dtypes of later inputs.
        num_static: the number of leading inputs whose memory address never changes. Inductor makes no CUDA graph of a
            step that changes other inputs. Inductor reads this information from marks that only `torch.compile` sets,
            so this function sets the marks.
        options: the options of Inductor.
    """
    from torch._dynamo.source import LocalSource
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    _lower_updates()
    known: Any = graph
    graph.meta["dynamo_compile_id"] = None
    known._param_name_to_source = {name: LocalSource(name) for name, _ in graph.named_buffers()}
    for place, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        node._dynamo_source = None
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if place < num_static else {}
    # Without a shape environment it would not look into its cache. All shapes are fixed.
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with torch.no_grad(), torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        compiled: Any = compile_fx(graph, inputs, config_patches=options, ignore_shape_env=True)
    return compiled


@functools.cache
def _lower_updates() -> None:
    """Makes Inductor read a weight before the optimizer's update changes the weight.

    Torch 2.13: `torch._inductor.ir.FallbackKernel` first adds the update to the program. Then it adds the pending reads
    of the tensors that the update changes. These reads would return the updated values.
    """
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    update: Any = torch.ops.kerasdp.update_.default

    @register_lowering(update, type_promotion_kind=None)
    def lower(*args: Any) -> Any:
        for argument, tensors in zip(update._schema.arguments, args):
            for tensor in tensors if argument.is_write else ():
                V.graph.mark_buffer_mutated(tensor.get_name())
        return fallback_handler(update, add_to_fallback_set=False)(*args)


def force_strides() -> Callable[..., torch.Tensor]:
    """Returns the operation that makes Inductor keep the memory layout of a tensor.

    Torch 2.13: `torch.ops.prims.inductor_force_stride_order` has no public name.
    """
    import torch._inductor.inductor_prims  # makes it; seconds that a run without --compile need not wait

    return torch.ops.prims.inductor_force_stride_order.default


def without_numbers() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which tensors have shapes and dtypes, but no values. Nothing is computed.

    Torch 2.13: `FakeTensorMode` has no public name.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_being_captured(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a fake tensor. It then has no values, because a graph is being captured.

    Torch 2.13: `FakeTensor` has no public name. The public `torch.compiler.is_compiling` detects `torch.compile`, but
    not `make_fx`.
    """
    return isinstance(tensor, FakeTensor)


def leave_process_group() -> None:
    """Leaves the process group of the run, if there is one. First frees all CUDA graphs, which may contain collectives.

    NCCL waits until all CUDA graphs that contain its kernels are freed. Torch 2.13: `torch._inductor.cudagraph_trees`
    holds these graphs, if Inductor has imported this module.
    """
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()
    if dist.is_initialized():  # one device alone, as the last machine of several may be, has none
        dist.destroy_process_group()


def all_gather_functional(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Concatenates a tensor of each rank along the first axis, with an operation that a graph can contain.

    Torch 2.13: `torch.ops._c10d_functional`. The public functions of `torch.distributed` work in place, so a graph
    cannot capture them.
    """
    name, size = _name_of(group), dist.get_world_size(group)
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(tensor, size, name))


def all_reduce_async(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Starts to sum a tensor over the ranks of a group, with an operation that a graph can contain.

    `wait` returns the sum. Torch 2.13: `torch.ops._c10d_functional`. The public functions of `torch.distributed` work
    in place, so a graph cannot capture them.
    """
    return torch.ops._c10d_functional.all_reduce(tensor, "sum", _name_of(group))


def reduce_scatter_async(tensor: torch.Tensor) -> torch.Tensor:
    """Starts to sum a flat tensor over all ranks. Each rank gets one shard of the sum, or the summands of its shard.

    `wait` returns the result. All shards have the same size. With NCCL, the result is this rank's shard of the sum.
    With Gloo, the result is a concatenation: this rank's shard of the tensor of each rank. The caller must add these
    shards. The reason is that Gloo (torch 2.13) needs more time to sum shards than to sum whole tensors.
    """
    name, size = _name_of(None), dist.get_world_size()
    if dist.get_backend() == "nccl":
        return torch.ops._c10d_functional.reduce_scatter_tensor(tensor, "sum", size, name)
    sizes = [len(tensor) // size] * size
    return torch.ops._c10d_functional.all_to_all_single(tensor, sizes, sizes, name)


def gatherings_and_sums(graph: torch.fx.Graph) -> tuple[list[Any], list[Any]]:
    """Finds the operations in a captured step that gather tensors or sum gradients over the ranks.

    Returns:
        Two lists of nodes: the nodes that start an all-gather, and the nodes that `reduce_scatter_async` created.
    """
    functional = torch.ops._c10d_functional

    def calls_of(*operations: Any) -> list[Any]:
        return [node for one in operations for node in graph.find_nodes(op="call_function", target=one.default)]

    return (
        calls_of(functional.all_gather_into_tensor),
        calls_of(functional.all_to_all_single, functional.reduce_scatter_tensor),
    )


def version_of(tensor: torch.Tensor) -> int:
    """Returns how many times a tensor was changed in place. Torch 2.13: `Tensor._version` has no public name."""
    return tensor._version


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number that identifies the memory of a tensor. Only tensors that share memory have the same number.

    The number is valid while the tensor exists. Torch 2.13: `UntypedStorage._cdata` has no public name. The public
    `data_ptr` is 0 while a step is captured.
    """
    return tensor.untyped_storage()._cdata


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for the result of `all_reduce_async` or `reduce_scatter_async`, and returns the result."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def _name_of(group: Any) -> str:
    known: Any = dist.group.WORLD if group is None else group  # there is one by now
    return known.group_name
