"""GELU of a float64 tensor is accurate to float64."""

# backends: torch, tensorflow
import keras
import numpy as np

x = np.linspace(-3, 3, 13)
right = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
received = keras.ops.convert_to_numpy(keras.ops.gelu(keras.ops.convert_to_tensor(x, "float64"), approximate=True))
print(received.dtype, np.abs(received - right).max())
assert np.abs(received - right).max() < 1e-13
