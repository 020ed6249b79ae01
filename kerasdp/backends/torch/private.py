"""Holds all private names of torch in use."""

import contextlib
import functools
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
    """Returns the context in which a recomputation keeps no tensors once it has ended.

    Torch 2.13 ends it by an exception, `torch.utils.checkpoint._StopRecomputationError`, as soon as all is there that
    was saved; Keras (3.15) makes another of it in each layer. Their frames hold what the layers computed until Python's
    collector comes: of a GPT the most that a step needs is 1.4 times as much.
    """
    ends = torch.utils.checkpoint._StopRecomputationError
    try:
        yield
    except ends as error:
        one: BaseException | None = error
        while isinstance(one, ends):  # an error that somebody handles meanwhile keeps its own
            traceback.clear_frames(one.__traceback__)
            one.__traceback__, one.__context__, one = None, None, one.__context__
        raise


# Torch 2.13: of lists of tensors. The public optimizers count steps, and divide by them, themselves.
foreach_mul, foreach_mul_ = torch._foreach_mul, torch._foreach_mul_
fused_adam_, fused_sgd_ = torch._fused_adam_, torch._fused_sgd_


def compile_with_inductor(
    graph: torch.fx.GraphModule, inputs: list[Any], num_static: int, options: dict[str, bool]
) -> Callable[..., Any]:
    """Compiles a graph of tensors; nothing runs.

    Torch 2.13: `torch._inductor.compile_fx`. The public `torch.compile` walks through the whole graph once more, and
    looks at each input again before each call.

    Args:
        graph: of `make_fx`.
        inputs: as those that it will get.
        num_static: so many inputs, the first ones, stay where they are in memory. Else Inductor makes no CUDA graph of
            a step that changes them. It knows that only of the graphs that `torch.compile` makes: by these marks.
        options: of Inductor.
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
    """Lets Inductor compute what reads a weight before an update changes it.

    Torch 2.13: `torch._inductor.ir.FallbackKernel` enters itself into the program, then what reads the tensors that it
    changes and is not computed yet: that would read new values.
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
    """Returns the operation by which a graph keeps a tensor in a memory layout through Inductor.

    Torch 2.13: `torch.ops.prims.inductor_force_stride_order`; no public name.
    """
    import torch._inductor.inductor_prims  # makes it; seconds that a run without --compile need not wait

    return torch.ops.prims.inductor_force_stride_order.default


def without_numbers() -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which tensors have shapes and types, and nothing is computed.

    Torch 2.13: `FakeTensorMode`; no public name.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_being_captured(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor holds no numbers, since a graph is being captured of what is done with it.

    Torch 2.13: `FakeTensor`. The public `torch.compiler.is_compiling` knows of `torch.compile`, not of `make_fx`.
    """
    return isinstance(tensor, FakeTensor)


def leave_process_group() -> None:
    """Leaves the process group of the run, if there is one, once no CUDA graph holds a message of its.

    Torch 2.13: `torch._inductor.cudagraph_trees`, if it was ever imported; NCCL waits for graphs that hold its kernels.
    """
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()
    if dist.is_initialized():  # one device alone, as the last machine of several may be, has none
        dist.destroy_process_group()


def all_gather_functional(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Concatenates a tensor of all ranks of a group along its first axis, as an operation that a graph can hold.

    Torch 2.13: `torch.ops._c10d_functional`. The public `torch.distributed` works in place, which is not captured.
    """
    name, size = _name_of(group), dist.get_world_size(group)
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(tensor, size, name))


def all_reduce_async(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Starts to sum a tensor over the ranks of a group, as an operation that a graph can hold; see `wait`.

    Torch 2.13: `torch.ops._c10d_functional`. The public `torch.distributed` works in place, which is not captured.
    """
    return torch.ops._c10d_functional.all_reduce(tensor, "sum", _name_of(group))


def reduce_scatter_async(tensor: torch.Tensor) -> torch.Tensor:
    """Starts to sum a flat tensor over all ranks, of which each gets one part of equal size; see `wait`.

    By NCCL it is the sum. Gloo (torch 2.13) takes longer to sum parts than wholes, so it only sends: the result is what
    each rank has given for this one's part, one after the other, to be added.
    """
    name, size = _name_of(None), dist.get_world_size()
    if dist.get_backend() == "nccl":
        return torch.ops._c10d_functional.reduce_scatter_tensor(tensor, "sum", size, name)
    sizes = [len(tensor) // size] * size
    return torch.ops._c10d_functional.all_to_all_single(tensor, sizes, sizes, name)


def gatherings_and_sums(graph: torch.fx.Graph) -> tuple[list[Any], list[Any]]:
    """Returns the nodes of a captured step that begin to gather tensors, and those of `reduce_scatter_async`."""
    functional = torch.ops._c10d_functional

    def calls_of(*operations: Any) -> list[Any]:
        return [node for one in operations for node in graph.find_nodes(op="call_function", target=one.default)]

    return (
        calls_of(functional.all_gather_into_tensor),
        calls_of(functional.all_to_all_single, functional.reduce_scatter_tensor),
    )


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor was changed in place. Torch 2.13: `Tensor._version`; no public name."""
    return tensor._version


def storage_of(tensor: torch.Tensor) -> int:
    """Returns what is the same number for two tensors, as long as both are there, if they share their memory.

    Torch 2.13: `UntypedStorage._cdata`. The public `data_ptr` is 0 while a step is captured.
    """
    return tensor.untyped_storage()._cdata


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for an `all_reduce_async`, and returns its result."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def _name_of(group: Any) -> str:
    known: Any = dist.group.WORLD if group is None else group  # there is one by now
    return known.group_name
