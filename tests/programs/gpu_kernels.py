"""Says which operations of TensorFlow's graphs a GPU would not do on the device, by the kernels that the wheel brings.

What TensorFlow (2.21) does on a GPU is decided per operation: by the kernel that is registered for it and its types.
Where there is none, soft placement runs the operation on the host; and a kernel may want some arguments in host
memory, as nearly all of int32 do. Both copy what comes from the device, and the device waits.

The rule, and why:

- Scalars and vectors of up to `MOST_ON_HOST` numbers may live on the host where they were made there: shapes, loop
  counters, paddings. A tensor has no more axes, and data of a batch has more numbers.
- int32 of a batch (tokens, classes) comes in host memory, where TensorFlow keeps it, and goes to the device where
  something there uses it: what is made of it alone may be made on the host. Nothing may come back.
- What follows from constants and static shapes alone is folded before the graph runs, however large.
- Handles of variables and lists (resource, variant) are pointers of the host.
- What is compiled by XLA (`_XlaMustCompile`, Keras' `jit_compile`) needs no kernels. But the graph around it keeps
  int32 that enters or leaves a function in host memory (`MemoryTypesForNode`): large int32 must not cross its border.
"""

import collections
import functools
import math
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import function_def_to_graph, kernels

MOST_ON_HOST = 8
HANDLES = (tf.resource, tf.variant)
# What NCCL sums for TensorFlow (`NcclManager::AddParticipant`), whatever the operation takes.
NCCL = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
BRANCHES = {"If": ("then_branch", "else_branch"), "StatelessIf": ("then_branch", "else_branch")}
LOOPS = ("While", "StatelessWhile")
OF_SHAPES = ("Shape", "ShapeN", "Size", "Rank")


class Value(NamedTuple):
    """What is known of a tensor.

    Attributes:
        is_constant: whether it is folded to a constant.
        is_on_host: whether it is in host memory.
        has_come: whether it is made of nothing but what came to the step in host memory.
    """

    is_constant: bool
    is_on_host: bool
    has_come: bool = False


@functools.cache
def kernels_of(kind: str) -> tuple:
    """The registered kernels of an operation for GPUs, the ones that are preferred first."""
    order = {"GPU": 0, "DEFAULT": 1}
    known = [each for each in kernels.get_registered_kernels_for_op(kind).kernel if each.device_type in order]
    return tuple(sorted(known, key=lambda kernel: (order[kernel.device_type], -kernel.priority)))


def host_arguments(op) -> set[str] | None:
    """Names of the arguments that the kernel for these types wants in host memory; None if there is no kernel."""
    types = types_of(op)
    for kernel in kernels_of(op.type):
        if all(types[c.name] <= set(c.allowed_values.list.type) for c in kernel.constraint if c.name in types):
            return set(kernel.host_memory_arg)
    return None


def types_of(op) -> dict[str, set[int]]:
    """The types that an operation was made with, by attribute."""
    types = {}
    for each in op.op_def.attr:
        if each.type in ("type", "list(type)"):
            value = op.get_attr(each.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            types[each.name] = {tf.as_dtype(one).as_datatype_enum for one in values}
    return types


def expanded(op, arguments) -> list[str]:
    """The name of the argument for each tensor: one of a list has it for each."""
    names = []
    for argument in arguments:
        count = 1
        if argument.number_attr:
            count = op.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        names += [argument.name] * count
    return names


def size_of(tensor) -> float:
    """How many numbers a tensor has; infinitely many if that is not known."""
    return math.prod(tensor.shape.as_list()) if tensor.shape.is_fully_defined() else math.inf


# The graphs of all functions that were made, by name. TensorFlow's own definitions have lost shapes.
_graphs: dict[str, tf.Graph] = {}
# The functions themselves: TensorFlow forgets those that nobody holds.
_functions: list[object] = []


def keep_graphs() -> None:
    """Keeps, from now on, the graph of each function that is made."""
    make = atomic_function.from_func_graph

    def from_func_graph(name, graph, *args, **kwargs):
        _graphs[name] = graph
        function = make(name, graph, *args, **kwargs)
        _functions.append(function)
        return function

    atomic_function.from_func_graph = from_func_graph


class Judge:
    """Walks through graphs, and collects what a GPU would not do on the device.

    Attributes:
        found: kinds of finding, each with the operation.
        seen: how often each operation was judged.
    """

    def __init__(self, host: str = "CPU:0"):
        """`host`: the device that stands for the host, where replicas have others."""
        self.host, self.found, self.seen = host, set(), collections.Counter()

    def graph(self, name: str):
        """The graph of a function that TensorFlow knows."""
        definition, known = context.context().get_function_def(name), _graphs.get(name)
        # The graph of a loop is changed when its gradient is made, and a new function is made of it.
        if (
            known is None
            or len(known.outputs) != len(definition.signature.output_arg)
            or any(tensor.graph is not known for tensor in known.outputs)
        ):
            _graphs[name] = function_def_to_graph.function_def_to_graph(definition)
        return _graphs[name]

    def root(self, name: str) -> None:
        """Judges a function that was called eagerly."""
        definition, graph = context.context().get_function_def(name), self.graph(name)
        values = [Value(False, tensor.dtype == tf.int32, tensor.dtype == tf.int32) for tensor in graph.inputs]
        if definition.attr["_XlaMustCompile"].b:
            self.seen["compiled step"] += 1
        else:
            self.function(name, values)

    def function(self, name: str, values: list[Value]) -> list[Value]:
        """Judges a function that is called with such values; returns what it gives."""
        graph = self.graph(name)
        known = {tensor.ref(): value for tensor, value in zip(graph.inputs, values, strict=True)}
        left = [op for op in graph.get_operations() if not any(tensor.ref() in known for tensor in op.outputs)]
        while left:  # the gradient of a loop adds inputs to it that were made later
            waiting = []
            for op in left:
                if all(tensor.ref() in known for tensor in op.inputs):
                    values = self.operation(op, [known[tensor.ref()] for tensor in op.inputs])
                    known |= {tensor.ref(): value for tensor, value in zip(op.outputs, values, strict=True)}
                else:
                    waiting.append(op)
            assert len(waiting) < len(left)
            left = waiting
        return [known[tensor.ref()] for tensor in graph.outputs]

    def operation(self, op, values: list[Value]) -> list[Value]:
        """Judges an operation; returns what it gives."""
        by_type = [Value(False, tensor.dtype == tf.int32) for tensor in op.outputs]
        if op.type in CALLS or op.type not in BRANCHES and op.type not in LOOPS and self.is_function(op.type):
            name = op.get_attr("f").name if op.type in CALLS else op.type
            if self.must_compile(op, name):
                self.seen["compiled call"] += 1
                for tensor, value in zip((*op.inputs, *op.outputs), (*values, *by_type), strict=True):
                    is_free = value.is_constant or value.has_come
                    if tensor.dtype == tf.int32 and not is_free and size_of(tensor) > MOST_ON_HOST:
                        self.found.add(("int32 at a compiled function", short(name)))
                return by_type
            return self.function(name, values)
        if op.type in BRANCHES:
            self.scalar_for_host(op, op.inputs[0], values[0])
            results = [self.function(op.get_attr(name).name, values[1:]) for name in BRANCHES[op.type]]
            return [Value(False, all(v.is_on_host for v in each)) for each in zip(*results, strict=True)]
        if op.type in LOOPS:
            within = [Value(False, tensor.dtype == tf.int32) for tensor in op.inputs]
            (cond,) = self.function(op.get_attr("cond").name, within)
            self.scalar_for_host(op, None, cond)
            self.function(op.get_attr("body").name, within)
            return by_type
        return self.plain(op, values)

    def plain(self, op, values: list[Value]) -> list[Value]:
        """Judges an operation that has a kernel, or should."""
        of_static = op.type in OF_SHAPES and all(t.shape.is_fully_defined() for t in op.inputs)
        of_constants = not op.op_def.is_stateful and bool(values) and all(value.is_constant for value in values)
        if op.type == "Const" or of_static or of_constants:
            return [Value(True, True)] * len(op.outputs)
        if op.type == "Identity":  # which is left out
            return values
        if op.type in ("NoOp", "PlaceholderWithDefault"):  # of a pipeline's row numbers, as good as constants
            return [Value(False, tensor.dtype == tf.int32) for tensor in op.outputs]
        self.seen[op.type] += 1
        if op.type.startswith("Collective") and op.get_attr("T") not in NCCL:
            self.found.add(("not for NCCL", op.type))
        on_host, kind = host_arguments(op), "host memory"
        if on_host is None:
            kind = "no kernel"
        elif self.host and op.device.endswith(self.host):
            on_host, kind = None, "on the host"
        sides = []
        for tensors, arguments in ((op.inputs, op.op_def.input_arg), (op.outputs, op.op_def.output_arg)):
            names = expanded(op, arguments)
            sides.append([(t, on_host is None or name in on_host) for t, name in zip(tensors, names, strict=True)])
        for (tensor, wants_host), value in zip(sides[0], values, strict=True):
            if not wants_host or value.is_constant or value.has_come or tensor.dtype in HANDLES:
                continue
            if size_of(tensor) > MOST_ON_HOST:
                self.found.add((kind, op.type))
            else:
                self.scalar_for_host(op, tensor, value)
        has_come = all(value.is_constant or value.has_come for value in values)
        for tensor, is_host in sides[1]:
            if is_host and not has_come and tensor.dtype not in HANDLES and size_of(tensor) > MOST_ON_HOST:
                self.found.add((kind, op.type))
        return [Value(False, is_host, is_host and has_come) for _, is_host in sides[1]]

    def scalar_for_host(self, op, tensor, value: Value) -> None:
        """Counts a small tensor that the device has made, and the host waits for."""
        if not value.is_on_host and not value.is_constant:
            name = f"{op.type} of {tensor.op.type}" if tensor is not None else op.type
            self.found.add(("the host waits", name))

    @staticmethod
    def is_function(name: str) -> bool:
        """Whether TensorFlow knows a function of this name."""
        return context.context().has_function(name)

    @staticmethod
    def must_compile(op, name: str) -> bool:
        """Whether this call is compiled by XLA."""
        attribute = op.node_def.attr.get("_XlaMustCompile")
        return bool(attribute and attribute.b) or context.context().get_function_def(name).attr["_XlaMustCompile"].b


def short(name: str) -> str:
    """The name of a Python function, of that of its graph."""
    return name.removeprefix("__inference_").removeprefix("__forward_").rstrip("0123456789").rstrip("_")
