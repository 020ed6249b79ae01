"""Average pooling with `padding="same"` leaves the padding out of the average."""

# backends: torch, jax, tensorflow
import keras
import numpy as np

x = np.arange(16.0, dtype="float32").reshape(1, 4, 4, 1)
received = keras.ops.convert_to_numpy(keras.layers.AveragePooling2D(3, strides=2, padding="same")(x)).ravel()
right = [x[0, i : i + 3, j : j + 3].mean() for i in (0, 2) for j in (0, 2)]  # one more row and column at the end
print(received.tolist(), "for", [float(each) for each in right])
assert np.allclose(received, right)
