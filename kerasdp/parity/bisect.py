"""Finds the operation that two ways to train compute differently: in the forward pass, its gradient, or an update.

And writes a program, in Keras alone, that prints what the operation computes on a backend.
"""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kerasdp.errors import UserError
from kerasdp.parity.divergence import Tolerance, difference, tolerance_for
from kerasdp.parity.trace import Job, Way, call_in, values_of

if TYPE_CHECKING:
    from kerasdp.keras_compat.operations import Call

# What single operations may differ by in float64, and beside that for each difference of their inputs. A number that
# has been float32 on its way is 3e-8 off.
_OPERATION, _CONDITION = 1e-8, 100.0
# Below this share of the largest gradient a number is round-off, as that of a bias before a batch norm; in float64.
_NOTHING = 1e-9
# The file that a program reads, in its own folder.
_INPUTS = "inputs.npz"
# From here on a relative difference is no round-off of float32.
_SHOWN_IN_FLOAT32 = 1e-4
# Of a sum, relative to what is added.
_ROUND_OFF = {"float64": 1e-9, "float32": 1e-6, "float16": 1e-2, "bfloat16": 5e-2}
_SECONDS = 300


@dataclasses.dataclass(kw_only=True)
class Step:
    """What one step computed, operation by operation.

    Args:
        calls: of operations, in the forward pass and the loss.
        loss: of the batch.
        gradients: of each trainable weight that the loss depends on, by path.
        after: each variable of the model after the update, by path.
    """

    calls: "list[Call]"
    loss: float
    gradients: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


@dataclasses.dataclass(kw_only=True)
class Steps:
    """Steps of one way.

    Args:
        initial: each variable before the first step, by path.
        optimizer: the name of its class.
        steps: one after the other.
    """

    initial: dict[str, np.ndarray]
    optimizer: str
    steps: list[Step]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Where two ways to train first differ by more than round-off.

    Args:
        ways: the two.
        what: `"initial weights"`, `"operation"`, `"gradient"`, `"statistics"` or `"update"`; `"loss"` where no
            operation explains it.
        name: the operation, the variable, or the optimizer.
        step: counted from 0; None: before the first.
        call: of the operation, with the values that it got in the first way; None where none is to blame.
        expected: what the first way has.
        received: what the second has.
        difference: relative.
        inputs_differ: whether its inputs differed before: then what made them is no operation of Keras.
        program: computes it with Keras alone, in at most 20 lines; empty if it cannot be called alone.
        is_shown: whether the two differ there as well, without kerasdp; None if that cannot be said.
    """

    ways: tuple[Way, Way]
    what: str
    name: str
    step: int | None
    expected: np.ndarray
    received: np.ndarray
    difference: float
    call: "Call | None" = None
    inputs_differ: bool = False
    program: str = ""
    is_shown: bool | None = None

    def __str__(self) -> str:
        when = "" if self.step is None else f"step {self.step}: "
        words = {
            "initial weights": f"the initial value of {self.name}",
            "operation": f"what {self.call} gives",
            "gradient": f"the gradient of {self.call or self.name}",
            "statistics": f"what is assigned to {self.name}",
            "update": f"the update of {self.name}",
            "loss": "the loss, though all operations of the forward pass agree",
        }[self.what]
        cause = ""
        if self.program and self.is_shown is not None:
            cause = f"; Keras alone {'does that, too' if self.is_shown else 'gives the same in both'}"
        if self.inputs_differ:
            cause = "; its inputs differ already, by code that calls no operation of Keras"
        elif self.call is not None and not self.call.inputs:
            cause = "; operations that both call in it agree"
        return (
            f"{when}{words} differs first, by {self.difference:.1e}{cause}: {_some(self.expected, self.received)} on "
            f"{self.ways[0]}, {_some(self.received, self.expected)} on {self.ways[1]}"
        )

    def write(self, folder: str) -> list[str]:
        """Writes `program.py`, if there is one, with the inputs that it reads; returns the paths."""
        if not self.program or self.call is None:
            return []
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "program.py")
        with open(path, "w") as file:
            file.write(self.program)
        return [path, save_inputs(self.call, folder)]


def bisect(
    build_model: Callable[[], Any],
    data: Any,
    ways: tuple[Way, Way],
    *,
    steps: int = 2,
    is_plain: bool = False,
    tolerance: Tolerance | None = None,
    **choices: Any,
) -> Finding | None:
    """Trains a few steps in two ways, operation by operation, and finds the first that differs beyond round-off.

    Each step is computed as Keras code runs without compilation, on one device: forward pass, loss, gradients, update.
    In float64 round-off is far below any mistake.

    Args:
        build_model: as for `kerasdp.parity.compare`.
        data: likewise; each step takes the next rows, in their order.
        ways: two of one device, which differ in backend or precision.
        steps: updates.
        is_plain: whether functions that differ between backends stay as Keras has them: to find defects of Keras.
        tolerance: None: that of the precision.
        **choices: fields of `kerasdp.parity.Job`: `batch_size` (32), `seed`, `device`.

    Returns:
        What differs first; None if nothing does.

    Raises:
        UserError: if the model cannot be sent to other processes, or cannot be trained; if a way has several devices.
    """
    job = Job(build_model=build_model, data=data, steps=steps, **choices)
    if any(way.num_devices != 1 for way in ways):
        raise UserError(
            f"bisect: expected ways of one device. Received: {ways[0]} and {ways[1]}; a run on several devices names "
            "the operation that mixes samples before its first step"
        )
    expected, received = (call_in(job, way, _train, is_plain) for way in ways)
    tolerances = [tolerance_for(way.precision, expected.optimizer) for way in ways]
    tolerance = tolerance or max(tolerances, key=lambda each: each.start)
    found = next(_findings(ways, expected, received, tolerance), None)
    if found is None or found.what not in ("operation", "gradient") or (found.call and not found.call.arguments):
        return found
    if found.call is None:
        calls = expected.steps[found.step or 0].calls
        first, second = (call_in(job, way, _call_alone, is_plain, calls) for way in ways)
        found = _of_gradients(found, calls, first, second, tolerance)
    else:
        found = dataclasses.replace(found, program=program_of(found.call, "output", found.difference))
    if not found.program or found.call is None:
        return found
    printed = [run_program(found.program, found.call, way.backend, job.device) for way in ways]
    return dataclasses.replace(found, is_shown=shows(printed, found.difference))


def _findings(ways: tuple[Way, Way], expected: Steps, received: Steps, tolerance: Tolerance) -> Iterator[Finding]:
    """Yields the first difference; what comes after it is not to be asked for."""
    from kerasdp.keras_compat.operations import aligned

    def found(what: str, name: str, step: int | None, one: Any, other: Any, apart: float, **more: Any) -> Finding:
        return Finding(
            ways=ways, what=what, name=name, step=step, expected=one, received=other, difference=apart, **more
        )

    is_one_type = ways[0].precision == ways[1].precision
    apart_of = _apart if is_one_type else difference
    nothing = max(_NOTHING, 0.01 * tolerance.kinks)
    for name, value in expected.initial.items():
        other = received.initial.get(name, np.empty(0))
        if (apart := difference(value, other)) > (0 if is_one_type else tolerance.start):
            yield found("initial weights", name, None, value, other, apart)
    before, allowed = (expected.initial, received.initial), 0.0
    for number, (one, two) in enumerate(zip(expected.steps, received.steps)):
        passed_on: list[Finding] = []  # by operations that got other inputs: of account if the step comes to differ
        allowed = max(allowed, tolerance.of_outputs(number))
        for call, same in aligned(one.calls, two.calls):
            before_it = max((apart_of(*pair) for pair in zip(call.inputs, same.inputs)), default=0.0)
            for value, other in zip(call.outputs, same.outputs):
                apart, own = apart_of(value, other), _of_operation(tolerance, value)
                if own > _of_operation(tolerance) and apart <= own:  # code that computes in float32, also in float64
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
            if apart == np.inf or (apart > allowed and np.abs(gradient - other).max() > nothing * scale):
                yield from (*passed_on, found("gradient", name, number, gradient, other, apart))
        for name, value in one.after.items():
            other = two.after.get(name, np.empty(0))
            learned = one.gradients.get(name)
            if value.shape == other.shape and learned is not None:  # what is but round-off proves nothing
                counts = np.abs(learned) > nothing * scale
                value, other = np.where(counts, value, 0), np.where(counts, other, 0)
            moved = _moved(before[0].get(name), value)
            if (apart := difference(value, other) / moved) > allowed:
                what, words = "statistics", name
                if name in one.gradients:
                    what, words = "update", f"{name} by {expected.optimizer}"
                yield from (*passed_on, found(what, words, number, value, other, apart))
        before = one.after, two.after


def _of_operation(tolerance: Tolerance, output: np.ndarray | None = None) -> float:
    """Returns what an operation may differ by that gets equal inputs, and gives an output of this type."""
    if tolerance.kinks:  # of a precision with round-off
        return tolerance.of_outputs(0)
    kind = "float64" if output is None else str(output.dtype)
    is_narrow = kind in ("float32", "float16", "bfloat16")
    return tolerance_for(kind, "SGD").of_outputs(0) if is_narrow else _OPERATION


def _moved(before: np.ndarray | None, after: np.ndarray) -> float:
    """Returns how far a variable went in a step, relative to its size; at least a thousandth."""
    return 1.0 if before is None or before.shape != after.shape else min(max(difference(before, after), 1e-3), 1.0)


def _apart(value: np.ndarray, other: np.ndarray) -> float:
    """Returns how far two arrays are apart; infinite where one is in another floating-point type."""
    is_other_type = value.dtype.kind == other.dtype.kind == "f" and value.dtype != other.dtype
    return float("inf") if is_other_type else difference(value, other)


# What `_call_alone` gives for a call; None: it cannot be called alone.
Gradients = list[np.ndarray] | None


def _of_gradients(
    found: Finding, calls: "list[Call]", first: list[Gradients], second: list[Gradients], tolerance: Tolerance
) -> Finding:
    """Names the operation whose gradient differs, the last one of the forward pass being the first to be asked."""
    for call, one, two in reversed(list(zip(calls, first, second))):
        for value, other in zip(one or (), two or ()):
            if (apart := _apart(value, other)) > _of_operation(tolerance, value):
                program = program_of(call, "gradient", apart)
                return dataclasses.replace(
                    found, name=call.name, call=call, expected=value, received=other, difference=apart, program=program
                )
    return found


def _some(value: np.ndarray, other: np.ndarray) -> str:
    """Returns a value at the place where it is furthest from the other, or a few and the type."""
    if value.shape != other.shape or value.dtype != other.dtype or not value.size:
        return f"{value.dtype}{list(value.shape)}"
    place = int(np.argmax(np.nan_to_num(np.abs(value.astype(float) - other), nan=np.inf)))
    where = f" at {[int(each) for each in np.unravel_index(place, value.shape)]}" if value.ndim else ""
    return f"{value.ravel()[place]:.9g}{where}"


def _train(runner: Any, job: Job, is_plain: bool) -> Steps:
    """Runs in the process of a way."""
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
    """Runs in the process of a way: returns the gradients of each operation by its inputs, whatever way gave these."""
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
        return sum(ops.sum(each * ops.cast(weights_like(each.shape), each.dtype)) for each in found)

    try:
        arrays = [ops.convert_to_tensor(array) for array in call.inputs]
        _, gradients = value_and_grad(weighted)([arrays[number] for number in floats])
        return [
            np.zeros_like(call.inputs[number]) if gradient is None else np.array(ops.convert_to_numpy(gradient))
            for number, gradient in zip(floats, gradients)
        ]
    except Exception:  # what a function refuses, it refuses in many ways; nothing is found by it then
        return None


def _prepared(runner: Any, job: Job, is_plain: bool) -> tuple[Any, list[Any], contextlib.ExitStack]:
    """Returns the model, the batches of the steps, and the context in which operations are computed."""
    import keras

    from kerasdp.data.sources import ArraySource
    from kerasdp.keras_compat.layers import all_layers
    from kerasdp.keras_compat.models import own_steps
    from kerasdp.keras_compat.numerics import same_on_all_backends
    from kerasdp.same.portable import portable
    from kerasdp.same.random import UNNAMED, portable_draws

    data = job.data() if callable(job.data) else job.data
    with runner.scope():
        model = job.build_model()
    if not isinstance(model, keras.Model) or not model.compiled:
        raise UserError(f"parity: expected build_model to return a compiled Keras model. Received: {model!r}")
    if own_steps(model):
        raise UserError(
            f"bisect: expected a model that trains by its loss. Received: {model.name}, with its own train_step"
        )
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    source = x if hasattr(x, "targets") else ArraySource(x, y, sample_weight)
    rows = [np.arange(number * job.batch_size, (number + 1) * job.batch_size) for number in range(job.steps)]
    rows = [each % source.num_samples for each in rows]
    batches = [(source.inputs(each), *source.targets(each)) for each in rows]
    if not all(layer.built for layer in all_layers(model)):
        with runner.scope():
            model(keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, str(leaf.dtype)), batches[0][0]))
    portable(model)
    stack = contextlib.ExitStack()
    for context in (contextlib.nullcontext() if is_plain else same_on_all_backends(), portable_draws(UNNAMED)):
        stack.enter_context(context)
    return model, batches, stack


def weights_like(shape: Any) -> np.ndarray:
    """Returns numbers by which outputs are multiplied before their sum is differentiated."""
    count = int(np.prod(shape))
    return np.cos(np.arange(count)).reshape(tuple(shape))


def program_of(call: "Call", what: str, difference: float) -> str:
    """Returns a program that prints what the operation of a call gives, or its gradients, for the inputs of that call.

    Args:
        call: one of `keras.ops`; of others none can be written.
        what: `"output"` or `"gradient"`.
        difference: what it is to show, relative. Float64 becomes float32 if that shows it: Keras (3.15) on torch gives
            float32 for float64, unless kerasdp trains in float64 (keras-team/keras #23704).
    """
    if not call.function.startswith("keras.ops."):
        return ""
    is_coarse = _SHOWN_IN_FLOAT32 < difference < np.inf
    kinds = [str(array.dtype) for array in call.inputs]
    kinds = ["float32" if is_coarse and kind == "float64" else kind for kind in kinds]
    of_floats = [kind for kind, array in zip(kinds, call.inputs) if array.dtype.kind == "f"]
    floatx = of_floats[0] if of_floats and of_floats[0] in ("float32", "float64") else "float32"
    args, kwargs = call.arguments
    words = [_written(value) for value in args] + [f"{name}={_written(value)}" for name, value in kwargs.items()]
    names = ", ".join(f"x{number}" for number, array in enumerate(call.inputs) if array.dtype.kind == "f")
    lines = [
        f"# Run it with KERAS_BACKEND=torch, jax and tensorflow. {_INPUTS}, beside it, holds what the operation gets.",
        *(['import os; os.environ["JAX_ENABLE_X64"] = "1"  # no float64 otherwise'] if floatx == "float64" else []),
        "import pathlib, numpy as np, keras; from numpy import inf, nan; from keras import ops",
        f'keras.config.set_floatx("{floatx}")',
        f"inputs = np.load(pathlib.Path(__file__).parent / {_INPUTS!r}).values(); "
        f"x = [ops.cast(each, kind) for each, kind in zip(inputs, {kinds})]",
        *([f"{', '.join(f'x{number}' for number in range(len(kinds)))}, = x"] if kinds else []),
        f"def compute({names}): return {call.function.removeprefix('keras.')}({', '.join(words)})",
        _WEIGHTED,
        *(_PRINT_OUTPUTS if what == "output" else [f"x = [{names}]", *_PRINT_GRADIENTS]),
    ]
    return "\n".join(lines).replace("NAMES", names).replace("KIND", floatx) + "\n"


def save_inputs(call: "Call", folder: str) -> str:
    """Writes what a program reads: the inputs of the call. Returns the path."""
    path = os.path.join(folder, _INPUTS)
    # NumPy has no bfloat16 of its own.
    np.savez(path, *(one.astype("float32") if str(one.dtype) == "bfloat16" else one for one in call.inputs))
    return path


# The last line that a program prints: of each tensor a sum with weights, by which two backends are compared, and one
# of what is added.
_PRINT_SUMS = (
    'print("sums", [[str(float(f(ops.cast(each, "KIND")))) for f in (weighted, lambda y: ops.sum(ops.abs(y)))] '
    "for each in y])"
)
_WEIGHTED = (
    "weighted = lambda y: ops.sum(ops.reshape(y, (-1,)) * ops.cast(np.cos(np.arange(np.prod(y.shape))), y.dtype)); "
    "some = lambda y: ops.convert_to_numpy(y).ravel()[:8]"
)
_PRINT_OUTPUTS = [
    "y = keras.tree.flatten(compute(NAMES))",
    "print(keras.backend.backend(), [(keras.backend.standardize_dtype(each.dtype), some(each)) for each in y])",
    _PRINT_SUMS,
]
_PRINT_GRADIENTS = [
    "total = lambda *x: sum(map(weighted, keras.tree.flatten(compute(*x))))",
    'if keras.backend.backend() == "torch":',
    "    import torch; y = torch.autograd.grad(total(*[each.requires_grad_() for each in x]), x)",
    'elif keras.backend.backend() == "jax":',
    "    import jax; y = jax.grad(total, tuple(range(len(x))))(*x)",
    "else:",
    "    import tensorflow as tf",
    "    with tf.GradientTape() as tape: tape.watch(x); value = total(*x)",
    "    y = tape.gradient(value, x)",
    _PRINT_OUTPUTS[1],
    _PRINT_SUMS,
]


def run_program(program: str, call: "Call", backend: str, device: str = "cpu") -> str:
    """Runs the program of a call with a backend; returns what it printed, or its error."""
    env = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if device == "cpu":  # a GPU may multiply float32 in TF32
        env |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
        path = os.path.join(folder, "program.py")
        with open(path, "w") as file:
            file.write(program)
        save_inputs(call, folder)
        try:
            done = subprocess.run([sys.executable, path], env=env, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it has not ended after {_SECONDS} s"
    return (done.stdout if done.returncode == 0 else done.stderr[-1000:]).strip()


def _types_in(printed: str) -> list[str]:
    """Returns the types of the tensors that a program printed."""
    return re.findall(r"\('(\w+)', ", printed)


def shows(printed: list[str], difference: float) -> bool | None:
    """Returns whether what a program printed in two ways differs.

    Args:
        printed: what the program of `program_of` printed.
        difference: that it was to show.

    Returns:
        None if one did not end well, or where types differ that should not.
    """
    sums = []
    for text in printed:
        try:
            sums.append(np.array(json.loads(text.rpartition("sums ")[2].replace("'", '"')), float).reshape(-1, 2))
        except (ValueError, TypeError):
            return None
    types = [_types_in(text) for text in printed]
    if types[0] != types[1]:
        return True if difference == np.inf else None
    allowed = max((_ROUND_OFF.get(kind, 1e-6) for kind in types[0]), default=0.0)
    apart, added = np.abs(sums[0][:, 0] - sums[1][:, 0]), np.maximum(sums[0][:, 1], sums[1][:, 1])
    is_same = (apart <= allowed * added) | (np.isnan(sums[0][:, 0]) & np.isnan(sums[1][:, 0]))
    return not is_same.all()


def _written(value: Any) -> str:
    from kerasdp.keras_compat.operations import Array

    if isinstance(value, Array):
        return f"x{value.number}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_written, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_written(each)}" for key, each in value.items()) + "}"
    return "..." if value is ... else repr(value)
