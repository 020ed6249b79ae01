"""Rewrites captured PyTorch steps to run faster with the same results.

The module also rejects steps whose results would change in a graph.
"""

import itertools
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from kerasdp.backends.torch import collectives  # noqa: F401  # defines torch.ops.kerasdp.gather
from kerasdp.backends.torch.private import force_strides, gatherings_and_sums

_aten = torch.ops.aten
# Operations between a weight and its message: views, and a change of type.
_FEW_NODES = 24


def refuse_exchanges(graph: Graph) -> None:
    """Raises `ValueError` if a step assigns the value of one variable to another variable.

    Inductor (2.13) may read this value after the step has already changed it.
    """
    same = (_aten.clone.default, _aten.detach.default, _aten.alias.default, _aten.view.default)
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        held, source = node.args
        while held.target in same:  # variables without axes are views
            held = held.args[0]
        while source.target in same:
            source = source.args[0]
        if source.op == "placeholder" and source is not held:
            raise ValueError("the step assigns the value of one variable to another one; use --compile=off")


def refuse_draws(graph: Graph) -> None:
    """Raises `ValueError` if rematerialized layers may draw random values from torch's generator.

    The second computation of a layer would draw other values than the first computation. Nodes of `kerasdp::after` show
    that a graph contains rematerialized layers.
    """
    draws = [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    if draws and any(str(node.target) == "kerasdp.after.default" for node in graph.nodes):
        raise ValueError(f"{draws[0].target} is random, so --remat cannot recompute it; use --compile=off")


def bring_to_device(module: torch.fx.GraphModule, device: torch.device) -> list[str]:
    """Moves the CPU tensors of a captured step to the GPU. Returns the names of the operations that stay on the CPU.

    Each step waits for the operations that stay on the CPU. In each call, Keras (3.15) creates tensors from Python
    numbers and NumPy arrays. In a captured step (torch 2.13), a tensor from a Python number is in GPU memory. This
    function turns it into a constant of the kernels. A tensor from a NumPy array is in CPU memory, and each step would
    copy it to the GPU. This function copies it only once.
    """
    left = []
    for found in _groups_on_cpu(module) if device.type != "cpu" else ():
        if all(_can_move(module, node) for node in found):
            for node in found:
                _move(module, node, device)
        else:
            left += [str(node.target) for node in found if node.users]
    for copy in module.graph.find_nodes(op="call_function", target=_aten.lift_fresh_copy.default):
        constant = _constant_of(module, copy.args[0])
        if constant is not None and constant.numel() == 1 and constant.device.type == device.type:
            arguments = list(constant.shape), constant.item()
            with module.graph.inserting_before(copy):
                options: dict[str, Any] = {"dtype": constant.dtype, "device": device}
                number = module.graph.call_function(_aten.full.default, arguments, options)
            number.meta = dict(copy.meta)
            copy.replace_all_uses_with(number)
            module.graph.erase_node(copy)
    module.graph.eliminate_dead_code(_has_effect)
    return left


def _groups_on_cpu(module: torch.fx.GraphModule) -> list[list[Node]]:
    """Returns the nodes whose results are on the CPU, in groups of connected nodes."""
    ahead = {node for node in module.graph.nodes if any(value.device.type == "cpu" for value in _values(module, node))}
    groups = []
    for first in module.graph.nodes:
        if first in ahead:
            ahead.remove(first)
            group = [first]
            for node in group:  # which grows meanwhile
                near = {other for other in (*node.all_input_nodes, *node.users) if other in ahead}
                ahead -= near
                group += near
            groups.append(group)
    return groups


def _values(module: torch.fx.GraphModule, node: Any) -> list[torch.Tensor]:
    """Returns the tensors that a node outputs.

    Nodes of constants output tensors with values. All other nodes output fake tensors.
    """
    value = getattr(module, node.target) if node.op == "get_attr" else node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _constant_of(module: torch.fx.GraphModule, node: Any) -> torch.Tensor | None:
    """Returns the tensor of a node that is a constant of the step.

    Returns None if the node is not a constant, or if the step may change the tensor.
    """
    if node.op != "get_attr" or any(user.target is not _aten.lift_fresh_copy.default for user in node.users):
        return None
    return next(iter(_values(module, node)), None)


def _can_move(module: torch.fx.GraphModule, node: Node) -> bool:
    """Returns whether a node can move from the CPU to the GPU.

    Constants can move. Operations of torch can move if they are not random, and if all of their inputs are on the CPU.
    """
    if node.op == "get_attr":
        return _constant_of(module, node) is not None
    target: Any = node.target
    if target is operator.getitem:
        return True
    if node.op != "call_function" or getattr(target, "namespace", "") != "aten":
        return False
    sources = [value for source in node.all_input_nodes for value in _values(module, source)]
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return not is_random and all(value.device.type == "cpu" for value in sources)


def _move(module: torch.fx.GraphModule, node: Any, device: torch.device) -> None:
    if node.op == "get_attr":
        setattr(module, node.target, getattr(module, node.target).to(device))
    elif "device" in node.kwargs:
        node.update_kwarg("device", device)
    if "val" in node.meta:
        moved = [value.to(device) for value in _values(module, node)]
        node.meta["val"] = moved if isinstance(node.meta["val"], (list, tuple)) else moved[0]


def _has_effect(node: Node) -> bool:
    """Returns whether a node may have side effects. Operations outside of torch are assumed to have side effects."""
    is_torchs = getattr(node.target, "namespace", "") in ("aten", "prims") or node.target is operator.getitem
    return node.is_impure() or (node.op == "call_function" and not is_torchs)


def keep_channels_last(graph: Graph) -> None:
    """Stores the outputs of convolutions of one-channel images with channels last, as Keras does.

    The memory layout of one-channel images is ambiguous, and Inductor (2.13) treats this layout as NCHW. The gradients
    of the outputs have channels last. If outputs and gradients have different layouts, an operation that reads both
    takes ten times as long, unless Inductor fuses the operation.
    """
    for convolution in graph.find_nodes(op="call_function", target=_aten.convolution.default):
        image, output = convolution.args[0].meta["val"], convolution.meta["val"]
        if image.dim() == 4 and image.shape[1] == 1 and output.shape[1] > 1:
            strides = torch.empty(output.shape, device="meta").to(memory_format=torch.channels_last).stride()
            with graph.inserting_after(convolution):
                turned = graph.call_function(force_strides(), (convolution, strides))
            turned.meta["val"] = output
            convolution.replace_all_uses_with(turned, delete_user_cb=lambda user, turned=turned: user is not turned)


def number_messages(graph: Graph) -> None:
    """Assigns a number to each socket message of a graph.

    From these numbers, ranks detect that their compilers have ordered the messages differently.
    """
    for tag, gather in enumerate(graph.find_nodes(op="call_function", target=torch.ops.kerasdp.gather.default)):
        gather.args = (gather.args[0], tag, gather.args[2])


def overlap_parts(graph: Graph) -> None:
    """Reorders a graph so that sharded weights and gradients are sent while other operations run.

    The gather of each weight starts before the step waits for the gather of the previous weight. So two weights are
    gathered or in use at the same time. The step waits for a sum of gradients only when the optimizer needs the sum.
    """
    gathers, sums = gatherings_and_sums(graph)
    for before, gather in itertools.pairwise(gathers):
        needed, ahead = set(), [gather]
        while ahead:
            node = ahead.pop()
            if node.op == "call_function" and node not in needed:
                needed.add(node)
                ahead += node.all_input_nodes
        if len(needed) <= _FEW_NODES:  # of the weight alone, not of what the step computes
            (arrived,) = before.users
            for node in [node for node in graph.nodes if node in needed and node > arrived]:
                arrived.prepend(node)
    for sent in sums:
        cone = list(sent.users)
        following = cone[0].next
        while following.op == "call_function":
            inputs = set(following.all_input_nodes)
            if inputs and inputs <= set(cone):
                cone.append(following)
            elif inputs & set(cone):
                break
            following = following.next
        for node in cone:
            following.prepend(node)
