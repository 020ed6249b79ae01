"""A convolution with one filter can be trained in float64."""

# backends: torch, tensorflow
import keras
import numpy as np

keras.config.set_floatx("float64")
model = keras.Sequential([keras.Input((8, 8, 2)), keras.layers.Conv2D(1, 3)])
model.compile("sgd", "mse")
print(model.train_on_batch(np.ones((2, 8, 8, 2)), np.zeros((2, 6, 6, 1))))
