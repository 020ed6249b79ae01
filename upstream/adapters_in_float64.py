"""The LoRA adapters of a float64 layer have the dtype float64."""

# backends: torch, jax, tensorflow
import keras

if keras.backend.backend() == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)
layer = keras.layers.Dense(4, dtype="float64")
layer.build((None, 4))
layer.enable_lora(2)
print([str(weight.dtype) for weight in layer.weights])
assert all(weight.dtype == "float64" for weight in layer.weights)
