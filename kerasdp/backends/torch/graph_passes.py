"""Rewrites captured PyTorch steps to run faster with the same results. Rejects steps that a graph would change."""

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
    """Raises `ValueError` if a step assigns one variable's value to another variable.

    Inductor (2.13) may read this value after it was changed.
    """
    same = (_aten.clone.default, _aten.detach.default, _aten.alias.default, _aten.view.default)
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        held, source = node.args
        while held.target in same:  # variables without axes are views
            held = held.args[0]
        while source.target in same:
            source = source.args[0]
        if source.op == "placeholder" and source is not held:
            raise ValueError("a variable is assigned the value of another variable")


def refuse_draws(graph: Graph) -> None:
    """Raises `ValueError` if layers that are computed twice may draw from torch's random generator.

    The second computation would draw other values. `kerasdp::after` marks these layers in the graph.
    """
    draws = [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    if draws and any(str(node.target) == "kerasdp.after.default" for node in graph.nodes):
        raise ValueError(f"{draws[0].target} draws from torch's random generator in a step with --remat")


def bring_to_device(module: torch.fx.GraphModule, device: torch.device) -> list[str]:
    """Moves CPU tensors of a captured step to its GPU. Returns the names of the nodes that stay on the CPU.

    Each step waits for a node that stays. Keras (3.15) makes tensors of numbers and NumPy arrays in each call. A
    capture (torch 2.13) keeps such numbers on the GPU, and kernels read them from memory. This pass makes them
    constants of the kernels. A capture keeps arrays on the CPU, and copies them in each step. This pass copies them
    once.
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
    """Returns the nodes whose results are on the CPU. Connected nodes form one group."""
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
    """Returns the tensors that a node outputs. Tensors of constants hold values, and other tensors are fake tensors."""
    value = getattr(module, node.target) if node.op == "get_attr" else node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _constant_of(module: torch.fx.GraphModule, node: Any) -> torch.Tensor | None:
    """Returns the tensor of a node that is a constant of the step. None: it is no constant, so it may change."""
    if node.op != "get_attr" or any(user.target is not _aten.lift_fresh_copy.default for user in node.users):
        return None
    return next(iter(_values(module, node)), None)


def _can_move(module: torch.fx.GraphModule, node: Node) -> bool:
    """Returns whether a CPU node can move to the GPU: it must not be random, and its inputs must be on the CPU."""
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
    """Returns whether a node may have side effects. This is assumed of all operations that are not torch's."""
    is_torchs = getattr(node.target, "namespace", "") in ("aten", "prims") or node.target is operator.getitem
    return node.is_impure() or (node.op == "call_function" and not is_torchs)


def keep_channels_last(graph: Graph) -> None:
    """Stores the outputs of convolutions of one-channel images with channels last, as Keras does.

    The layout of one-channel images is ambiguous, and Inductor (2.13) takes it for NCHW. The gradients of the outputs
    have channels last. A pass over outputs and gradients takes ten times as long if their layouts differ, unless
    Inductor fuses it with other operations.
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
    """Numbers the socket messages of a graph. So ranks notice if their compilers ordered the messages differently."""
    for tag, gather in enumerate(graph.find_nodes(op="call_function", target=torch.ops.kerasdp.gather.default)):
        gather.args = (gather.args[0], tag, gather.args[2])


def overlap_parts(graph: Graph) -> None:
    """Reorders a graph so that sharded weights and gradients are sent while other operations run.

    The gather of a weight starts before the step waits for the previous weight. So two weights are being gathered or
    used at a time. The step waits for a sum of gradients only when the optimizer needs it.
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
