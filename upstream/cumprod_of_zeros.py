"""The gradient of `cumprod` is correct if an input is zero."""

# backends: torch, jax, tensorflow
import keras
import numpy as np
from keras import ops

product = keras.layers.Lambda(lambda x: ops.cumprod(x, axis=-1)[:, -1:])
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3), product])
model.layers[0].set_weights([np.zeros((1, 3)), np.array([2.0, 0.0, 3.0])])
model.compile(keras.optimizers.SGD(1.0), lambda y, outputs: outputs[:, 0])
model.train_on_batch(np.zeros((1, 1)), np.zeros((1, 1)))
gradient = np.array([2.0, 0.0, 3.0]) - model.get_weights()[1]
print(gradient.tolist())  # the second number is multiplied by 2 and 3
assert np.allclose(gradient, [0.0, 6.0, 0.0])
