"""`clear_session` does not change the dtype policy."""

# backends: torch, jax, tensorflow
import keras

keras.config.set_dtype_policy("mixed_bfloat16")
keras.utils.clear_session()
print(keras.config.dtype_policy())
assert keras.config.dtype_policy().name == "mixed_bfloat16"
