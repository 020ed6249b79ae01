"""Makes the first layers of every built-in model."""

import keras
from keras import layers


def image_input(input_shape: tuple[int, ...]) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Returns an input for images from 0 to 255, and the same scaled to [0, 1].

    The scaling is part of the model, so uint8 images travel to the device as they are, and a saved model takes
    the same images as the one that was trained.

    Returns:
        The model's input, shape `(batch, *input_shape)`, and the tensor to build the model on.
    """
    inputs = keras.Input(input_shape, name="image")
    return inputs, layers.Rescaling(1.0 / 255, name="rescaling")(inputs)
