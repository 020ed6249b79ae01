"""The kit finds what is wrong: faults put into one way to train, each of them named where it is.

A fault is switched on by an environment variable, for the process of one way; the reference never has it.
"""

import os
import re
import threading

import numpy as np
import pytest

from kerasdp import UserError, parity
from tests.helpers import BACKENDS

STEPS, BATCH = 6, 31
# The faulty way is another backend than the reference where there are two.
REFERENCE = parity.Way(backend=BACKENDS[0], num_devices=1)
FAULTY = parity.Way(backend=BACKENDS[-1] if len(BACKENDS) < 3 else BACKENDS[1], num_devices=1)


def fault():
    return os.environ.get("KERASDP_TEST_FAULT", "")


def build_model():
    import keras
    from keras import ops

    class Shift(keras.layers.Layer):
        def call(self, x):
            return x + 1e-3 if fault() == "shift" else x

    class Halfway(keras.layers.Layer):
        """Its output is right and its gradient is not."""

        def call(self, x):
            return 0.5 * x + ops.stop_gradient(0.5 * x) if fault() == "gradient" else x

    class Model(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            if fault() == "replica_loss" and len(y) % 2:
                cut, mean = (len(y) + 1) // 2, super().compute_loss
                return (mean(x, y[:cut], y_pred[:cut]) + mean(x, y[cut:], y_pred[cut:])) / 2
            if fault() == "short_loss":
                y, y_pred = y[:-1], y_pred[:-1]
            return super().compute_loss(x, y, y_pred, sample_weight, training)

    spoil_the_kit()
    inputs = keras.Input((12,))
    x = Shift(name="shift")(keras.layers.Dense(16, "tanh", name="first")(inputs))
    x = Halfway(name="halfway")(keras.layers.Dense(16, "tanh", name="second")(x))
    model = Model(inputs, keras.layers.Dense(3, name="third")(x))
    rate = 0.0505 if fault() == "rate" else 0.05
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["accuracy"])
    return model


def spoil_the_kit():
    """Faults of the kit itself, in a worker process."""
    from kerasdp.data import sources
    from kerasdp.data.sampling import Order

    if fault() in ("dropped", "swapped", "order"):
        in_order = Order.batches

        def spoiled(order, epoch, start=0):
            batches = [batch.copy() for batch in in_order(order, epoch)]
            if fault() == "dropped":
                batches[2] = batches[2][:-1]
            if fault() == "swapped":
                batches[3][[4, 9]] = batches[3][[9, 4]]
            if fault() == "order":
                batches[1][5], batches[2][5] = batches[2][5], batches[1][5]
            return iter(batches[start:])

        Order.batches = spoiled
    if fault() == "wrong_rows":  # others than it says
        read = sources.ArraySource.inputs
        sources.ArraySource.inputs = lambda self, indices: read(self, np.roll(indices, 1))
    if fault() == "unreduced" and os.environ["KERAS_BACKEND"] == "torch":
        from kerasdp.backends.torch import train_step

        assert callable(train_step.RankSteps.distributed) and callable(train_step.reduce_others)
        train_step.RankSteps.distributed = lambda steps, batch: steps.model
        train_step.reduce_others = lambda parallel, variables: None
    if fault() == "unreduced" and os.environ["KERAS_BACKEND"] == "tensorflow":
        from kerasdp.backends.tensorflow import collectives

        mean = collectives.mean

        def unreduced(gradients, others, *_):
            take_apart = mean([], others)
            return lambda: (gradients, take_apart()[1])

        collectives.mean = unreduced


def data():
    random = np.random.RandomState(0)
    x = random.randn(20 * BATCH, 12).astype("float32")
    return x, (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0)


JOB = parity.Job(build_model=build_model, data=data, steps=STEPS, batch_size=BATCH)

FAULTS = [
    ("shift", 0, "loss", "the output of shift differs first"),
    ("short_loss", 0, "loss", "all layers agree .* but the loss differs"),
    ("replica_loss", 0, "loss", "all layers agree .* but the loss differs"),
    ("gradient", 0, "gradient", "in the backward pass, the gradient of second/bias differs first, by 5.0e-01"),
    ("rate", 1, "loss", "an update differs"),
    ("dropped", 2, "samples", "expected 31 rows, received 30 rows"),
    ("swapped", 3, "samples", r"row 4: expected sample \d+, received sample \d+"),
    ("order", 1, "samples", r"row 5: expected sample \d+, received sample \d+"),
    ("wrong_rows", 0, "loss", "the output of inputs differs first"),
]


@pytest.fixture(scope="module")
def reference():
    return parity.Reference(JOB, REFERENCE)


def judged(reference, name, monkeypatch, way=FAULTY):
    assert reference.trace and reference.first_step  # before the fault is switched on
    monkeypatch.setenv("KERASDP_TEST_FAULT", name)
    return parity.judge(way, reference, reference.tolerance)


@pytest.mark.proof  # the code of the README has two that pass
def test_without_a_fault_it_passes(reference, monkeypatch):
    outcome = judged(reference, "", monkeypatch)
    assert outcome.passed, outcome
    assert len(outcome.losses) == STEPS
    assert outcome.differences.max() < 1e-6


@pytest.mark.proof  # recipes/test_recipes.py has one that is named in short
@pytest.mark.parametrize(("name", "step", "what", "words"), FAULTS)
def test_a_fault_is_named(reference, monkeypatch, name, step, what, words):
    outcome = judged(reference, name, monkeypatch)
    assert outcome.divergence is not None, outcome
    assert (outcome.divergence.step, outcome.divergence.what) == (step, what), str(outcome.divergence)
    assert re.search(words, str(outcome.divergence)), str(outcome.divergence)


# jax reduces by itself.
@pytest.mark.proof
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "jax"])
def test_unreduced_gradients_are_named(reference, monkeypatch, backend):
    way = parity.Way(backend=backend, num_devices=2)
    outcome = judged(reference, "unreduced", monkeypatch, way)
    if outcome.error:  # with TensorFlow the replicas part, which ends the run before any comparison
        assert "hold different values" in outcome.error
        return
    assert (outcome.divergence.step, outcome.divergence.what) == (0, "gradient"), str(outcome.divergence)
    assert "the gradient of third/bias differs first" in str(outcome.divergence)
    assert "reduced over the replicas" in str(outcome.divergence)


def test_a_model_that_cannot_travel_is_refused():
    lock = threading.Lock()
    with pytest.raises(UserError, match="lock, which the lambda refers to, is a lock and cannot be sent"):
        parity.compare(lambda: lock, data)
