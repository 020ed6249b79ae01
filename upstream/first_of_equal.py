"""`argmax` returns the index of the first maximum, and treats -0.0 and 0.0 as equal."""

# backends: torch, jax, tensorflow
import keras
import numpy as np

place = int(keras.ops.argmax(np.array([-0.0, 0.0], "float32")))
print(place)
assert place == int(np.argmax(np.array([-0.0, 0.0], "float32")))
