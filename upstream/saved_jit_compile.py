"""A saved model stores `jit_compile="auto"`, not the value that Keras chose for "auto"."""

# backends: torch, jax, tensorflow
import keras

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
print(model.get_compile_config()["jit_compile"])
assert model.get_compile_config()["jit_compile"] == "auto"
