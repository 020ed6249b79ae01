"""If a token occurs twice in a batch, the optimizer adds its two gradients before it squares the sum."""

# backends: torch, jax, tensorflow
import keras
import numpy as np

model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(2, 1)])
optimizer = keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0)
model.compile(optimizer, lambda y, outputs: keras.ops.sum(keras.ops.reshape(outputs, (1, -1)), 1))
model.train_on_batch(np.array([[1, 1]]), np.zeros((1, 1)))
sums = keras.ops.convert_to_numpy(optimizer.variables[2]).ravel()
print(sums)
assert np.allclose(sums, [0, 4])
