"""The kit's models train alike in nine ways, over the end of several epochs, with batches that no four devices share.

`python -m pytest -m proof -n 0 -s tests/parity/test_kit_models.py` takes an hour on two cores.
"""

import functools

import numpy as np
import pytest

import kerasdp
from kerasdp import parity
from kerasdp.parity.trace import Job, plain_losses

pytestmark = [pytest.mark.proof, pytest.mark.timeout(3600)]


def build_model(name, optimizer):
    import keras

    data = kerasdp.load_data("digits")
    model = kerasdp.build_model(name, data.input_shape, data.num_classes)
    rule = keras.optimizers.Adam(0.001) if optimizer == "adam" else keras.optimizers.SGD(0.003, momentum=0.9)
    model.compile(rule, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def digits(count):
    source = kerasdp.load_data("digits").train
    indices = np.arange(count)
    return source.inputs(indices), source.targets(indices)[0]


def largest_difference(name, batch_size, optimizer="sgd", **choices):
    """Of a loss of 40 steps, relative."""
    comparison = parity.compare(
        functools.partial(build_model, name, optimizer),
        functools.partial(digits, 5 * batch_size),
        report=lambda outcome: print(outcome, flush=True),
        device_counts=(1, 2, 4),
        batch_size=batch_size,
        steps=40,
        **choices,
    )
    assert comparison.passed, comparison.table()
    return max(outcome.differences.max() for outcome in comparison.outcomes)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("name", "batch_size"), [("convnet", 61), ("resnet18", 10)])
def test_alike_in_float64(name, batch_size, optimizer):
    """Batch norm over the global batch, dropout."""
    assert largest_difference(name, batch_size, optimizer, precision="float64") < 1e-6


def test_alike_in_float32():
    assert largest_difference("convnet", 61) < 1e-4


def test_batch_norm_of_each_replica():
    """The backends agree with one another on each number of devices."""
    assert largest_difference("convnet", 61, batch_norm="replica") < 1e-4


def of_squares():
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def samples():
    x = np.random.RandomState(0).uniform(size=(20, 4)).astype("float32")
    return x, x.sum(1, keepdims=True)


def test_plain_losses_are_those_of_keras():
    """Of each step, over the end of an epoch, whose last batch is smaller."""
    import keras

    backend = keras.backend.backend()
    found = plain_losses(Job(build_model=of_squares, data=samples, steps=5, batch_size=8), backend)
    keras.utils.set_random_seed(0)
    data, model, expected = samples(), of_squares(), []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: expected.append(logs["loss"]))
    model.fit(*data, batch_size=8, epochs=2, verbose=0, callbacks=[note])
    epoch = np.average(found[:3], weights=[8, 8, 4])
    assert len(found) == 5
    np.testing.assert_allclose(epoch, expected[0], rtol=1e-5)


def with_a_step():
    import keras

    class Own(keras.Sequential):
        def train_step(self, *args):
            raise NotImplementedError

    model = Own([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_plain_losses_of_records_and_of_a_model_that_keras_cannot_train():
    import keras

    records = functools.partial(kerasdp.RecordSource, list(zip(*samples(), strict=False)), tuple)
    backend = keras.backend.backend()
    assert len(plain_losses(Job(build_model=of_squares, data=records, steps=5, batch_size=8), backend)) == 5
    with pytest.raises(kerasdp.RunError):
        plain_losses(Job(build_model=with_a_step, data=samples, steps=5, batch_size=8), backend)
