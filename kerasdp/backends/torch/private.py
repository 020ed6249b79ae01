"""Holds all private names of torch in use."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kerasdp.keras_compat.patches import wrapped


def compile_error() -> type[Exception]:
    """Returns what a compiled function raises where it cannot be compiled, before it has done anything.

    Torch 2.13: `torch._dynamo.exc.TorchDynamoException`; no public name.
    """
    return torch._dynamo.exc.TorchDynamoException


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


def compile_with_inductor(
    graph: torch.fx.GraphModule, inputs: list[torch.Tensor | int | torch.SymInt | None], options: dict[str, bool]
) -> Callable[..., object]:
    """Compiles a graph that torch.compile has captured; nothing runs.

    Torch 2.13: `torch._inductor.compile`; what `torch.compile` does by itself leaves no place between the two.
    """
    import torch._inductor

    return torch._inductor.compile(graph, inputs, options=options)


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


def foreach_add_of_tensors() -> contextlib.AbstractContextManager[None]:
    """Returns the context in which `torch._foreach_add_` multiplies by an `alpha` that is a tensor, unread.

    Torch 2.13: it takes a Python number, for which it reads the tensor, and so waits for the device. Keras' (3.15) SGD
    and Adadelta give it the learning rate. No public name.
    """

    def of_tensors(add: Callable[..., None], tensors: Any, others: Any, *, alpha: Any = 1) -> None:
        if isinstance(alpha, torch.Tensor):
            others, alpha = torch._foreach_mul(others, alpha), 1
        # Only of lists there is an `alpha`.
        add(tensors, others, alpha=alpha) if isinstance(others, (list, tuple)) else add(tensors, others)

    return wrapped(torch, _foreach_add_=of_tensors)


def mark_static_addresses(tensors: Iterable[torch.Tensor]) -> None:
    """Says that tensors stay where they are in memory, else Inductor makes no CUDA graph of a step that changes them.

    Torch 2.13: `torch._dynamo.mark_static_address`; no public way.
    """
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)


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
