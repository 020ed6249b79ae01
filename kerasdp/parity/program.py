"""Writes a program, in Keras alone, that prints what an operation computes on a backend, and runs it."""

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

# The file that a program reads, in its own folder.
_INPUTS = "inputs.npz"
# From here on a relative difference is no round-off of float32.
_SHOWN_IN_FLOAT32 = 1e-4
# Of a sum, relative to what is added.
_ROUND_OFF = {"float64": 1e-9, "float32": 1e-6, "float16": 1e-2, "bfloat16": 5e-2}
_SECONDS = 300


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
        f"inputs = zip(np.load(pathlib.Path(__file__).parent / {_INPUTS!r}).values(), {kinds})",
        "x = [ops.cast(each, kind) for each, kind in inputs]",
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
