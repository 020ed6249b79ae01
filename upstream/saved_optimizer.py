"""A saved optimizer names its public class, which exists on each backend."""

# backends: torch, jax, tensorflow
import keras

saved = keras.saving.serialize_keras_object(keras.optimizers.Adam())
print(saved["module"], saved["class_name"])
assert saved["module"] == "keras.optimizers"
