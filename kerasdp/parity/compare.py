"""Trains a model on several backends and numbers of devices, compares these training runs, and draws a figure."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kerasdp.config import BACKENDS
from kerasdp.errors import RunError, UserError
from kerasdp.parity.divergence import Divergence, Tolerance, difference, first_divergence, locate, tolerance_for
from kerasdp.parity.trace import Job, Trace, Way, plain_losses, trace
from kerasdp.processes.devices import is_installed
from kerasdp.reporting.report import in_columns, warn
from kerasdp.reporting.run_files import BACKEND_COLOURS, make_figure

_DASHES = ("-", "--", ":", "-.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a training run on one backend and number of devices. `str(outcome)` describes the result.

    Args:
        way: backend, number of devices and precision of the run.
        reference: backend, number of devices and precision of the reference run.
        losses: loss of each step, shape `(steps,)`.
        differences: relative difference of each loss from the loss of the reference, shape `(steps,)`.
        divergence: first place where the run diverges from the reference; None if the run does not diverge.
        round_off: largest relative difference of a loss in float64, if the run diverges in float32 but not in float64.
            In this case only round-off has grown, and there is no bug. None in all other cases.
        error: reason why the model could not be trained; empty if it was trained.
        seconds: seconds from the start of the process to its end.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        random = np.random.default_rng(0)
        data = random.random((64, 8)), random.random((64, 1))

        def build_model():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            return model

        comparison = kerasdp.parity.compare(build_model, data, backends=["jax"], device_counts=[1, 2], steps=10)
        for outcome in comparison.outcomes:
            print(outcome.way, outcome.passed, outcome.differences.max())
        ```
    """

    way: Way
    reference: Way
    losses: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))
    differences: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))
    divergence: Divergence | None = None
    round_off: float | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Returns whether the model was trained and agrees with the reference."""
        return not self.error and (self.divergence is None or self.round_off is not None)

    def __str__(self) -> str:
        if self.error:
            return f"{self.way} failed: {self.error}"
        if self.divergence is None:
            return f"{self.way} trains as {self.reference}"
        if self.round_off is not None:
            return (
                f"{self.way} diverges from {self.reference} by round-off alone (in float64 they are "
                f"{self.round_off:.1e} apart): {dataclasses.replace(self.divergence, layer='')}"
            )
        return f"{self.way} diverges from {self.reference}: {self.divergence}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `kerasdp.parity.compare`: one model, trained on several backends and numbers of devices.

    Args:
        outcomes: an `Outcome` for each training run. The first one is the reference.
        tolerance: largest allowed difference of the losses.
        plain: losses of `keras.Model.fit` on one device without kerasdp, by backend. Empty unless `compare` was called
            with `with_plain=True`.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        random = np.random.default_rng(0)
        data = random.random((64, 8)), random.random((64, 1))

        def build_model():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            return model

        comparison = kerasdp.parity.compare(build_model, data, backends=["jax"], device_counts=[1, 2], steps=10)
        assert comparison.passed, comparison.table()
        comparison.draw("parity.png")
        ```
    """

    outcomes: list[Outcome]
    tolerance: Tolerance
    plain: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Returns whether all training runs agree with the reference."""
        return all(outcome.passed for outcome in self.outcomes)

    def table(self) -> str:
        """Returns a table as text, with one row per training run.

        The first column has the backend and the number of devices. The other columns have the largest relative
        difference of a loss from the reference, the first divergent step, and the seconds of the process.
        """
        rows = [["trained on", "max difference", "first divergent step", "seconds"]]
        for outcome in self.outcomes:
            step = "failed" if outcome.error else "none"
            if outcome.divergence is not None:
                step = "-" if outcome.divergence.step is None else str(outcome.divergence.step)
            worst = f"{outcome.differences.max():.1e}" if len(outcome.differences) else ""
            if outcome.way == outcome.reference:
                worst = "(reference)"
            rows.append([str(outcome.way), worst, step, f"{outcome.seconds:.1f}"])
        words = [str(outcome) for outcome in self.outcomes if outcome.error or outcome.divergence]
        return "\n".join([in_columns(rows, right=(1, 2, 3)), *words])

    def draw(self, path: str, title: str = "One model, trained many ways") -> None:
        """Draws a figure of the losses of all runs, and of their relative differences from the reference.

        The figure also shows the tolerance. If there are losses of plain Keras, the figure shows them at the top.

        Args:
            path: path of the PNG file.
            title: title of the figure.
        """
        figure, (*first, upper, lower) = make_figure(7.6, 6.4 + 2.8 * bool(self.plain), rows=2 + bool(self.plain))
        for backend, losses in self.plain.items():
            first[0].plot(losses, color=BACKEND_COLOURS[backend], linewidth=1.2, label=backend)
        trained = [outcome for outcome in self.outcomes if len(outcome.losses)]
        counts = list(dict.fromkeys(outcome.way.num_devices for outcome in trained))
        for index, outcome in enumerate(trained):
            dashes = _DASHES[counts.index(outcome.way.num_devices) % len(_DASHES)]
            style: dict[str, Any] = {"color": BACKEND_COLOURS[outcome.way.backend], "linestyle": dashes}
            # Wide below, narrow on top: curves that coincide stay visible.
            width = 1.2 + 5.0 * (len(trained) - 1 - index) / max(len(trained) - 1, 1)
            steps = np.arange(len(outcome.losses))
            upper.plot(steps, outcome.losses, linewidth=width, label=str(outcome.way), **style)
            # A logarithm has no place for equal.
            apart = np.where(outcome.differences > 0, outcome.differences, np.nan)
            if not np.isnan(apart).all():
                lower.plot(steps[: len(apart)], apart, marker=".", markersize=4, linewidth=1, **style)
        longest = max((len(outcome.losses) for outcome in trained), default=1)
        allowed = [self.tolerance.after(step) for step in range(longest)]
        lower.plot(range(longest), allowed, color="#888888", linewidth=1, label="tolerance")
        if self.plain:
            first[0].set(
                ylabel="loss", title=f"Plain Keras with one seed: {len(self.plain)} backends, {len(self.plain)} curves"
            )
            first[0].legend(frameon=False, fontsize=8)
            title = f"kerasdp: {len(trained)} trainings{', one curve' * self.passed} ({title})"
        upper.set(ylabel="loss", title=title)
        lower.set(xlabel="step", ylabel="relative difference", yscale="log")
        upper.legend(frameon=False, ncols=3, fontsize=8)
        lower.legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=120)


def compare(
    build_model: Callable[[], Any],
    data: Any,
    *,
    backends: Iterable[str] | None = None,
    device_counts: Iterable[int] = (1, 2),
    precision: str = "float32",
    tolerance: Tolerance | None = None,
    report: Callable[[Outcome], None] | None = None,
    with_plain: bool = False,
    **choices: Any,
) -> Comparison:
    """Trains a model on each backend and number of devices, and compares each training run with the first one.

    Each run starts in a new process. Initial weights and the samples of each step must be bitwise equal between runs.
    Losses, gradient norms, metrics and final weights must be equal up to round-off.

    If a run diverges from the reference, the first step of both runs is repeated to find the layer that differs. Then
    both runs are repeated in float64, to distinguish a bug from round-off that has grown. The float64 runs are skipped
    if outputs of the first forward pass differ by more than ten tolerances.

    Args:
        build_model: a function without arguments that returns a compiled Keras model. Each process calls it.
        data: `(x, y)` or `(x, y, sample_weight)` as for `model.fit`, or a function that returns this tuple.
        backends: names of backends. None: all installed backends.
        device_counts: numbers of devices. The devices are virtual CPU devices, unless the argument `device` is set.
        precision: `"float32"`, or `"float64"`, in which round-off is far smaller than bugs.
        tolerance: largest allowed difference of the losses. None: a default for the precision and the optimizer.
        report: a function that is called with the `Outcome` of each run, as soon as the run ends.
        with_plain: whether to train also with `keras.Model.fit`, without kerasdp, on each backend. The figure then
            shows these losses, too.
        **choices: fields of `Job`: `steps` (40), `batch_size` (32), `seed`, `batch_norm`, `class_weight`, `device`,
            `compile` (torch only).

    Returns:
        A `Comparison`. With `batch_norm="replica"`, each run is compared with the first backend on the same number of
            devices.

    Raises:
        UserError: if the model cannot be sent to other processes, or the reference cannot be trained.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        random = np.random.default_rng(0)
        data = random.random((64, 8)), random.random((64, 1))

        def build_model():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            return model

        comparison = kerasdp.parity.compare(build_model, data, backends=["jax"], device_counts=[1, 2], steps=10)
        print(comparison.table())
        ```
    """
    job = Job(build_model=build_model, data=data, **choices)
    names = tuple(backends) if backends is not None else tuple(name for name in BACKENDS if is_installed(name))
    ways = [Way(backend=name, num_devices=count, precision=precision) for name in names for count in device_counts]
    if not ways:
        raise UserError("parity: expected at least one backend and one device count. Received: none")
    references: dict[int, Reference] = {}
    outcomes = []

    def reference_of(way: Way) -> Reference:
        return references.setdefault(way.num_devices if job.batch_norm == "replica" else 0, Reference(job, way))

    tolerance = tolerance or reference_of(ways[0]).tolerance
    for way in ways:
        outcomes.append(judge(way, reference_of(way), tolerance))
        if report is not None:
            report(outcomes[-1])
    plain = {}
    for name in names if with_plain else ():
        try:
            plain[name] = plain_losses(job, name)
        except RunError as error:
            reason = [line for line in str(error).splitlines() if "Error: " in line] or [str(error)]
            warn(f"keras.Model.fit on {name} without kerasdp fails, so the figure lacks this curve: {reason[-1]}")
    return Comparison(outcomes=outcomes, tolerance=tolerance, plain=plain)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The training run that other runs are compared with. Attributes are computed when first read, and cached.

    Args:
        job: model, data and options of the run.
        way: backend, number of devices and precision of the run.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        random = np.random.default_rng(0)
        data = random.random((64, 8)), random.random((64, 1))

        def build_model():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            return model

        job = kerasdp.parity.Job(build_model=build_model, data=data, steps=10)
        reference = kerasdp.parity.Reference(job, kerasdp.parity.Way(backend="jax", num_devices=1))
        print(reference.trace.losses)  # of 10 steps
        ```
    """

    job: Job
    way: Way

    @functools.cached_property
    def trace(self) -> Trace:
        """Returns the recorded values of all steps."""
        return trace(self.job, self.way)

    @functools.cached_property
    def first_step(self) -> Trace:
        """Returns the recorded values of the first step, with all outputs and gradients."""
        return trace(self.job, self.way, is_detailed=True)

    @functools.cached_property
    def in_float64(self) -> "Reference":
        """Returns a reference with precision float64, on the same backend and number of devices."""
        return Reference(self.job, dataclasses.replace(self.way, precision="float64"))

    @property
    def tolerance(self) -> Tolerance:
        """Returns the default tolerance for the precision and the optimizer of the run."""
        return tolerance_for(self.way.precision, self.trace.optimizer)


def judge(way: Way, reference: Reference, tolerance: Tolerance) -> Outcome:
    """Trains a model on one backend and number of devices, and compares the run with the reference.

    Args:
        way: backend, number of devices and precision of the run.
        reference: the run to compare with. The reference runs first if it has not run yet.
        tolerance: largest allowed difference of the losses.

    Returns:
        An `Outcome`. If the run fails, the field `error` has the reason.

    Raises:
        UserError: if the model cannot be sent to other processes, or the reference cannot be trained.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        random = np.random.default_rng(0)
        data = random.random((64, 8)), random.random((64, 1))

        def build_model():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            return model

        job = kerasdp.parity.Job(build_model=build_model, data=data, steps=10)
        one, two = (kerasdp.parity.Way(backend="jax", num_devices=count) for count in (1, 2))
        reference = kerasdp.parity.Reference(job, one)
        print(kerasdp.parity.judge(two, reference, reference.tolerance))  # jax x 2 trains as jax x 1
        ```
    """
    expected = reference.trace
    if way == reference.way:
        none = np.zeros(len(expected.losses))
        return Outcome(way=way, reference=way, losses=expected.losses, differences=none, seconds=expected.seconds)
    try:
        received = trace(reference.job, way)
        divergence, round_off = first_divergence(expected, received, tolerance), None
        if divergence is not None and divergence.what in ("loss", "gradient", "metrics", "final weights"):
            first = trace(reference.job, way, is_detailed=True)
            layer, is_certain = locate(reference.first_step, first, tolerance)
            if not layer:
                layer = "in step 0 all outputs and gradients agree: an update differs, or round-off has grown"
            elif divergence.step != 0:
                layer = f"in step 0 already {layer}"
            divergence = dataclasses.replace(divergence, layer=layer)
            # In the first step a ReLU near zero does not move the norm of all gradients beyond the tolerance.
            is_certain |= divergence.what == "gradient" and divergence.step == 0
            if not is_certain and way.precision == "float32":
                round_off = _difference_in_float64(way, reference)
    except RunError as error:
        return Outcome(way=way, reference=reference.way, error=str(error))
    return Outcome(
        way=way,
        reference=reference.way,
        losses=received.losses,
        differences=np.array([difference(*pair) for pair in zip(expected.losses, received.losses)]),
        divergence=divergence,
        round_off=round_off,
        seconds=received.seconds,
    )


def _difference_in_float64(way: Way, reference: Reference) -> float | None:
    """Returns the largest relative difference of a loss in float64; None if the runs diverge in float64, too."""
    exact = reference.in_float64
    received = trace(reference.job, dataclasses.replace(way, precision="float64"))
    if first_divergence(exact.trace, received, exact.tolerance) is not None:
        return None
    return max(difference(*pair) for pair in zip(exact.trace.losses, received.losses))
