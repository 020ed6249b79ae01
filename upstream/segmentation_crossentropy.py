"""`sparse_categorical_crossentropy` of the class probabilities of pixels has a gradient."""

# backends: torch, jax, tensorflow
import keras
import numpy as np

model = keras.Sequential([keras.Input((4, 4, 3)), keras.layers.Conv2D(5, 1, activation="softmax")])
model.compile("sgd", "sparse_categorical_crossentropy")
print(model.train_on_batch(np.ones((2, 4, 4, 3)), np.zeros((2, 4, 4), "int32")))
