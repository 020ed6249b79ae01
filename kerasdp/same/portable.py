"""Makes a Keras model train the same on every backend and device count."""

import functools
import inspect
import re
import sys
import warnings
from typing import Any, cast

import keras

from kerasdp.config import BATCH_NORMS
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import all_layers, become, has_seed_generators
from kerasdp.keras_compat.models import has_call
from kerasdp.keras_compat.random import draw_portably, give_seed_generator
from kerasdp.same import layers
from kerasdp.same.layer_calls import hook_layers

_A_DRAW = re.compile(r"\brandom\.(dropout|uniform|normal|truncated_normal|randint)\(")

# The outputs of these layers differ even with the same random numbers (Keras 3.15).
_NOT_PORTABLE = ("RandAugment", "RandomElasticTransform")


def portable(model: keras.Model, batch_norm: str = "sync") -> keras.Model:
    """Makes batch norm and random layers of a model compute the same on every backend and number of devices.

    `Runner` calls `portable` for every model of a run. Call it yourself to use a model in the same way outside of a
    run.

    The layers are changed in place. The model may be functional, Sequential, nested or subclassed.
    `keras.layers.BatchNormalization` becomes `kerasdp.layers.BatchNormalization`. Layers with a seed generator draw the
    same random values on every backend and number of devices: Dropout, GaussianNoise, RandomFlip, LSTM with dropout and
    user-defined layers. For example, a dropout mask is bit-equal on all of them. A warning names the layers
    of Keras whose outputs still differ.

    Args:
        model: a built Keras model.
        batch_norm: `"sync"`: statistics over the global batch. `"replica"`: statistics over the shard of each replica.

    Returns:
        The same model.

    Raises:
        UserError: if the model is not built, or `batch_norm` has another value.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        layers = [keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        model = kerasdp.portable(keras.Sequential([keras.Input((8,)), *layers]))
        print(isinstance(model.layers[1], kerasdp.layers.BatchNormalization))  # True
        outputs = model(np.random.rand(64, 8), training=True)  # the same dropout mask on each backend
        ```
    """
    if batch_norm not in BATCH_NORMS:
        raise UserError(f"batch_norm: expected one of {', '.join(BATCH_NORMS)}. Received: {batch_norm!r}")
    if has_call(model) and not model.built:
        raise UserError(f"portable: {model.name} has no weights yet; build {model.name} or call it on a batch first")
    unbuilt = [layer.name for layer in all_layers(model) if layer is not model and not layer.built]
    if unbuilt and not has_call(model):
        raise UserError(
            f"layer {unbuilt[0]} of {model.name} has no weights yet, and {model.name} has no call() to make them; "
            f"call {unbuilt[0]}.build(input_shape), or add a keras.Input to it if it is a Sequential model"
        )
    hook_layers()
    for layer in all_layers(model):
        if not has_seed_generators(layer) and _draws_without_seed(cast(Any, type(layer))):
            give_seed_generator(layer)
        # A subclass that overrides `call` stays as it is.
        if type(layer) is keras.layers.BatchNormalization and "call" not in vars(layer):
            become(layer, layers.BatchNormalization)
        if _draws(layer):
            draw_portably(layer)
        if isinstance(layer, layers.BatchNormalization):
            layer.statistics = batch_norm
    for layer in all_layers(model):
        if type(layer).__name__ in _NOT_PORTABLE and type(layer).__module__.startswith("keras."):
            warnings.warn(
                f"layer {layer.name}: {type(layer).__name__} differs between backends, so training will differ",
                stacklevel=2,
            )
    return model


def batch_norms(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the batch norm layers of a model: Keras' `BatchNormalization` and its subclasses."""
    return [layer for layer in all_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]


def _draws(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer, or a sublayer (such as the cell of an LSTM), may draw random values."""
    own = has_seed_generators(layer)
    if isinstance(layer, keras.Model):  # `portable` checks its layers one by one
        return own
    return own or any(has_seed_generators(part) for part in all_layers(layer))


@functools.cache
def _draws_without_seed(kind: Any) -> bool:
    """Returns whether the source code of a layer class calls a function of `keras.random` that draws.

    The search is for layers without a seed generator, such as drop path in `keras.applications` and in KerasHub (0.32).
    It covers the class, and the functions that `call` uses. It skips `__init__` and `build`, which draw initial
    weights. If the search misses a layer, that layer raises an error when it draws.
    """
    names = getattr(getattr(kind.call, "__code__", None), "co_names", ())
    used = [vars(sys.modules.get(kind.__module__, kind)).get(name) for name in names]
    methods = [value for name, value in vars(kind).items() if name not in ("__init__", "build")]
    try:
        texts = [inspect.getsource(part) for part in (kind.call, *filter(inspect.isfunction, [*used, *methods]))]
    except (OSError, TypeError):  # a class without a source file
        return False
    return any(_A_DRAW.search(text) for text in texts)
