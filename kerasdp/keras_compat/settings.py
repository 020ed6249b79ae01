"""Sets Keras' process-wide state: precision, seed, and which backends Keras may import."""

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


def keep_messages_of(kind: type[Exception]) -> None:
    """Keeps Keras from adding to the message of errors of this class, if a layer's call raises them.

    Keras 3.15 adds the call's arguments to the text of each error that a layer raises. It skips errors that have the
    attribute `_keras_call_info_injected`. The public `disable_traceback_filtering` affects all errors.
    """
    kind._keras_call_info_injected = True  # type: ignore[attr-defined]


def set_precision(precision: str) -> None:
    """Makes layers compute in `precision`, one of `kerasdp.config.config.PRECISIONS`.

    In Keras 3.15, on torch and jax, `dtypes.BIT64_TO_BIT32_DTYPE` turns 64-bit results (means, batch norm) into 32-bit
    ones, whatever the policy is. This changes that table. There is no public API for it.
    """
    if keras.backend.backend() == "tensorflow":
        _convert_numbers_in_full(precision == "float64")
    else:
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64" if precision == "float64" else "float32"
    floatx = "float64" if precision == "float64" else "float32"
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(f"mixed_{precision}" if precision in ("bfloat16", "float16") else floatx)


def set_attention(device_kind: str) -> None:
    """Turns off flash attention on TPUs, so that attention computes the same as on other devices.

    Keras 3.15 on jax selects a TPU kernel (splash attention) by default. Without a mask this kernel is causal. With a
    mask, it uses the mask of the first sample for all samples. It does not compile on several devices ("Mosaic kernels
    cannot be automatically partitioned"), nor with bfloat16 if float32 products are exact. A layer that asks for flash
    attention still gets it.

    Args:
        device_kind: the kind of a `Devices`.
    """
    if device_kind == "tpu":
        keras.config.disable_flash_attention()


def _convert_numbers_in_full(in_full: bool) -> None:
    """Makes Keras' TensorFlow backend convert Python floats to float64 tensors without rounding, or restores it.

    `tf.cast` and `tf.convert_to_tensor` (2.21) round them to float32 first. The TensorFlow modules of Keras 3.15 call
    these through their global `tf`. The modules that convert numbers get another `tf` until the precision changes. Code
    outside of Keras still has the original. There is no public API for it.
    """
    tf = importlib.import_module("tensorflow")
    known = tensorflow_with_exact_numbers(tf) if in_full else tf
    for name, module in list(sys.modules.items()):
        if name.startswith("keras.src.backend.tensorflow.") and name.rpartition(".")[2] in _CONVERTING:
            vars(module)["tf"] = known


def tensorflow_with_exact_numbers(tf: Any) -> types.ModuleType:
    """Returns a module with all names of TensorFlow that converts Python floats without rounding.

    Its `cast` and `convert_to_tensor` convert a float, or a list of floats, to float64 first.
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
    """Converts Python floats, and lists of them, to float64 arrays; returns anything else unchanged."""
    numbers = keras.tree.flatten(x) if isinstance(x, (float, list, tuple)) else []
    has_floats = any(type(number) is float for number in numbers)
    return np.asarray(x) if has_floats and all(type(number) in (float, int) for number in numbers) else x


def set_seed(seed: int) -> None:
    """Calls `keras.utils.set_random_seed`, without importing TensorFlow if the backend is another one.

    If TensorFlow is already imported, it is seeded as well: tf.data shuffles with that seed and the seed of `shuffle`.
    If it is not, `kerasdp.launch` seeds it later.
    """
    with without_tensorflow():
        keras.utils.set_random_seed(seed)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)


def kept_by_clear_session() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `keras.utils.clear_session` keeps the distribution and the dtype policy.

    Search tools call `clear_session` for each trial.

    In Keras 3.15, `clear_session` replaces the state by a new `threading.local()`. This patches
    `global_state.threading`, since scripts may already hold a reference to `clear_session`. Keras 3.16 also resets the
    distribution first, with `distribution_lib.set_distribution`. There is no public API for it.
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

    In Keras 3.15, `distribution_lib.distribute_tensor` calls `jax.device_put`, which (jax 0.10.2) compares each value
    between the hosts. A host with another model then waits forever, or ends by SIGABRT, without an error message. There
    is no public API for it.
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
    """Returns a context in which Keras does not import TensorFlow if the backend is another one.

    Keras (3.15) imports it, if it is installed, to seed tf.data and to serialize objects. The import takes seconds, and
    can end the process, because both torch and TensorFlow include LLVM. This changes
    `module_utils.tensorflow._available`; there is no public API for it.
    """
    return replaced(module_utils.tensorflow, _available=keras.backend.backend() == "tensorflow")
