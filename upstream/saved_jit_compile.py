"""A saved model does not fix `jit_compile` to what "auto" meant where it was saved."""

# backends: torch, jax, tensorflow
import keras

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
print(model.get_compile_config()["jit_compile"])
assert model.get_compile_config()["jit_compile"] == "auto"
