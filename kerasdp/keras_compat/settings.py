"""Sets the process-wide state of Keras: precision, attention, seed, devices of new variables, import of TensorFlow."""

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

# The modules of Keras' TensorFlow backend that convert numbers (3.15); its other modules call these.
_CONVERTING = ("core", "image", "linalg", "math", "nn", "numpy", "optimizer", "random", "rnn", "sparse")
# The state of Keras that a run sets: which devices hold a variable, its precision, and how attention is computed.
_OF_RUN = ("distribution", "dtype_policy", "flash_attention")
_GLOBAL_SEED = "global_random_seed"


def keep_messages_of(kind: type[Exception]) -> None:
    """Keeps Keras from adding text to the messages of an exception class.

    If a layer's call raises an error, Keras 3.15 adds the arguments of the call to the message. Keras skips errors that
    have the attribute `_keras_call_info_injected`. The public `disable_traceback_filtering` would change the messages
    of all errors.
    """
    kind._keras_call_info_injected = True  # type: ignore[attr-defined]


def set_precision(precision: str) -> None:
    """Makes layers compute in `precision`, one of `kerasdp.config.config.PRECISIONS`.

    In Keras 3.15 on torch and jax, the table `dtypes.BIT64_TO_BIT32_DTYPE` turns 64-bit results (of means or batch
    norm) into 32-bit results, even with a float64 policy. This function changes that table. No public API changes the
    table.
    """
    if keras.backend.backend() == "tensorflow":
        _convert_numbers_in_full(precision == "float64")
    else:
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64" if precision == "float64" else "float32"
    floatx = "float64" if precision == "float64" else "float32"
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(f"mixed_{precision}" if precision in ("bfloat16", "float16") else floatx)


def set_attention(device_kind: str) -> None:
    """Turns off flash attention on TPUs, so that attention returns the same values as on other devices.

    Keras 3.15 on jax selects a TPU kernel (splash attention) by default. Without a mask, this kernel computes causal
    attention. With a mask, it uses the mask of the first sample for all samples. On several devices, it does not
    compile ("Mosaic kernels cannot be automatically partitioned"). With bfloat16, it does not compile if float32 matrix
    products have full precision. A layer that requests flash attention explicitly still gets flash attention.

    Args:
        device_kind: the kind of a `Devices`, for example `"tpu"`.
    """
    if device_kind == "tpu":
        keras.config.disable_flash_attention()


def _convert_numbers_in_full(in_full: bool) -> None:
    """Turns on or off the exact conversion of Python floats to float64 in Keras' TensorFlow backend.

    `tf.cast` and `tf.convert_to_tensor` (2.21) round Python floats to float32 first. The TensorFlow modules of Keras
    3.15 call both functions through their global `tf`. With `in_full`, the global `tf` of these modules becomes
    `tensorflow_with_exact_numbers`. Code outside of Keras still uses the original functions. No public API changes the
    conversion.
    """
    tf = importlib.import_module("tensorflow")
    known = tensorflow_with_exact_numbers(tf) if in_full else tf
    for name, module in list(sys.modules.items()):
        if name.startswith("keras.src.backend.tensorflow.") and name.rpartition(".")[2] in _CONVERTING:
            vars(module)["tf"] = known


def tensorflow_with_exact_numbers(tf: Any) -> types.ModuleType:
    """Returns a module with all names of TensorFlow, in which Python floats are converted without rounding.

    The functions `cast` and `convert_to_tensor` of this module convert a float, or a list of floats, to float64 first.
    """

    def cast(x: Any, dtype: Any, name: str | None = None) -> Any:
        return tf.cast(_in_full(x), dtype, name=name)

    def convert_to_tensor(value: Any, dtype: Any = None, **choices: Any) -> Any:
        return tf.convert_to_tensor(_in_full(value) if dtype is None else value, dtype, **choices)

    exact = types.ModuleType("tensorflow")
    # Python calls a module's `__getattr__` for names that the module does not define.
    vars(exact).update(cast=cast, convert_to_tensor=convert_to_tensor, __getattr__=lambda name: getattr(tf, name))
    return exact


def _in_full(x: Any) -> Any:
    """Converts a Python float, or a list of floats, to a float64 array. Any other object is returned unchanged."""
    numbers = keras.tree.flatten(x) if isinstance(x, (float, list, tuple)) else []
    has_floats = any(type(number) is float for number in numbers)
    return np.asarray(x) if has_floats and all(type(number) in (float, int) for number in numbers) else x


def set_seed(seed: int) -> None:
    """Calls `keras.utils.set_random_seed` without importing TensorFlow on other backends.

    If TensorFlow is already imported, this function also sets TensorFlow's seed: tf.data shuffles with that seed and
    the seed of `shuffle`. Otherwise `kerasdp.launch` sets TensorFlow's seed later.
    """
    with without_tensorflow():
        keras.utils.set_random_seed(seed)
    global_state.set_global_attribute(_GLOBAL_SEED, None)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)


def seed_of_program() -> int | None:
    """Returns the seed of the last call of `keras.utils.set_random_seed`; None if `set_seed` made that call.

    Keras 3.15 has no public function for this seed.
    """
    return global_state.get_global_attribute(_GLOBAL_SEED)


def kept_by_clear_session() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `keras.utils.clear_session` keeps the settings of the run.

    The settings are the distribution, the dtype policy and the use of flash attention. Search tools call
    `clear_session` for each trial.

    In Keras 3.15, `clear_session` replaces the global state by a new `threading.local()`. The context replaces
    `global_state.threading`, since scripts may already hold a reference to `clear_session`. Keras 3.16 also resets the
    distribution first, with `distribution_lib.set_distribution`. So the context replaces that function, too. No public
    API keeps these settings.
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
    """Makes Keras place new variables on devices of several JAX hosts with `put(array, sharding)`, permanently.

    In Keras 3.15, `distribution_lib.distribute_tensor` calls `jax.device_put`. `jax.device_put` (jax 0.10.2) compares
    each value between the hosts. If the model of one host differs from the models of the other hosts, that host waits
    forever or ends by SIGABRT, without an error message. No public API places variables differently.
    """
    from keras.src.backend.jax import distribution_lib
    from keras.src.utils import jax_utils

    distribute = original(distribution_lib.distribute_tensor)  # a later `put` replaces an earlier one

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
    """Returns a context in which Keras does not import TensorFlow, unless TensorFlow is the backend.

    If TensorFlow is installed, Keras (3.15) imports it to seed tf.data and to serialize objects. The import takes
    seconds. The import can also end the process, because both torch and TensorFlow include LLVM. The context sets
    `module_utils.tensorflow._available`. No public API prevents the import.
    """
    return replaced(module_utils.tensorflow, _available=keras.backend.backend() == "tensorflow")
