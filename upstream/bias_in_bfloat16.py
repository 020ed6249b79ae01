"""In bfloat16, the gradient of a convolution bias is exact: the sum of 3,000 ones is 3000, not 256."""

# backends: torch, jax, tensorflow
import keras
import numpy as np

images = np.ones((30, 10, 10, 1))
model = keras.Sequential([keras.Input((10, 10, 1)), keras.layers.Conv2D(1, 1, dtype="mixed_bfloat16")])
model.compile(keras.optimizers.SGD(1.0), lambda y, x: 30 * keras.ops.sum(keras.ops.cast(x, "float32"), (1, 2, 3)))
before = model.get_weights()[1]
model.train_on_batch(images, np.zeros((30, 1)))
gradient = before - model.get_weights()[1]
print(gradient)
assert abs(gradient[0] - 3000) < 30
