"""In a `RematScope`, dropout uses the same mask in the backward pass as in the forward pass."""

# backends: torch, tensorflow
import keras
import numpy as np

with keras.RematScope(mode="full"):
    dropout = keras.layers.Dropout(0.5, seed=1)
inputs = keras.Input((1000,))
model = keras.Model(inputs, dropout(keras.layers.Dense(1000, use_bias=False, kernel_initializer="identity")(inputs)))
model.compile(
    keras.optimizers.SGD(1.0),
    lambda y, outputs: keras.ops.sum(outputs, 1) + 0 * y[:, 0],
    run_eagerly=keras.backend.backend() != "jax",
)
kept = []
take = lambda outputs: kept.append(np.array(keras.ops.convert_to_numpy(keras.ops.stop_gradient(outputs))))  # noqa: E731
model.compute_metrics = lambda x, y, outputs, sample_weight=None: take(outputs) or {}
model.train_on_batch(np.ones((1, 1000)), np.zeros((1, 1)))
gradient = np.diag(np.eye(1000) - model.get_weights()[0])
print((gradient != 0).sum(), (kept[0] != 0).sum(), ((gradient != 0) != (kept[0][0] != 0)).sum())
assert np.allclose(gradient, kept[0][0])
