"""Measures or counts what the calls of a model's layers cost."""

import statistics
import time
from typing import Any

import keras
import numpy as np


def costs_of(nodes: list[Any], inputs: list[Any], kind: str, batch_size: int) -> list[float]:
    """Returns the cost of each call: seconds of its forward pass, arithmetic operations, or numbers in its weights.

    Args:
        nodes: of a functional model, in an order in which they can be called.
        inputs: its symbolic inputs.
        kind: `"time"`, `"flops"` or `"parameters"`.
        batch_size: samples with which time is measured.
    """
    if kind == "time":
        seconds = _seconds(nodes, inputs, batch_size)
        if keras.backend.backend() == "torch":
            return seconds
        # Called one by one, as here, most of a small layer's time goes into its start, which is no part of a compiled
        # program. What more samples add is.
        started = _seconds(nodes, inputs, 1)
        added = [max(whole - start, 0.0) for whole, start in zip(seconds, started)]
        return added if any(added) else seconds
    counted: set[int] = set()
    costs = []
    for node in nodes:
        operation = node.operation
        if kind == "flops":
            costs.append(float(_flops(node)))
        else:  # weights of a layer that is called twice are there once
            costs.append(0.0 if id(operation) in counted else float(_num_parameters(operation)))
            counted.add(id(operation))
    return costs


def _num_parameters(operation: Any) -> int:
    return sum(int(np.prod(weight.shape)) for weight in getattr(operation, "weights", []))


def _flops(node: Any) -> int:
    """Counts two per weight and position of the output; one per number of an output without weights."""
    kernels = [weight for weight in getattr(node.operation, "weights", []) if len(weight.shape) > 1]
    shape = [size or 1 for size in node.outputs[0].shape[1:]]
    if not kernels:
        return int(np.prod(shape))
    # Channels come last, or, where the layer says so, first.
    first = getattr(node.operation, "data_format", None) == "channels_first"
    positions = int(np.prod(shape[1:] if first else shape[:-1]))
    return 2 * positions * sum(int(np.prod(kernel.shape)) for kernel in kernels)


def _seconds(nodes: list[Any], inputs: list[Any], batch_size: int) -> list[float]:
    """Returns the medians of three passes, after one that compiles."""
    values = {id(tensor): _some(tensor, batch_size) for tensor in inputs}
    seconds: list[list[float]] = [[] for _ in nodes]
    for repetition in range(4):
        known = dict(values)
        for node, measured in zip(nodes, seconds):
            args, kwargs = node.arguments.fill_in(known)
            start = time.perf_counter()
            outputs = keras.tree.flatten(node.operation(*args, **kwargs))
            for output in outputs:
                keras.ops.convert_to_numpy(output)  # waits for it
            if repetition:
                measured.append(time.perf_counter() - start)
            known |= {id(tensor): value for tensor, value in zip(node.outputs, outputs)}
    return [statistics.median(measured) for measured in seconds]


def _some(tensor: Any, batch_size: int) -> Any:
    """Makes a batch of small numbers, which are valid as anything: pixels, tokens, measurements."""
    shape = (batch_size, *(size or 1 for size in tensor.shape[1:]))
    return keras.ops.convert_to_tensor(np.random.RandomState(0).randint(0, 2, shape).astype(tensor.dtype))
