"""A saved optimizer has the public name of its class, which each backend knows."""

# backends: torch, jax, tensorflow
import keras

saved = keras.saving.serialize_keras_object(keras.optimizers.Adam())
print(saved["module"], saved["class_name"])
assert saved["module"] == "keras.optimizers"
