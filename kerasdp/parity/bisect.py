"""Finds the first operation whose results differ between two backends, in a forward pass, a gradient or an update."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kerasdp.config import BACKENDS
from kerasdp.errors import UserError
from kerasdp.parity.divergence import difference, tolerance_for
from kerasdp.parity.trace import Job, Way, call_in, made, values_of
from kerasdp.processes.devices import is_installed

if TYPE_CHECKING:
    from kerasdp.keras_compat.operations import Call

# Tolerance of a single operation in float64, and the factor by which it may amplify a difference of its inputs. A value
# that was float32 in between is 3e-8 off.
_OPERATION, _CONDITION = 1e-8, 100.0
# A gradient below this share of the largest one is round-off. An example is the gradient of a bias before a batch norm.
_NOTHING = 1e-9


@dataclasses.dataclass(kw_only=True)
class Step:
    """The recorded results of one training step.

    Args:
        calls: calls of operations in the forward pass and the loss.
        loss: loss of the batch.
        gradients: gradient of each weight by path, except for weights that the loss does not depend on.
        after: values of the model's variables after the update, by path.
    """

    calls: "list[Call]"
    loss: float
    gradients: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


@dataclasses.dataclass(kw_only=True)
class Steps:
    """The recorded training steps on one backend.

    Args:
        initial: values of the variables before the first step, by path.
        optimizer: name of the optimizer's class.
        steps: recorded steps, in order.
    """

    initial: dict[str, np.ndarray]
    optimizer: str
    steps: list[Step]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of `kerasdp.parity.bisect`: the first place where two backends differ by more than round-off.

    `str(finding)` describes the place.

    Args:
        backends: names of the two backends.
        what: `"initial weights"`, `"operation"`, `"gradient"`, `"statistics"` or `"update"`; `"loss"` if the loss
            differs but no operation does.
        name: name of the operation, the variable or the optimizer.
        step: number of the step, from 0. None: the place is before the first step.
        expected: value on the first backend.
        received: value on the second backend.
        difference: largest difference, divided by the largest absolute value.
        call: the call of the operation, with its inputs on the first backend; None if no operation is the cause.
        inputs_differ: whether the inputs of the operation differ, too. In this case code that calls no Keras operation
            has computed the inputs.

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

        finding = kerasdp.parity.bisect(build_model, data, backends=["torch", "jax"], steps=1)
        print(finding.what, finding.name)  # initial weights sequential/dense/kernel
        ```
    """

    backends: tuple[str, str]
    what: str
    name: str
    step: int | None
    expected: np.ndarray
    received: np.ndarray
    difference: float
    call: "Call | None" = None
    inputs_differ: bool = False

    def __str__(self) -> str:
        when = "" if self.step is None else f"step {self.step}: "
        words = {
            "initial weights": f"the initial value of {self.name}",
            "operation": f"the output of {self.call}",
            "gradient": f"the gradient of {self.call or self.name}",
            "statistics": f"the new value of {self.name}",
            "update": f"the update of {self.name}",
            "loss": "the loss, though all operations of the forward pass agree",
        }[self.what]
        cause = ""
        if self.inputs_differ:
            cause = "; its inputs already differ, because of code that calls no operation of Keras"
        elif self.call is not None and not self.call.inputs:
            cause = "; the operations that it calls on both backends agree"
        return (
            f"{when}{words} differs first, by {self.difference:.1e}{cause}: {_some(self.expected, self.received)} on "
            f"{self.backends[0]}, {_some(self.received, self.expected)} on {self.backends[1]}"
        )


def bisect(
    build_model: Callable[[], Any],
    data: Any,
    backends: Sequence[str] | None = None,
    *,
    steps: int = 2,
    is_plain: bool = False,
    **choices: Any,
) -> Finding | None:
    """Finds the first operation of a training run that two backends compute differently.

    `bisect` trains a few steps on each backend, in a new process, and compares every operation, gradient and update.
    The steps run on one device, without compilation, in float64. In float64 round-off is far smaller than any bug.

    Args:
        build_model: a function without arguments that returns a compiled Keras model.
        data: `(x, y)` or `(x, y, sample_weight)` as for `model.fit`, or a function that returns this tuple. Each step
            uses the next rows, in order.
        backends: names of two backends. None: the first two installed backends.
        steps: number of updates.
        is_plain: True: kerasdp does not patch Keras functions that differ between backends. Use this value to find
            bugs of Keras.
        **choices: fields of `kerasdp.parity.Job`: `batch_size` (32), `seed`, `device`.

    Returns:
        A `Finding` with the first difference; None if there is no difference.

    Raises:
        UserError: if the model cannot be sent to other processes, or cannot be trained; if there are not two backends.

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

        finding = kerasdp.parity.bisect(build_model, data, backends=["torch", "jax"], steps=1)
        print(finding)  # None: both backends compute the same
        ```
    """
    names = tuple(backends or [name for name in BACKENDS if is_installed(name)][:2])
    if len(names) != 2:
        raise UserError(f"bisect: expected two backends, such as torch,jax. Received: {','.join(names) or 'none'}")
    job = Job(build_model=build_model, data=data, steps=steps, **choices)
    ways = [Way(backend=name, num_devices=1, precision="float64") for name in names]
    expected, received = (call_in(job, way, _train, is_plain) for way in ways)
    found = next(_findings(names, expected, received), None)
    if found is None or found.what != "gradient":
        return found
    calls = expected.steps[found.step or 0].calls
    first, second = (call_in(job, way, _call_alone, is_plain, calls) for way in ways)
    return _of_gradients(found, calls, first, second)


def _findings(backends: tuple[str, str], expected: Steps, received: Steps) -> Iterator[Finding]:
    """Yields the differences between two backends, in order of computation. The first one causes the later ones."""
    from kerasdp.keras_compat.operations import aligned

    found = functools.partial(Finding, backends)
    for name, value in expected.initial.items():
        other = received.initial.get(name, np.empty(0))
        if apart := difference(value, other):
            yield found("initial weights", name, None, value, other, apart)
    before, allowed = (expected.initial, received.initial), 0.0
    tolerance = tolerance_for("float64", expected.optimizer)
    for number, (one, two) in enumerate(zip(expected.steps, received.steps)):
        passed_on: list[Finding] = []  # of operations whose inputs differ: reported if the step's results differ, too
        allowed = max(allowed, tolerance.of_outputs(number))
        for call, same in aligned(one.calls, two.calls):
            before_it = max((_apart(*pair) for pair in zip(call.inputs, same.inputs)), default=0.0)
            for value, other in zip(call.outputs, same.outputs):
                apart, own = _apart(value, other), _of_operation(value)
                if own > _OPERATION and apart <= own:  # code that computes in float32, also in float64
                    allowed = max(allowed, _CONDITION * own * bool(apart))
                elif call.inputs and before_it < allowed and apart > own + _CONDITION * before_it:
                    yield found("operation", call.name, number, value, other, apart, call=call)
                elif apart > allowed:
                    differ = bool(call.inputs)
                    passed_on.append(
                        found("operation", call.name, number, value, other, apart, call=call, inputs_differ=differ)
                    )
        losses = np.asarray(one.loss), np.asarray(two.loss)
        if (apart := difference(*losses)) > allowed:
            yield from (*passed_on, found("loss", "the loss", number, *losses, apart))
        scale = max((np.abs(gradient).max() for gradient in one.gradients.values() if gradient.size), default=1.0)
        for name, gradient in reversed(one.gradients.items()):
            other = two.gradients.get(name, np.empty(0))
            apart = difference(gradient, other)
            if apart == np.inf or (apart > allowed and np.abs(gradient - other).max() > _NOTHING * scale):
                yield from (*passed_on, found("gradient", name, number, gradient, other, apart))
        for name, value in one.after.items():
            other = two.after.get(name, np.empty(0))
            learned = one.gradients.get(name)
            if value.shape == other.shape and learned is not None:  # gradients that are only round-off prove nothing
                counts = np.abs(learned) > _NOTHING * scale
                value, other = np.where(counts, value, 0), np.where(counts, other, 0)
            moved = _moved(before[0].get(name), value)
            if (apart := difference(value, other) / moved) > allowed:
                what, words = "statistics", name
                if name in one.gradients:
                    what, words = "update", f"{name} by {expected.optimizer}"
                yield from (*passed_on, found(what, words, number, value, other, apart))
        before = one.after, two.after


def _of_operation(output: np.ndarray) -> float:
    """Returns the tolerance of an operation's output if both backends get equal inputs.

    The tolerance depends on the dtype of the output.
    """
    kind = str(output.dtype)
    return tolerance_for(kind, "SGD").of_outputs(0) if kind in ("float32", "float16", "bfloat16") else _OPERATION


def _moved(before: np.ndarray | None, after: np.ndarray) -> float:
    """Returns the relative change of a variable in a step, limited to the range from 0.001 to 1."""
    return 1.0 if before is None or before.shape != after.shape else min(max(difference(before, after), 1e-3), 1.0)


def _apart(value: np.ndarray, other: np.ndarray) -> float:
    """Returns the relative difference of two arrays; infinite if their floating-point dtypes differ."""
    is_other_type = value.dtype.kind == other.dtype.kind == "f" and value.dtype != other.dtype
    return float("inf") if is_other_type else difference(value, other)


# Gradients of a call by its inputs; None: it cannot be called alone.
Gradients = list[np.ndarray] | None


def _of_gradients(found: Finding, calls: "list[Call]", first: list[Gradients], second: list[Gradients]) -> Finding:
    """Returns a finding that names the operation whose gradient differs first.

    The search starts at the last operation of the forward pass, because the backward pass starts there.

    Args:
        found: finding that names the weight whose gradient differs. It is returned if no operation differs.
        calls: calls of the forward pass.
        first: gradients of each call on the first backend.
        second: gradients of each call on the second backend.
    """
    for call, one, two in reversed(list(zip(calls, first, second))):
        for value, other in zip(one or (), two or ()):
            if (apart := _apart(value, other)) > _of_operation(value):
                return dataclasses.replace(
                    found, name=call.name, call=call, expected=value, received=other, difference=apart
                )
    return found


def _some(value: np.ndarray, other: np.ndarray) -> str:
    """Returns a text with the element of `value` that differs most from `other`, and its position.

    If the dtypes or shapes differ, the text has no element. It has the dtype and the shape of `value`.
    """
    if value.shape != other.shape or value.dtype != other.dtype or not value.size:
        return f"{value.dtype}{list(value.shape)}"
    place = int(np.argmax(np.nan_to_num(np.abs(value.astype(float) - other), nan=np.inf)))
    where = f" at {[int(each) for each in np.unravel_index(place, value.shape)]}" if value.ndim else ""
    return f"{value.ravel()[place]:.9g}{where}"


def _train(runner: Any, job: Job, is_plain: bool) -> Steps:
    """Trains the model of a job on the backend of this process, and returns the recorded steps."""
    import keras

    from kerasdp.keras_compat.operations import telling
    from kerasdp.step.gradients import value_and_grad

    model, batches, context = _prepared(runner, job, is_plain)
    initial, steps = values_of(model.variables), []
    with context:
        model.optimizer.build(model.trainable_variables)
        for batch in batches:
            x, y, sample_weight = keras.tree.map_structure(
                lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), batch
            )

            def loss(x: Any = x, y: Any = y, sample_weight: Any = sample_weight) -> Any:
                outputs = model(x, training=True)
                return model.compute_loss(x, y, outputs, sample_weight, training=True)

            states = model.non_trainable_variables
            before = [np.array(keras.ops.convert_to_numpy(state)) for state in states]
            calls: list[Call] = []
            with telling(calls.append):
                loss()
            for state, value in zip(states, before):
                state.assign(value)
            weights = model.trainable_variables
            total, gradients = value_and_grad(loss, weights)()
            moved = [pair for pair in zip(gradients, weights) if pair[0] is not None]
            paths = values_of([weight for _, weight in moved])
            values = dict(zip(paths, (np.array(keras.ops.convert_to_numpy(gradient)) for gradient, _ in moved)))
            model.optimizer.apply_gradients(moved)
            after = values_of(model.variables)
            steps.append(Step(calls=calls, loss=float(total), gradients=values, after=after))
    return Steps(initial=initial, optimizer=type(model.optimizer).__name__, steps=steps)


def _call_alone(runner: Any, job: Job, is_plain: bool, calls: "list[Call]") -> list[Gradients]:
    """Repeats each call of an operation separately, on the backend of this process, and returns the gradients.

    The inputs are the recorded inputs in `calls`, so they are the same on both backends.
    """
    _, _, context = _prepared(runner, job, is_plain)
    with context:
        return [_gradients_alone(call) for call in calls]


def _gradients_alone(call: "Call") -> Gradients:
    import keras
    from keras import ops

    from kerasdp.keras_compat.operations import call_again
    from kerasdp.step.gradients import value_and_grad

    floats = [number for number, array in enumerate(call.inputs) if array.dtype.kind == "f"]
    if call.arguments is None or not floats or not any(output.dtype.kind == "f" for output in call.outputs):
        return None

    def weighted(tensors: list[Any]) -> Any:
        given = arrays[:]
        for number, tensor in zip(floats, tensors):
            given[number] = tensor
        found = [each for each in call_again(call, given) if "float" in keras.backend.standardize_dtype(each.dtype)]
        # Each value has another factor: a plain sum would hide an operation that puts values at wrong positions.
        factors = [np.cos(np.arange(np.prod(each.shape))).reshape(tuple(each.shape)) for each in found]
        return sum(ops.sum(each * ops.cast(own, each.dtype)) for each, own in zip(found, factors))

    try:
        arrays = [ops.convert_to_tensor(array) for array in call.inputs]
        _, gradients = value_and_grad(weighted)([arrays[number] for number in floats])
        return [
            np.zeros_like(call.inputs[number]) if gradient is None else np.array(ops.convert_to_numpy(gradient))
            for number, gradient in zip(floats, gradients)
        ]
    except Exception:  # a function may reject its arguments with any error; then it is skipped
        return None


def _prepared(runner: Any, job: Job, is_plain: bool) -> tuple[Any, list[Any], contextlib.ExitStack]:
    """Returns the model of a job, the batch of each step, and a context manager in which the steps must run."""
    import keras

    from kerasdp.data.sources import ArraySource
    from kerasdp.keras_compat.layers import all_layers
    from kerasdp.keras_compat.models import own_steps
    from kerasdp.keras_compat.numerics import same_on_all_backends
    from kerasdp.same.portable import portable
    from kerasdp.same.random import UNNAMED, portable_draws

    model, (x, y, sample_weight) = made(runner, job)
    if own_steps(model):
        raise UserError(
            f"bisect: expected a model without a custom train_step. Received: {model.name}; remove the train_step"
        )
    source = x if hasattr(x, "targets") else ArraySource(x, y, sample_weight)
    rows = np.arange(job.steps * job.batch_size).reshape(job.steps, -1) % source.num_samples
    batches = [(source.inputs(each), *source.targets(each)) for each in rows]
    if not all(layer.built for layer in all_layers(model)):
        with runner.scope():
            model(keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, str(leaf.dtype)), batches[0][0]))
    portable(model)
    stack = contextlib.ExitStack()
    for context in (contextlib.nullcontext() if is_plain else same_on_all_backends(), portable_draws(UNNAMED)):
        stack.enter_context(context)
    return model, batches, stack
