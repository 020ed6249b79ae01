"""Loads a model of keras.applications without its head, to be trained on other classes."""

import contextlib
import inspect
import os
from collections.abc import Callable
from typing import Any

from kerasdp.data.datasets import one_download_at_a_time
from kerasdp.errors import UserError


def load_backbone(name: str, weights: str, input_shape: tuple[int, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a model of keras.applications without its head, and what prepares images for it.

    Args:
        name: of a function of `keras.applications`, as `"MobileNetV2"`.
        weights: `"imagenet"`, which Keras downloads; `"none"`, random ones; or a `.weights.h5` file of the same model
            without its head.
        input_shape: `(height, width, 3)`.

    Returns:
        The model, whose outputs are of shape `(samples, height, width, channels)`, and a function of images from 0 to
        255.

    Raises:
        UserError: if there is no such model, or no such weights.
    """
    import keras

    builder = getattr(keras.applications, name, None)
    if not inspect.isfunction(builder):
        known = [each for each, value in vars(keras.applications).items() if inspect.isfunction(value)]
        raise UserError(f"--backbone: expected one of {', '.join(sorted(known))}. Received: {name!r}")
    is_file = weights not in ("imagenet", "none")
    if is_file and not (weights.endswith(".weights.h5") and os.path.exists(weights)):
        raise UserError(f"--weights: expected imagenet, none, or a .weights.h5 file. Received: {weights!r}")
    try:
        with one_download_at_a_time("models") if weights == "imagenet" else contextlib.nullcontext():
            model = builder(
                include_top=False, weights="imagenet" if weights == "imagenet" else None, input_shape=input_shape
            )
    except Exception as error:  # Keras raises bare Exception for a failed download
        reason = str(error).strip().partition("\n")[0]
        way = "; without a network: --weights=FILE.weights.h5, or none" if weights == "imagenet" else ""
        raise UserError(
            f"--backbone: {name} cannot be made for images of shape {input_shape} ({reason}){way}"
        ) from error
    if is_file:
        try:
            model.load_weights(weights)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"--weights: {weights!r} holds no weights of {name} ({reason})") from error
    module = getattr(keras.applications, builder.__module__.rpartition(".")[2])
    return model, module.preprocess_input
