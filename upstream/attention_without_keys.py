"""If all keys of a query are masked, `return_attention_scores=True` does not change the attention output."""

# backends: torch, jax, tensorflow
import keras
import numpy as np

x = np.random.RandomState(0).rand(1, 4, 8).astype("float32")
mask = np.ones((1, 4, 4), bool)
mask[:, 2] = False
layer = keras.layers.MultiHeadAttention(2, 4)
outputs = keras.ops.convert_to_numpy(layer(x, x, attention_mask=mask))
others = keras.ops.convert_to_numpy(layer(x, x, attention_mask=mask, return_attention_scores=True)[0])
print(np.abs(outputs - others).max((0, 2)))
assert np.allclose(outputs, others, atol=1e-5)
