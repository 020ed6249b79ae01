"""Sets what Keras holds for the whole process: precision, seed, and which backends it may import."""

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.common import dtypes
from keras.src.utils import module_utils


def keep_messages_of(kind: type[Exception]) -> None:
    """Keeps errors of a class, raised in a layer's call, as they are.

    Keras 3.15 puts the call's arguments into the text of whatever a layer raises, unless the error says by
    `_keras_call_info_injected` that they are there. The public `disable_traceback_filtering` is for all errors.
    """
    kind._keras_call_info_injected = True  # type: ignore[attr-defined]


def set_precision(precision: str) -> None:
    """Makes layers compute in a precision of `kerasdp.config.validation.PRECISIONS`.

    Keras 3.15: writes `dtypes.BIT64_TO_BIT32_DTYPE`, by which results of 64 bits are of 32 on torch and jax whatever
    the policy says (means, batch norm...). No public way.
    """
    if keras.backend.backend() == "tensorflow":
        _convert_numbers_in_full(precision == "float64")
    else:
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64" if precision == "float64" else "float32"
    whole = precision in ("float32", "float64")
    keras.config.set_floatx(precision if whole else "float32")
    keras.config.set_dtype_policy(precision if whole else f"mixed_{precision}")


def _convert_numbers_in_full(in_full: bool) -> None:
    """Lets Keras' TensorFlow backend, and nobody else, turn Python's floats into float64 tensors without a loss.

    `tf.cast` (2.21) makes them float32 on the way. Keras 3.15: its modules for TensorFlow know it as `tf.cast`, so they
    get a `tf` with another one. No public way.
    """
    tf = importlib.import_module("tensorflow")
    known = tensorflow_with_exact_cast(tf) if in_full else tf
    for name, module in list(sys.modules.items()):
        if name.startswith("keras.src.backend.tensorflow.") and hasattr(module, "tf"):
            vars(module)["tf"] = known


def tensorflow_with_exact_cast(tf: Any) -> types.ModuleType:
    """Returns a module with all of TensorFlow's names, whose `cast` keeps all bits of a Python float."""

    def cast(x: Any, dtype: Any, name: str | None = None) -> Any:
        return tf.constant(x, dtype, name=name) if isinstance(x, float) else tf.cast(x, dtype, name=name)

    exact = types.ModuleType("tensorflow")
    # A module's `__getattr__` is asked for what it does not have itself.
    vars(exact).update(cast=cast, __getattr__=lambda name: getattr(tf, name))
    return exact


def set_seed(seed: int) -> None:
    """Calls `keras.utils.set_random_seed`, without importing TensorFlow beside another backend."""
    with without_tensorflow():
        keras.utils.set_random_seed(seed)


@contextlib.contextmanager
def without_tensorflow() -> Iterator[None]:
    """Keeps Keras from importing TensorFlow beside another backend.

    Keras (3.15) does that where it is installed, to seed tf.data and to serialize anything. It costs seconds, and can
    end the process: both torch and TensorFlow bring LLVM. Writes `module_utils.tensorflow._available`; no public way.
    """
    seen, module_utils.tensorflow._available = (
        module_utils.tensorflow._available,
        keras.backend.backend() == "tensorflow",
    )
    try:
        yield
    finally:
        module_utils.tensorflow._available = seen
