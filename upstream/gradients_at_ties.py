"""At a tie, at a bound or at 0, functions have the same gradient on each backend (reference: PyTorch 2.13)."""

# backends: torch, jax, tensorflow
import keras
import numpy as np
from keras import ops

expected = {"maximum": 0.5, "clip": 1.0, "abs": 0.0, "leaky_relu": 0.2, "selu": 1.7580993}
functions = {"maximum": lambda x: ops.maximum(x, 0 * x), "clip": lambda x: ops.clip(x, 0.0, 1.0), "abs": ops.abs}
functions |= {"leaky_relu": ops.leaky_relu, "selu": ops.selu}
received = {}
for name, function in functions.items():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, function, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0), lambda y, outputs: outputs[:, 0])
    model.train_on_batch(np.zeros((1, 1)), np.zeros((1, 1)))
    received[name] = -float(model.get_weights()[1][0])
print(received)
assert all(np.isclose(received[name], expected[name]) for name in expected)
