"""The mean and the layer norm of a float64 tensor are computed in float64."""

# backends: torch, tensorflow
import keras
import numpy as np

x = np.random.RandomState(0).rand(2, 8)
mean = keras.ops.mean(keras.ops.convert_to_tensor(x, "float64"), 1)
print(mean.dtype, np.abs(keras.ops.convert_to_numpy(mean) - x.mean(1)).max())
assert keras.backend.standardize_dtype(mean.dtype) == "float64"
assert np.abs(keras.ops.convert_to_numpy(mean) - x.mean(1)).max() < 1e-14
