"""The order in which `fit` shuffles the samples depends on the seed."""

# backends: torch, jax, tensorflow
import keras
import numpy as np

first = []
for seed in (1, 2):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", lambda y, outputs: y[:, 0] + 0 * outputs[:, 0])
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: first.append(logs["loss"]))
    model.fit(
        np.ones((64, 1)), np.arange(64.0)[:, None], batch_size=1, steps_per_epoch=1, verbose=0, callbacks=[callback]
    )
print(first)
assert first[0] != first[1]
