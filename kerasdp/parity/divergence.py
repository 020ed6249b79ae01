"""Checks whether two training runs are equal up to round-off, and finds where they first diverge."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from kerasdp.parity.trace import Trace

# The spacing of numbers around 1.
_ROUND_OFF = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


# A third of float32's round-off: TensorFlow (2.21) keeps some constants in float32 even in float64, those of GELU and
# leaky ReLU (4e-9 off), and resizes images in it. Without these, 40 steps of a model agree to 1e-15.
_FLOAT64_START = 2e-8
# Single values within a step differ more than their mean, the loss.
_SINGLE_NUMBERS = 30.0
# No deep model's round-off is larger: in the first pass of EfficientNetB0, an output differs by 1.03 tolerances.
_BEYOND_ROUND_OFF = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest allowed relative difference between two training runs. It grows with each step.

    Args:
        start: tolerance of the loss in the first step. It is larger than the round-off of one addition, because each
            backend adds values in a different order.
        growth: factor by which the tolerance grows with each step.
        limit: largest tolerance of a loss, after any number of steps.
        kinks: smallest tolerance of a gradient. If an activation is zero up to round-off, a ReLU may be active in one
            run and inactive in the other. Then the gradients differ at once.

    Example:
        ```python
        import kerasdp

        tolerance = kerasdp.parity.Tolerance(start=1e-6, growth=1.2, limit=5e-3, kinks=2e-2)
        print(tolerance.after(0))  # 1e-06
        print(tolerance.after(10))  # about 6.2e-06
        # kerasdp.parity.compare(build_model, data, tolerance=tolerance)
        ```
    """

    start: float
    growth: float
    limit: float
    kinks: float

    def after(self, step: int) -> float:
        """Returns the tolerance of the loss in a step. The number of the first step is 0."""
        return min(self.limit, self.start * self.growth**step)

    def of_outputs(self, step: int) -> float:
        """Returns the tolerance of a layer's output in a step. The number of the first step is 0."""
        return _SINGLE_NUMBERS * self.after(step)

    def of_gradients(self, step: int) -> float:
        """Returns the tolerance of the gradients in a step, and of the weights and metrics after the step."""
        return max(self.of_outputs(step), self.kinks)


def tolerance_for(precision: str, optimizer: str) -> Tolerance:
    """Returns the default tolerance for a precision and an optimizer.

    The tolerance starts at ten times the round-off of the precision. In float32 this is 1.2e-6. With SGD it grows by
    12% per step, to 1e-4 after 40 steps. Optimizers such as Adam divide each gradient by its size, so round-off in a
    tiny gradient has the same effect as in a large gradient. With Adam the tolerance grows by 23% per step: to
    1e-5 after 10 steps, and to 5e-3, the limit, after 40 steps. In float64 the tolerance grows from 2e-8 to 1e-6.

    Args:
        precision: precision of the arithmetic.
        optimizer: class name of a Keras optimizer.
    """
    growth = 1.12 if optimizer == "SGD" else 1.23
    if precision == "float64":
        return Tolerance(start=_FLOAT64_START, growth=growth, limit=1e-6, kinks=0.0)
    start = 10 * _ROUND_OFF[precision]
    return Tolerance(start=start, growth=growth, limit=max(5e-3, start), kinks=max(2e-2, 3 * start))


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first place where a training run diverges from its reference. `str(divergence)` describes the place.

    Args:
        what: `"initial weights"`, `"samples"`, `"loss"`, `"gradient"`, `"metrics"` or `"final weights"`.
        expected: value in the reference, as text.
        received: value in the other run, as text.
        step: number of the step, from 0. None: the place is before the first step or after the last step.
        where: name of the variable or metric, or number of the row.
        difference: relative difference; NaN if the values are not numbers.
        layer: a text with the layer or weight that differs first; empty if no layer was searched for.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        random = np.random.default_rng(0)
        data = random.random((64, 8)), random.random((64, 1))

        def build_model():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.layers[0].kernel.assign(np.random.default_rng().random((8, 1)))  # no seed: each time other weights
            model.compile("sgd", "mse")
            return model

        comparison = kerasdp.parity.compare(build_model, data, backends=["jax"], device_counts=[1, 2], steps=10)
        divergence = comparison.outcomes[1].divergence
        print(divergence.what, divergence.where)  # initial weights sequential/dense/kernel
        ```
    """

    what: str
    expected: str
    received: str
    step: int | None = None
    where: str = ""
    difference: float = math.nan
    layer: str = ""

    def __str__(self) -> str:
        when = "" if self.step is None else f"step {self.step}: "
        apart = "" if math.isnan(self.difference) else f" ({self.difference:.1e} apart)"
        place = f", {self.where}" if self.where else ""
        cause = f"; {self.layer}" if self.layer else ""
        return f"{when}{self.what}{place}: expected {self.expected}, received {self.received}{apart}{cause}"


def difference(expected: np.ndarray, received: np.ndarray) -> float:
    """Returns the largest difference of two arrays, divided by the largest absolute value in both arrays.

    The result is infinite if the shapes differ, or if a value is NaN or infinite.
    """
    expected, received = np.asarray(expected), np.asarray(received)
    if expected.shape != received.shape:
        return math.inf
    if not expected.size:
        return 0.0
    expected, received = expected.astype(float), received.astype(float)
    apart, scale = np.abs(expected - received).max(), max(np.abs(expected).max(), np.abs(received).max())
    if not math.isfinite(apart):
        return math.inf
    return apart / scale if scale else 0.0


def first_divergence(expected: Trace, received: Trace, tolerance: Tolerance) -> Divergence | None:
    """Returns the first divergence of two training runs; None if the runs agree within the tolerance.

    Initial weights and the indices of the samples must be bitwise equal.
    """
    return next(_divergences(expected, received, tolerance), None)


def _divergences(expected: Trace, received: Trace, tolerance: Tolerance) -> Iterator[Divergence]:
    """Yields the divergences of two runs in order of time. The first one causes the later ones."""
    yield from _initial_weights(expected, received)
    num_steps, others = len(expected.losses), len(received.losses)
    for step in range(min(num_steps, others)):
        yield from _step(expected, received, tolerance, step)
    if num_steps != others:
        yield Divergence("samples", f"{num_steps} steps", f"{others} steps", min(num_steps, others))
    yield from _after_the_last(expected, received, tolerance)


def _initial_weights(expected: Trace, received: Trace) -> Iterator[Divergence]:
    names, others = list(expected.initial), list(received.initial)
    if names != others:
        numbers = f"{len(names)} variables", str(len(others))
        yield Divergence("initial weights", *next((pair for pair in zip(names, others) if pair[0] != pair[1]), numbers))
    for name, value in expected.initial.items():
        other = received.initial[name]
        if value.shape != other.shape or value.tobytes() != other.astype(value.dtype).tobytes():
            yield _of_weights("initial weights", name, value, other, difference(value, other))


def _step(expected: Trace, received: Trace, tolerance: Tolerance, step: int) -> Iterator[Divergence]:
    rows, other_rows = expected.samples[step], received.samples[step]
    if len(rows) != len(other_rows):
        yield Divergence("samples", f"{len(rows)} rows", f"{len(other_rows)} rows", step)
    if not np.array_equal(rows, other_rows):
        row = int(np.argmax(rows != other_rows))
        yield Divergence("samples", f"sample {rows[row]}", f"sample {other_rows[row]}", step, f"row {row}")
    loss, other_loss = expected.losses[step], received.losses[step]
    norm, other_norm = expected.gradient_norms[step], received.gradient_norms[step]
    for what, where, value, other, allowed in (
        ("loss", "", loss, other_loss, tolerance.after(step)),
        ("gradient", "norm over all weights", norm, other_norm, tolerance.of_gradients(step)),
    ):
        apart = difference(value, other)
        if apart > allowed and not (np.isnan(value) and np.isnan(other)):
            yield Divergence(what, f"{value:.9g}", f"{other:.9g}", step, where, apart)


def _after_the_last(expected: Trace, received: Trace, tolerance: Tolerance) -> Iterator[Divergence]:
    allowed = tolerance.of_gradients(len(expected.losses))
    for name in sorted(expected.metrics.keys() | received.metrics.keys()):
        pair = [trace.metrics.get(name, math.nan) for trace in (expected, received)]
        apart = difference(np.asarray(pair[0]), np.asarray(pair[1]))
        if apart > allowed:
            yield Divergence("metrics", f"{pair[0]:.9g}", f"{pair[1]:.9g}", where=name, difference=apart)
    squares, way = {}, 0.0
    for name, value in expected.final.items():
        other = received.final[name]
        if value.dtype.kind == "f":
            squares[name] = float(np.square(value.astype(float) - other).sum())
            way += float(np.square(value.astype(float) - expected.initial[name]).sum())
        elif not np.array_equal(value, other):
            yield _of_weights("final weights", name, value, other)
    # Relative to the distance that all weights moved. A weight that the loss does not depend on, such as a bias before
    # a batch norm, moves only by round-off.
    apart, way = math.sqrt(sum(squares.values())), math.sqrt(way)
    if apart > allowed * way:
        name = max(squares, key=lambda each: squares[each])
        apart = apart / way if way else math.inf
        yield _of_weights("final weights", f"most in {name}", expected.final[name], received.final[name], apart)


def _of_weights(what: str, where: str, value: np.ndarray, other: np.ndarray, apart: float = math.nan) -> Divergence:
    return Divergence(what, _brief(value), _brief(other), where=where, difference=apart)


def locate(expected: Trace, received: Trace, tolerance: Tolerance) -> tuple[str, bool]:
    """Finds the layer or weight where two training runs first differ in their first step.

    Args:
        expected: detailed `Trace` of the reference.
        received: detailed `Trace` of the other run.
        tolerance: tolerance of outputs and gradients.

    Returns:
        A tuple of a text and a bool. The text names the layer or weight; it is empty if the runs agree in this step.
        The bool is True if the difference is certainly a bug: a difference in the forward pass that is larger than the
        round-off of any model.
    """
    largest = ("no layer", 0.0)
    for name, output in expected.outputs.items():
        apart = difference(output, received.outputs.get(name, np.empty(0)))
        if apart > tolerance.of_outputs(0):
            before = f"before it: at most {largest[1]:.1e}, in {largest[0]}" if largest[1] else "equal before it"
            is_large = apart > _BEYOND_ROUND_OFF * tolerance.of_outputs(0)
            return f"the output of {name} differs first, by {apart:.1e} ({before})", is_large
        largest = max(largest, (name, apart), key=lambda pair: pair[1])
    agreed = f"the outputs of all layers agree (at most {largest[1]:.1e} apart)"
    apart = difference(expected.losses[0], received.losses[0])
    if apart > tolerance.after(0):
        return (
            f"{agreed}, but the loss differs: check the weights of the loss, and its mean over samples or replicas",
            apart > _BEYOND_ROUND_OFF * tolerance.after(0),
        )
    # A gradient that is only round-off proves nothing. An example is the gradient of a bias before a batch norm.
    scale = max((np.abs(gradient).max() for gradient in expected.gradients.values() if gradient.size), default=1.0)
    allowed = tolerance.of_gradients(0)
    for name, gradient in reversed(expected.gradients.items()):
        other = received.gradients.get(name, np.empty(0))
        apart = difference(gradient, other)
        if apart == math.inf or (apart > allowed and np.abs(gradient - other).max() > 1e-3 * allowed * scale):
            return (
                f"{agreed}, and the losses agree; in the backward pass, the gradient of {name} differs first, by "
                f"{apart:.1e}: check its computation, and its all-reduce over the replicas",
                False,
            )
    return "", False


def _brief(value: np.ndarray) -> str:
    numbers = ", ".join(f"{number:.6g}" for number in value.ravel()[:3].tolist())
    return f"[{numbers}{', ...' if value.size > 3 else ''}]"
