"""Uses a SavedModel as a program does that knows neither Keras nor kerasdp."""

from typing import Any

import numpy as np
import tensorflow as tf


def outputs_of(folder: str, inputs: Any) -> np.ndarray:
    """Returns what the endpoint `serve` of a SavedModel gives for these inputs."""
    loaded = tf.saved_model.load(folder)  # kept: its function does not keep its variables
    outputs: np.ndarray = loaded.serve(inputs).numpy()
    return outputs
