"""Keras' settings of a whole process: precision and seed."""

import contextlib
from collections.abc import Iterator

import keras
from keras.src import api_export
from keras.src.backend.common import dtypes
from keras.src.utils import module_utils


def set_precision(precision: str) -> None:
    """Makes layers compute in a precision of `kerasdp.config.validation.PRECISIONS`."""
    # Keras (3.15) lets results of 64 bits be of 32 on torch and jax, whatever the policy says: means, batch norm...
    if keras.backend.backend() != "tensorflow":
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64" if precision == "float64" else "float32"
    whole = precision in ("float32", "float64")
    keras.config.set_floatx(precision if whole else "float32")
    keras.config.set_dtype_policy(precision if whole else f"mixed_{precision}")


def set_seed(seed: int) -> None:
    """`keras.utils.set_random_seed`."""
    with without_tensorflow():
        keras.utils.set_random_seed(seed)


@contextlib.contextmanager
def without_tensorflow() -> Iterator[None]:
    """Keeps Keras from importing TensorFlow beside another backend.

    Keras (3.15) does that where it is installed, to seed tf.data and to serialize anything. It costs seconds, and can
    end the process: both torch and TensorFlow bring LLVM.
    """
    seen, module_utils.tensorflow._available = (
        module_utils.tensorflow._available,
        keras.backend.backend() == "tensorflow",
    )
    try:
        yield
    finally:
        module_utils.tensorflow._available = seen


def saved_as_keras(layer_class: type) -> type:
    """Class decorator: models are saved with the Keras layer that the class derives from.

    Weights and config are those of Keras' layer, so such a file loads where there is no kerasdp; `portable` turns the
    layer back into ours. Keras (3.15) looks a class up in this table before it writes the name of its module.
    """
    name = f"keras.layers.{layer_class.__name__}"
    api_export.REGISTERED_OBJS_TO_NAMES[layer_class] = name
    return layer_class
