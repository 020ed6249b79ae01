"""Measures or counts what the calls of a model's layers cost."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from kerasdp.pipeline.graph import Call, Graph


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuringDevice:
    """A device on which time is measured.

    Args:
        holding: gives a context in which the weights of an operation are on the device, which is Keras' default one.
        wait: waits for a tensor.
    """

    holding: Callable[[Any], AbstractContextManager[None]] = lambda operation: contextlib.nullcontext()
    wait: Callable[[Any], Any] = keras.ops.convert_to_numpy


# The device where the weights are.
HERE = MeasuringDevice()


def costs_of(graph: Graph, kind: str, batch_size: int, measuring: MeasuringDevice = HERE) -> list[float]:
    """Returns the cost of each call: seconds of its forward pass, arithmetic operations, or numbers in its weights.

    Args:
        graph: of a functional model.
        kind: `"time"`, `"flops"` or `"parameters"`.
        batch_size: samples with which time is measured.
        measuring: where it is measured.
    """
    if kind == "time":
        seconds = _seconds(graph, batch_size, measuring)
        if keras.backend.backend() == "torch":
            return seconds
        # Called one by one, as here, most of a small layer's time goes into its start, which is no part of a compiled
        # program. What more samples add is.
        started = _seconds(graph, 1, measuring)
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


def _seconds(graph: Graph, batch_size: int, measuring: MeasuringDevice) -> list[float]:
    """Returns the medians of three passes, after one that compiles."""
    last_uses = {key: number for number, call in enumerate(graph.calls) for key, _ in call.inputs.values()}
    seconds: list[list[float]] = [[] for _ in graph.calls]
    with measuring.holding(None):
        values = {key: _some(tensor, batch_size) for key, tensor in graph.inputs.items()}
    for repetition in range(4):
        known = dict(values)
        for number, (call, measured) in enumerate(zip(graph.calls, seconds)):
            with measuring.holding(call.operation):
                start = time.perf_counter()
                for output in call.run(known):
                    measuring.wait(output)
                if repetition:
                    measured.append(time.perf_counter() - start)
            known = {key: value for key, value in known.items() if last_uses.get(key, 0) > number}
    return [statistics.median(measured) for measured in seconds]


def _some(tensor: Any, batch_size: int) -> Any:
    """Makes a batch of small numbers, which are valid as anything: pixels, tokens, measurements."""
    shape = (batch_size, *(size or 1 for size in tensor.shape[1:]))
    return keras.ops.convert_to_tensor(np.random.RandomState(0).randint(0, 2, shape).astype(tensor.dtype))
