"""What programs of cases share: their start, the loop over them, and an update in the form of each backend."""

import functools
import json
import os
import sys

import keras
import numpy as np
from starting import printed

import kerasdp

BATCH, ROWS = 8, 29  # the last batch of an epoch has five rows
EPOCHS = 3


def main(cases, **settings):
    """Runs the cases that the command names, or all, in float64; prints by name what each gives, or its refusal.

    python PROGRAM BACKEND NUM_DEVICES [CASE ...] [SETTINGS]: these in JSON, of `kerasdp.Config`
    """
    backend, num_devices, *names = sys.argv[1:]
    more = json.loads(names.pop()) if names and names[-1].startswith("{") else {}
    chosen = {name: cases[name] for name in names or cases}
    settings |= {"precision": "float64"} | more
    printed(functools.partial(outcomes, chosen), backend, num_devices, **settings)


def outcomes(cases, runner):
    return {name: outcome(case, runner) for name, case in cases.items()}


def outcome(case, runner):
    try:
        return case(runner)
    except kerasdp.UserError as error:
        return str(error)


def numbers(seed, *shape):
    return np.random.RandomState(seed).randn(*shape)


def fitted(runner, model, x, y=None, **options):
    losses = Steps()
    history = runner.fit(model, x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[losses], **options).history
    weights = np.concatenate([np.ravel(array_of(weight)) for weight in model.weights])
    return {"steps": losses.values, "history": history, "weights": [float(weights.sum()), float((weights**2).sum())]}


def array_of(weight):
    return np.asarray(keras.ops.convert_to_numpy(weight), "float64")


class Steps(keras.callbacks.Callback):
    """Keras' logs after each step."""

    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append({name: float(value) for name, value in logs.items()})


def minimizing():
    """Returns a base class whose `minimize(loss_of, weights, optimizer)` takes one step.

    By `kerasdp.value_and_grad`, alike on each backend, or, with OWN_STEPS=native, as the backend's guide does.
    `loss_of` returns the loss, with has_aux=True also what else is wanted; so does `minimize`. Each call makes a new
    class: Keras changes the bases of a class when a model of it is made of inputs and outputs.
    """

    class Portable(keras.Model):
        def minimize(self, loss_of, weights, optimizer, has_aux=False):
            found, gradients = kerasdp.value_and_grad(loss_of, weights, has_aux)()
            optimizer.apply(gradients, weights)
            return found

    class Torch(keras.Model):
        def minimize(self, loss_of, weights, optimizer, has_aux=False):
            import torch

            for weight in weights:
                weight.value.grad = None
            found = loss_of()
            (found[0] if has_aux else found).backward()
            with torch.no_grad():
                optimizer.apply([weight.value.grad for weight in weights], weights)
            return keras.tree.map_structure(keras.ops.stop_gradient, found)

    class TensorFlow(keras.Model):
        def minimize(self, loss_of, weights, optimizer, has_aux=False):
            import tensorflow as tf

            with tf.GradientTape() as tape:
                found = loss_of()
            gradients = tape.gradient(found[0] if has_aux else found, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return found

    native = {"torch": Torch, "tensorflow": TensorFlow, "jax": keras.Model}
    return native[keras.backend.backend()] if is_native() else Portable


def is_native():
    return os.environ.get("OWN_STEPS") == "native"


def in_form_of_backend(kind):
    """Returns the model's class; of native steps on jax the one of `own_steps_jax`, if it is there."""
    if keras.backend.backend() != "jax" or not is_native():
        return kind
    import own_steps_jax

    native = getattr(own_steps_jax, kind.__name__, None)
    return kind if native is None else type(kind.__name__, (native, kind), {})
