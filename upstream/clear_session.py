"""`clear_session` leaves the dtype policy as it was set."""

# backends: torch, jax, tensorflow
import keras

keras.config.set_dtype_policy("mixed_bfloat16")
keras.utils.clear_session()
print(keras.config.dtype_policy())
assert keras.config.dtype_policy().name == "mixed_bfloat16"
