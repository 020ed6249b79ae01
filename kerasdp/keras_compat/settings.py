"""Sets what Keras holds for the whole process: precision, seed, and which backends it may import."""

import contextlib
import importlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import dtypes, global_state
from keras.src.distribution import distribution_lib
from keras.src.utils import module_utils

from kerasdp.keras_compat.patches import original, replaced, replaced_in_each, standing_for

# Modules of Keras' TensorFlow backend that convert numbers (3.15); others leave that to these.
_CONVERTING = ("core", "image", "linalg", "math", "nn", "numpy", "optimizer", "random", "rnn", "sparse")
# What of Keras' state is a run's choice: which devices hold a variable, its precision, and how attention is computed.
_OF_RUN = ("distribution", "dtype_policy", "flash_attention")


def keep_messages_of(kind: type[Exception]) -> None:
    """Keeps errors of a class, raised in a layer's call, as they are.

    Keras 3.15 puts the call's arguments into the text of whatever a layer raises, unless the error says by
    `_keras_call_info_injected` that they are there. The public `disable_traceback_filtering` is for all errors.
    """
    kind._keras_call_info_injected = True  # type: ignore[attr-defined]


def set_precision(precision: str) -> None:
    """Makes layers compute in a precision of `kerasdp.config.config.PRECISIONS`.

    Keras 3.15: writes `dtypes.BIT64_TO_BIT32_DTYPE`, by which results of 64 bits are of 32 on torch and jax whatever
    the policy says (means, batch norm...). No public way.
    """
    if keras.backend.backend() == "tensorflow":
        _convert_numbers_in_full(precision == "float64")
    else:
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64" if precision == "float64" else "float32"
    floatx = "float64" if precision == "float64" else "float32"
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(f"mixed_{precision}" if precision in ("bfloat16", "float16") else floatx)


def set_attention(device_kind: str) -> None:
    """Makes attention on TPUs what it is elsewhere; `device_kind` is that of `Devices`.

    Keras 3.15 on jax takes a kernel for TPUs (splash attention) by itself. Without a mask that one is causal, with one
    it uses the first sample's for all, on several devices it does not compile ("Mosaic kernels cannot be automatically
    partitioned"), nor with bfloat16 where products of float32 are exact. A layer that asks for it still gets it.
    """
    if device_kind == "tpu":
        keras.config.disable_flash_attention()


def _convert_numbers_in_full(in_full: bool) -> None:
    """Lets Keras' TensorFlow backend, and nobody else, turn Python's floats into float64 tensors without a loss.

    `tf.cast` and `tf.convert_to_tensor` (2.21) make them float32 first. Keras 3.15: its modules for TensorFlow know
    these by `tf`, so those that convert numbers get a `tf` with others, until a run has another precision. No public
    way.
    """
    tf = importlib.import_module("tensorflow")
    known = tensorflow_with_exact_numbers(tf) if in_full else tf
    for name, module in list(sys.modules.items()):
        if name.startswith("keras.src.backend.tensorflow.") and name.rpartition(".")[2] in _CONVERTING:
            vars(module)["tf"] = known


def tensorflow_with_exact_numbers(tf: Any) -> types.ModuleType:
    """Returns a module with all of TensorFlow's names, which keeps all bits of Python's floats and lists of them."""

    def cast(x: Any, dtype: Any, name: str | None = None) -> Any:
        return tf.cast(_in_full(x), dtype, name=name)

    def convert_to_tensor(value: Any, dtype: Any = None, **choices: Any) -> Any:
        return tf.convert_to_tensor(_in_full(value) if dtype is None else value, dtype, **choices)

    exact = types.ModuleType("tensorflow")
    # A module's `__getattr__` is asked for what it does not have itself.
    vars(exact).update(cast=cast, convert_to_tensor=convert_to_tensor, __getattr__=lambda name: getattr(tf, name))
    return exact


def _in_full(x: Any) -> Any:
    """Returns Python's floats as NumPy has them, in float64; what else there is as it is."""
    numbers = keras.tree.flatten(x) if isinstance(x, (float, list, tuple)) else []
    has_floats = any(type(number) is float for number in numbers)
    return np.asarray(x) if has_floats and all(type(number) in (float, int) for number in numbers) else x


def set_seed(seed: int) -> None:
    """Calls `keras.utils.set_random_seed`, without importing TensorFlow beside another backend.

    TensorFlow is seeded, too, where it is imported: tf.data shuffles with that seed and the one of `shuffle`. Where it
    is not imported yet, `kerasdp.launch` seeds it later.
    """
    with without_tensorflow():
        keras.utils.set_random_seed(seed)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)


def kept_by_clear_session() -> contextlib.AbstractContextManager[None]:
    """Returns the context in which distribution and dtype policy outlast `keras.utils.clear_session`.

    Search tools call that for each trial.

    Keras 3.15: it puts new `threading.local()` in place of what holds all state. Writes `global_state.threading`, since
    people may hold the function itself. Keras 3.16 also takes the distribution away first, by
    `distribution_lib.set_distribution`. No public way.
    """

    def local() -> threading.local:
        new = threading.local()
        for name in _OF_RUN:
            setattr(new, name, global_state.get_global_attribute(name))
        return new

    def set_distribution(value: Any) -> None:  # which `Distribution.scope` calls, too
        if sys._getframe(1).f_code.co_name != "clear_session":
            distribute(value)

    distribute = distribution_lib.set_distribution
    return replaced_in_each(
        (
            (global_state, {"threading": types.SimpleNamespace(local=local)}),
            (distribution_lib, {"set_distribution": set_distribution}),
        )
    )


def place_variables_by(put: Callable[[Any, Any], Any]) -> None:
    """Lets Keras bring new variables to JAX's devices by `put(array, sharding)`, from now on, on several hosts.

    Keras 3.15: `distribution_lib.distribute_tensor` calls `jax.device_put`, which (jax 0.10.2) lets the hosts compare
    each value: a host whose model is another one waits for ever, or ends by SIGABRT, before anything can say so. No
    public way.
    """
    from keras.src.backend.jax import distribution_lib
    from keras.src.utils import jax_utils

    distribute = original(distribution_lib.distribute_tensor)  # the last `put` counts

    def is_local(tensor: Any) -> bool:
        return bool(getattr(tensor, "is_fully_addressable", True))

    def distribute_tensor(tensor: Any, layout: Any) -> Any:
        sharding = getattr(layout, "backend_layout", layout)
        is_elsewhere = not getattr(sharding, "is_fully_addressable", True)
        if is_elsewhere and not jax_utils.is_in_jax_tracing_scope(tensor) and is_local(tensor):
            return put(np.asarray(tensor), sharding)
        return distribute(tensor, layout)

    distribution_lib.distribute_tensor = standing_for(distribute, distribute_tensor)


def without_tensorflow() -> contextlib.AbstractContextManager[None]:
    """Returns the context in which Keras does not import TensorFlow beside another backend.

    Keras (3.15) does that where it is installed, to seed tf.data and to serialize anything. It costs seconds, and can
    end the process: both torch and TensorFlow bring LLVM. Writes `module_utils.tensorflow._available`; no public way.
    """
    return replaced(module_utils.tensorflow, _available=keras.backend.backend() == "tensorflow")
