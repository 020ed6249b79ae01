"""`pad` with `mode="symmetric"` returns the same values as NumPy."""

# backends: torch, jax, tensorflow
import keras
import numpy as np

x = np.arange(4.0, dtype="float32").reshape(2, 2)
received = keras.ops.convert_to_numpy(keras.ops.pad(x, ((0, 0), (2, 0)), mode="symmetric"))
print(received.tolist())
assert np.array_equal(received, np.pad(x, ((0, 0), (2, 0)), mode="symmetric"))
