"""`get_config` and `from_config` keep the value of `lora_alpha`."""

# backends: torch, jax, tensorflow
import keras

layer = keras.layers.Dense(4, lora_rank=2, lora_alpha=6)
layer.build((None, 4))
print(layer.get_config().get("lora_alpha"), layer.lora_alpha)
assert layer.lora_alpha == 6 and layer.from_config(layer.get_config()).lora_alpha == 6
