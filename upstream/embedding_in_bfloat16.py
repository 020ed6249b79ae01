"""In bfloat16, the gradient of an embedding is exact: the sum of 1,000 ones is 1000, not 256."""

# backends: torch, jax, tensorflow
import keras
import numpy as np

tokens = np.full((1, 1000), 1)
model = keras.Sequential([keras.Input((1000,), dtype="int32"), keras.layers.Embedding(2, 1, dtype="mixed_bfloat16")])
total = lambda y, x: keras.ops.sum(keras.ops.reshape(keras.ops.cast(x, "float32"), (1, -1)), 1)  # noqa: E731
model.compile(keras.optimizers.SGD(1.0), total, jit_compile=keras.backend.backend() == "jax")
before = model.get_weights()[0]
model.train_on_batch(tokens, np.zeros((1, 1)))
gradient = before - model.get_weights()[0]
print(gradient.ravel())
assert abs(gradient[1, 0] - 1000) < 10
