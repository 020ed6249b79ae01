"""What the models with steps of their own share: the loop over them, and an update in the form of each backend."""

import numpy as np

BATCH, ROWS = 8, 29  # the last batch of an epoch has five rows
EPOCHS = 3


def numbers(seed, *shape):
    return np.random.RandomState(seed).randn(*shape)


def fitted(runner, model, x, y=None, **options):
    losses = Steps()
    history = runner.fit(model, x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[losses], **options).history
    weights = np.concatenate([np.ravel(array_of(weight)) for weight in model.weights])
    return {"steps": losses.values, "history": history, "weights": [float(weights.sum()), float((weights**2).sum())]}


def array_of(weight):
    import keras

    return np.asarray(keras.ops.convert_to_numpy(weight), "float64")


class Steps:
    """Keras' logs after each step: a callback, made when Keras may be imported."""

    def __new__(cls):
        import keras

        class Callback(keras.callbacks.Callback):
            def __init__(self):
                super().__init__()
                self.values = []

            def on_train_batch_end(self, batch, logs=None):
                self.values.append({name: float(value) for name, value in logs.items()})

        return Callback()


def minimizing():
    """Returns a base class whose `minimize(loss, weights, optimizer)` takes one step, as the backend's guide does."""
    import keras

    if keras.backend.backend() == "jax":
        return keras.Model
    if keras.backend.backend() == "torch":
        import torch

        class Model(keras.Model):
            def minimize(self, loss_of, weights, optimizer):
                for weight in weights:
                    weight.value.grad = None
                loss = loss_of()
                loss.backward()
                gradients = [weight.value.grad for weight in weights]
                with torch.no_grad():
                    optimizer.apply(gradients, weights)
                return loss.detach()

    else:
        import tensorflow as tf

        class Model(keras.Model):
            def minimize(self, loss_of, weights, optimizer):
                with tf.GradientTape() as tape:
                    loss = loss_of()
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
                return loss

    return Model


def in_form_of_backend(kind):
    """Returns the model's class; on jax the one of `own_steps_jax`."""
    import keras

    if keras.backend.backend() != "jax":
        return kind
    import own_steps_jax

    return type(kind.__name__, (getattr(own_steps_jax, kind.__name__), kind), {})
