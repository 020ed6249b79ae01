"""Counts the bytes that a device sends in a training step, on virtual CPU devices.

A reduction counts with the tensor that it reduces, a gathering with what it has gathered, a message with its own bytes:
how often a ring sends them along is the framework's affair. What an epoch's begin and end send is left out.

- torch: collectives and messages of its profiler, of the kit or of a user; and what kerasdp writes into sockets.
- jax: collectives that its profiler saw running, with the shapes that the compiled programs give them.
- tensorflow: the inputs of the collectives, and of the sums on one device, in the function that has most of them, as it
  is traced.
"""

import collections
import functools
import glob
import json
import math
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable
from typing import Any

STEPS = 2
_DUMP = "--xla_dump_to="
_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_counted = 0
_graphs: dict[Any, float] = {}


@functools.cache
def prepare(backend: str) -> None:
    """Makes a step's bytes countable. To be called in each process, before the framework makes devices or graphs."""
    if backend == "jax":
        folder = tempfile.mkdtemp(prefix="kerasdp-hlo-")
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # what comes from there is not written
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DUMP}{folder} --xla_dump_hlo_as_text"
    elif backend == "tensorflow":
        _count_tensorflow_collectives()
    elif backend == "torch":
        _count_sockets()


def bytes_a_step(backend: str, num_devices: int, repeat: Callable[[int], Any]) -> int:
    """Returns how many bytes a device sends in a step. Each process calls it.

    Args:
        backend: the framework.
        num_devices: that train.
        repeat: trains so many steps, as an epoch.
    """
    if backend == "tensorflow":
        return _tensorflow(num_devices)
    count = {"torch": _torch, "jax": _jax}[backend]
    epoch = count(repeat, 1, num_devices)  # with what an epoch's begin and end send
    found = round((count(repeat, 1 + STEPS, num_devices) - epoch) / STEPS)
    if backend == "jax":
        shutil.rmtree(_dump_folder())  # here: the program that asks for repetitions ends the program with a signal
    return found


def _dump_folder() -> str:
    return os.environ["XLA_FLAGS"].rsplit(_DUMP, 1)[1].split()[0]


def _add(number: int) -> None:
    global _counted
    _counted += int(number)


def _torch(repeat: Callable[[int], Any], steps: int, num_devices: int) -> float:
    import torch

    before = _counted
    with torch.profiler.profile(record_shapes=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        repeat(steps)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        with open(file.name) as trace:
            events = json.load(trace)["traceEvents"]
    found = 0
    for event in events:
        name, figures = event["name"], event.get("args", {})
        if not name.startswith("gloo:") or "recv" in name:
            continue
        for shape, kind in zip(figures.get("Input Dims", []), figures.get("Input type", [])):
            if shape and kind in _TORCH_SIZES:
                found += math.prod(shape) * _TORCH_SIZES[kind] * (num_devices if "gather" in name else 1)
    return found + _counted - before


_TORCH_SIZES = {
    "float": 4, "double": 8, "long int": 8, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "unsigned char": 1,
    "signed char": 1, "bool": 1, "short int": 2,
}  # fmt: skip


def _count_sockets() -> None:
    send = socket.socket.sendall

    def sendall(self: socket.socket, data: Any, *flags: int) -> None:
        _add(memoryview(data).nbytes)
        send(self, data, *flags)

    socket.socket.sendall = sendall


def _jax(repeat: Callable[[int], Any], steps: int, num_devices: int) -> float:
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            repeat(steps)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(path).planes
        events = [dict(event.stats) for plane in planes for line in plane.lines for event in line.events]
    runs = collections.Counter((event["program_id"], event["hlo_op"]) for event in events if "hlo_op" in event)
    sizes = {program: _collectives_of(program) for program, _ in runs}
    # Each device runs each collective. Of the last one the profiler (jax 0.10.2) may miss the slower device.
    return sum(-(-times // num_devices) * sizes[program].get(name, 0) for (program, name), times in runs.items())


def _collectives_of(program: int) -> dict[str, int]:
    """Returns the bytes of the result of each collective in a compiled program, by its name in it."""
    (path,) = glob.glob(f"{_dump_folder()}/module_{program:04}.*cpu_after_optimizations.txt")
    found = {}
    with open(path) as file:
        for line in file:
            match = re.match(rf"\s*(?:ROOT )?%?([\w.-]+) = (.*?) (?:{_COLLECTIVES})\(", line)
            if match:
                name, result = match.groups()
                arrays = re.findall(r"\b(?:f|bf|s|u|pred)(\d*)\[([\d,]*)\]", result)
                found[name] = sum(int(bits or 8) // 8 * _product(shape) for bits, shape in arrays)
    return found


def _product(shape: str) -> int:
    return math.prod(int(number) for number in shape.split(",") if number)


def _count_tensorflow_collectives() -> None:
    import tensorflow as tf

    # A private module of TensorFlow (2.21): all that its strategies reduce or gather passes here, and nowhere public.
    from tensorflow.python.ops import collective_ops

    def add(tensor: Any, times: int) -> None:
        graph = getattr(tensor, "graph", None)  # None: not in a function
        while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
            graph = graph.outer_graph
        if graph is not None and graph.name != "compute_gathered_values":  # that of a gathering outside of functions
            elements = tensor.shape.num_elements()
            size = math.nan if elements is None else elements * tensor.dtype.size
            _graphs[graph] = _graphs.get(graph, 0) + size * times

    def counted(collective: Callable[..., Any], is_gathering: bool) -> Callable[..., Any]:
        def call(tensor: Any, group_size: Any, *rest: Any, **more: Any) -> Any:
            add(tensor, group_size if is_gathering else 1)
            return collective(tensor, group_size, *rest, **more)

        return call

    for name in ("all_reduce", "all_reduce_v2", "all_gather", "all_gather_v2"):
        setattr(collective_ops, name, counted(getattr(collective_ops, name), "gather" in name))

    # And what virtual devices sum or gather on one of them. No public way to see a gathering.
    def counted_on_one(reduce: Callable[..., Any], is_gathering: bool) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **more: Any) -> Any:
            values = args[0 if is_gathering else 1].values
            for value in values:
                add(value, len(values) if is_gathering else 1)
            return reduce(self, *args, **more)

        return call

    on_one = tf.distribute.ReductionToOneDevice
    on_one.reduce_implementation = counted_on_one(on_one.reduce_implementation, False)
    on_one._gather_implementation = counted_on_one(on_one._gather_implementation, True)


def _tensorflow(num_devices: int) -> int:
    if any(math.isnan(size) for size in _graphs.values()):
        raise ValueError("a collective of tensorflow has a shape that is not known before it runs")
    return round(max(_graphs.values(), default=0) / num_devices)
