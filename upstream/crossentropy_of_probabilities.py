"""The gradient of a crossentropy depends on the probabilities, not on the operation that computed them."""

# backends: torch, jax, tensorflow
import keras
import numpy as np

gradients = []
for last in (keras.activations.softmax, lambda x: keras.ops.softmax(x) * 1.0):
    layers = [keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros"), keras.layers.Activation(last)]
    model = keras.Sequential([keras.Input((1,)), *layers])
    model.set_weights([np.array([[-50.0, 50.0]])])
    model.compile(keras.optimizers.SGD(1.0), "categorical_crossentropy")
    model.train_on_batch(np.ones((1, 1)), np.array([[1.0, 0.0]]))
    gradients.append(model.get_weights()[0] - [[-50, 50]])
print(gradients)
assert np.allclose(*gradients)
