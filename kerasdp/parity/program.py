"""Writes a program, in Keras alone, that prints what an operation computes on a backend."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kerasdp.keras_compat.operations import Call

# The most numbers of an array that are written into a program.
_MOST = 24


def drawn(call: "Call") -> list[np.ndarray]:
    """Returns inputs of the same shapes and types as those of a call: its floating-point numbers are drawn anew."""
    random = np.random.default_rng(0)
    return [
        random.normal(size=array.shape).astype(array.dtype) if array.dtype.kind == "f" else array
        for array in call.inputs
    ]


def weights_like(shape: Any) -> np.ndarray:
    """Returns numbers by which outputs are multiplied before their sum is differentiated."""
    count = int(np.prod(shape))
    return np.cos(np.arange(count)).reshape(tuple(shape))


def program_of(call: "Call", what: str, is_drawn: bool) -> str:
    """Returns a program that prints what the operation of a call gives, or its gradients.

    Args:
        call: one of `keras.ops`; of others none can be written.
        what: `"output"` or `"gradient"`.
        is_drawn: whether drawn inputs show the difference. Else those of the call are written out, if they are few.
    """
    arrays = drawn(call) if is_drawn else call.inputs
    large = [array for array in arrays if array.size > _MOST and not (is_drawn and array.dtype.kind == "f")]
    if not call.function.startswith("keras.ops.") or large:
        return ""
    lines = [
        "# Run it with KERAS_BACKEND=torch, jax and tensorflow.",
        "import numpy as np, keras",
        "from keras import ops",
        f'keras.config.set_floatx("{_floatx(arrays)}"); random = np.random.default_rng(0)',
    ]
    made = []
    for number, array in enumerate(arrays):
        is_random = is_drawn and array.dtype.kind == "f"
        value = f"random.normal(size={array.shape})" if is_random else f"np.array({array.tolist()!r})"
        made.append(f'x{number} = ops.convert_to_tensor({value}.astype("{array.dtype}"))')
    lines.append("; ".join(made))
    args, kwargs = call.arguments
    words = [_written(value) for value in args] + [f"{name}={_written(value)}" for name, value in kwargs.items()]
    names = ", ".join(f"x{number}" for number, array in enumerate(arrays) if array.dtype.kind == "f")
    lines.append(f"def compute({names}): return {call.function.removeprefix('keras.')}({', '.join(words)})")
    lines += _PRINT_OUTPUTS if what == "output" else [f"x = [{names}]", *_PRINT_GRADIENTS]
    return "\n".join(lines).replace("NAMES", names) + "\n"


_PRINT_OUTPUTS = [
    "print(keras.backend.backend(), keras.tree.map_structure(ops.convert_to_numpy, compute(NAMES)))",
]
_PRINT_GRADIENTS = [
    "weighted = lambda y: ops.sum(ops.reshape(y, (-1,)) * ops.cast(np.cos(np.arange(np.prod(y.shape))), y.dtype))",
    "total = lambda *x: sum(map(weighted, keras.tree.flatten(compute(*x))))",
    'if keras.backend.backend() == "torch":',
    "    import torch; gradients = torch.autograd.grad(total(*[each.requires_grad_() for each in x]), x)",
    'elif keras.backend.backend() == "jax":',
    "    import jax; gradients = jax.grad(total, tuple(range(len(x))))(*x)",
    "else:",
    "    import tensorflow as tf",
    "    with tf.GradientTape() as tape: tape.watch(x); value = total(*x)",
    "    gradients = tape.gradient(value, x)",
    "print(keras.backend.backend(), [ops.convert_to_numpy(gradient) for gradient in gradients])",
]


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
