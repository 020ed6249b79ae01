"""Measures or counts what the calls of a model's layers cost."""

import statistics
import time
from typing import Any

import keras
import numpy as np

from kerasdp.pipeline.graph import Call, Graph


def costs_of(graph: Graph, kind: str, batch_size: int) -> list[float]:
    """Returns the cost of each call: seconds of its forward pass, arithmetic operations, or numbers in its weights.

    Args:
        graph: of a functional model.
        kind: `"time"`, `"flops"` or `"parameters"`.
        batch_size: samples with which time is measured.
    """
    if kind == "time":
        seconds = _seconds(graph, batch_size)
        if keras.backend.backend() == "torch":
            return seconds
        # Called one by one, as here, most of a small layer's time goes into its start, which is no part of a compiled
        # program. What more samples add is.
        started = _seconds(graph, 1)
        added = [max(whole - start, 0.0) for whole, start in zip(seconds, started)]
        return added if any(added) else seconds
    counted: set[int] = set()
    costs = []
    for call in graph.calls:
        operation = call.operation
        if kind == "flops":
            costs.append(float(_flops(call)))
        else:  # weights of a layer that is called twice are there once
            costs.append(0.0 if id(operation) in counted else float(_num_parameters(operation)))
            counted.add(id(operation))
    return costs


def _num_parameters(operation: Any) -> int:
    return sum(int(np.prod(weight.shape)) for weight in getattr(operation, "weights", []))


def _flops(call: Call) -> int:
    """Counts two per weight and position of the output; one per number of an output without weights."""
    kernels = [weight for weight in getattr(call.operation, "weights", []) if len(weight.shape) > 1]
    shape = [size or 1 for size in next(iter(call.outputs.values())).shape[1:]]
    if not kernels:
        return int(np.prod(shape))
    # Channels come last, or, where the layer says so, first.
    first = getattr(call.operation, "data_format", None) == "channels_first"
    positions = int(np.prod(shape[1:] if first else shape[:-1]))
    return 2 * positions * sum(int(np.prod(kernel.shape)) for kernel in kernels)


def _seconds(graph: Graph, batch_size: int) -> list[float]:
    """Returns the medians of three passes, after one that compiles."""
    values = {key: _some(tensor, batch_size) for key, tensor in graph.inputs.items()}
    seconds: list[list[float]] = [[] for _ in graph.calls]
    for repetition in range(4):
        known = dict(values)
        for call, measured in zip(graph.calls, seconds):
            start = time.perf_counter()
            for output in call.run(known):
                keras.ops.convert_to_numpy(output)  # waits for it
            if repetition:
                measured.append(time.perf_counter() - start)
    return [statistics.median(measured) for measured in seconds]


def _some(tensor: Any, batch_size: int) -> Any:
    """Makes a batch of small numbers, which are valid as anything: pixels, tokens, measurements."""
    shape = (batch_size, *(size or 1 for size in tensor.shape[1:]))
    return keras.ops.convert_to_tensor(np.random.RandomState(0).randint(0, 2, shape).astype(tensor.dtype))
