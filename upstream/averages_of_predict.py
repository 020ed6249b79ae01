"""`predict` with the callback `SwapEMAWeights` does not change the weights."""

# backends: torch, jax, tensorflow
import keras
import numpy as np

x = np.arange(8.0)[:, None]
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01, use_ema=True), "mse")
model.fit(x, x, epochs=1, batch_size=4, verbose=0)
model.optimizer._model_variables_moving_average[0].assign([[7.0]])
before = model.get_weights()[0].item()
model.predict(x, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])
after = model.get_weights()[0].item()
print(after)
assert after == before
