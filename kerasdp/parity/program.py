"""Writes a program, in Keras alone, that prints what an operation computes on a backend, and runs it."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kerasdp.keras_compat.operations import Call
    from kerasdp.parity.trace import Way

# The most numbers of an array that are written into a program.
_MOST = 24
# From here on a relative difference is no round-off of float32.
_SHOWN_IN_FLOAT32 = 1e-4
# Of a sum, relative to what is added.
_ROUND_OFF = {"float64": 1e-9, "float32": 1e-6, "float16": 1e-2, "bfloat16": 5e-2}
_SECONDS = 300


# Ways to draw floating-point numbers, as they are written: some differences show with ties and zeros alone.
DRAWN = {"normal": "normal(size=SHAPE)", "ties": "choice((-1.0, 0.0, 1.0), size=SHAPE)"}


def drawn(call: "Call", how: str) -> list[np.ndarray]:
    """Returns inputs of the same shapes and types as those of a call: its floating-point numbers are drawn anew.

    `how`: `"normal"` or `"ties"`; `"given"`: its own.
    """
    if how == "given":
        return call.inputs
    random = np.random.default_rng(0)
    draw: Any = random.normal if how == "normal" else functools.partial(random.choice, (-1.0, 0.0, 1.0))
    return [draw(size=each.shape).astype(each.dtype) if each.dtype.kind == "f" else each for each in call.inputs]


def weights_like(shape: Any) -> np.ndarray:
    """Returns numbers by which outputs are multiplied before their sum is differentiated."""
    count = int(np.prod(shape))
    return np.cos(np.arange(count)).reshape(tuple(shape))


def program_of(call: "Call", what: str, how: str, difference: float) -> str:
    """Returns a program that prints what the operation of a call gives, or its gradients.

    Args:
        call: one of `keras.ops`; of others none can be written.
        what: `"output"` or `"gradient"`.
        how: as `drawn`. The call's own inputs are written out, if they are few.
        difference: what it is to show, relative. Float64 becomes float32 if that shows it: Keras (3.15) on torch gives
            float32 for float64, unless kerasdp trains in float64 (keras-team/keras #23704).
    """
    arrays = drawn(call, how)
    if _SHOWN_IN_FLOAT32 < difference < np.inf:
        arrays = [array.astype("float32") if array.dtype == "float64" else array for array in arrays]
    large = [array for array in arrays if array.size > _MOST and not (how in DRAWN and array.dtype.kind == "f")]
    if not call.function.startswith("keras.ops.") or large:
        return ""
    is_exact = _floatx(arrays) == "float64"
    lines = [
        "# Run it with KERAS_BACKEND=torch, jax and tensorflow.",
        *(['import os; os.environ["JAX_ENABLE_X64"] = "1"  # jax has no float64 otherwise'] if is_exact else []),
        "import numpy as np, keras; from numpy import inf, nan",
        "from keras import ops",
        f'keras.config.set_floatx("{_floatx(arrays)}"); random = np.random.default_rng(0)',
    ]
    made = []
    for number, array in enumerate(arrays):
        value = f"np.array({array.tolist()!r})"
        if how in DRAWN and array.dtype.kind == "f":
            value = f"random.{DRAWN[how].replace('SHAPE', str(array.shape))}"
        made.append(f'x{number} = ops.convert_to_tensor({value}.astype("{array.dtype}"))')
    lines.append("; ".join(made))
    args, kwargs = call.arguments
    words = [_written(value) for value in args] + [f"{name}={_written(value)}" for name, value in kwargs.items()]
    names = ", ".join(f"x{number}" for number, array in enumerate(arrays) if array.dtype.kind == "f")
    lines.append(f"def compute({names}): return {call.function.removeprefix('keras.')}({', '.join(words)})")
    lines += [_WEIGHTED, *(_PRINT_OUTPUTS if what == "output" else [f"x = [{names}]", *_PRINT_GRADIENTS])]
    kind = "float64" if is_exact else "float32"
    return "\n".join(lines).replace("NAMES", names).replace("KIND", kind) + "\n"


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


def run_program(program: str, way: "Way", device: str = "cpu") -> str:
    """Runs a program with the backend of a way, in its environment; returns what it printed, or its error."""
    env = os.environ | {"KERAS_BACKEND": way.backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if device == "cpu":  # a GPU may multiply float32 in TF32
        env |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
        path = os.path.join(folder, "program.py")
        with open(path, "w") as file:
            file.write(program)
        words = [way.python or sys.executable, path]
        try:
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it has not ended after {_SECONDS} s"
    return (done.stdout if done.returncode == 0 else done.stderr[-1000:]).strip()


def types_in(printed: str) -> list[str]:
    """Returns the types of the tensors that a program printed."""
    return re.findall(r"\('(\w+)', ", printed)


def shows(printed: tuple[str, str], difference: float) -> bool | None:
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
    types = [types_in(text) for text in printed]
    if types[0] != types[1]:
        return True if difference == np.inf else None
    allowed = max((_ROUND_OFF.get(kind, 1e-6) for kind in types[0]), default=0.0)
    apart, added = np.abs(sums[0][:, 0] - sums[1][:, 0]), np.maximum(sums[0][:, 1], sums[1][:, 1])
    is_same = (apart <= allowed * added) | (np.isnan(sums[0][:, 0]) & np.isnan(sums[1][:, 0]))
    return not is_same.all()


def versions_of(way: "Way") -> str:
    """Returns the versions of what computes a way, in words."""
    code = (
        "import importlib.metadata, sys, keras\n"
        f"print('keras', keras.__version__ + ',', {way.backend!r}, importlib.metadata.version({way.backend!r}) + ',',"
        " 'Python', sys.version.split()[0])"
    )
    env = os.environ | {"KERAS_BACKEND": way.backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([way.python or sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return done.stdout.strip().rpartition("\n")[2]


def _floatx(arrays: list[np.ndarray]) -> str:
    found = [str(array.dtype) for array in arrays if array.dtype.kind == "f"]
    return found[0] if found and found[0] in ("float32", "float64") else "float32"


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
