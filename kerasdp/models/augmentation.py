"""Puts Keras' image layers in front of a model, which change its images in training alone."""

from typing import Any

import keras
from keras import layers

from kerasdp.config import Config, spec
from kerasdp.errors import UserError

# Name on the command line: the layer, and its arguments where none are given. Images are from 0 to 255.
_LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "flip": (layers.RandomFlip, {"mode": "horizontal"}),
    "translate": (lambda factor, **other: layers.RandomTranslation(factor, factor, **other), {"factor": 0.1}),
    "rotate": (layers.RandomRotation, {"factor": 0.05}),
    "zoom": (layers.RandomZoom, {"height_factor": 0.1}),
    "brightness": (layers.RandomBrightness, {"factor": 0.2}),
    "contrast": (layers.RandomContrast, {"factor": 0.2}),
}


def augmented(model: keras.Model, config: Config, input_shape: tuple[int, ...]) -> keras.Model:
    """Returns the model behind the layers of `config.augment`; the model itself if there are none.

    Raises:
        UserError: if the inputs are no images, or a layer does not take its arguments.
    """
    asked = spec.parse_list(config.augment or "", "augment")
    if not asked:
        return model
    if len(input_shape) != 3:
        raise UserError(f"--augment: expected images of shape (height, width, channels). Received: {input_shape}")
    inputs = keras.Input(input_shape, name="image")
    outputs = layers.Rescaling(1.0, name="as_float")(inputs)  # images come as uint8
    for name, arguments in asked:
        layer, defaults = _LAYERS[name]
        try:
            outputs = layer(**(defaults | arguments))(outputs)
        except (TypeError, ValueError) as error:
            raise UserError(f"--augment: {name} does not take these arguments: {str(error).splitlines()[0]}") from error
    return keras.Model(inputs, model(outputs), name=model.name)
