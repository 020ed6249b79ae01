"""Whatever gives batches: each device count and backend trains on the same ones, in the same order, resumed or not."""

import json
import sys

import keras
import numpy as np
import pytest

import kerasdp
from tests.helpers import PROGRAMS, assert_same, result_of, run

sys.path.insert(0, str(PROGRAMS))
from iterators import EPOCHS, KINDS, expected_losses

PAIRS = [(("torch", 2), ("jax", 2)), (("tensorflow", 2), ("torch", 1)), (("jax", 1), ("torch", 2)),
         (("torch", 2), ("tensorflow", 1))]  # fmt: skip
# The run itself says in which order it reads these.
IN_ORDER_OF_THE_RUN = ("py_dataset", "py_dataset_with_threads", "hugging_face")


def train(way, folder, *names, **settings):
    backend, count = way
    fields = {"backend": backend, "num_devices": count, "workdir": str(folder)} | settings
    done = run(PROGRAMS / "iterators.py", json.dumps(fields), *names, backend=backend)
    return result_of(done)


def expected(name):
    keras.utils.set_random_seed(0)  # of TensorFlow, too
    return expected_losses(next(make for make in KINDS if make.__name__ == name))


def assert_trained_as_read(stopped, resumed, folder, names):
    """Stopped within the second epoch (or, of the longer ones, at its begin), and resumed."""
    train(stopped, folder, *names, max_steps=6)
    found = train(resumed, folder, *names, resume=True)
    for name in names:
        if name not in IN_ORDER_OF_THE_RUN:
            assert_same(expected(name), found[name], 1e-9)
        assert len(found[name]) >= 3 * EPOCHS


class Endless:
    """As a tf.data.Dataset that is repeated."""

    def cardinality(self):
        return -1

    def __iter__(self):
        while True:
            yield np.ones((4, 3)), np.ones((4, 1))


def test_what_has_no_end_is_read_in_steps():
    def train(runner):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with pytest.raises(kerasdp.UserError, match="is infinite; add steps_per_epoch"):
            runner.fit(model, Endless(), verbose=0)
        runner.fit(model, Endless(), epochs=2, steps_per_epoch=3, verbose=0)
        return int(model.optimizer.iterations)

    assert kerasdp.launch(train, backend=keras.backend.backend(), device="cpu", verbose=0) == 6


class Tens(keras.utils.PyDataset):
    """Batch `i` of five has the loss `10**i`, of a model that gives 0."""

    def __len__(self):
        return 5

    def __getitem__(self, number):
        return np.ones((4, 3)), np.full((4, 1), 10.0 ** (number / 2))


class Stream:
    """The same, one after the other."""

    def __iter__(self):
        yield from map(Tens().__getitem__, range(5))


def test_validation_steps_are_the_first_batches_each_time(tmp_path):
    """Also after a resume; a generator goes on there."""

    def train(runner):
        found = []
        for data, steps in ((Stream(), 3), (Tens(), 3), (Tens(), 7), (iter([*Stream()] * 3), 3)):
            outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((3,)), outputs])
            model.compile(keras.optimizers.SGD(0.0), "mse")
            choices = {"epochs": 6, "validation_data": data, "validation_steps": steps, "validation_freq": 2}
            history = runner.fit(model, np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0, **choices).history
            found.append([round(value) for value in history["val_loss"]])
        return found

    fields = {"backend": keras.backend.backend(), "device": "cpu", "verbose": 0, "workdir": str(tmp_path)}
    assert kerasdp.launch(train, **fields, max_steps=5) == [[37], [37], [2222], [37]]
    assert kerasdp.launch(train, **fields, resume=True) == [[37] * 3, [37] * 3, [2222] * 3, [37, 3667, 370]]


@pytest.mark.proof
@pytest.mark.parametrize("stopped, resumed", PAIRS, ids=str)
def test_all_kinds(stopped, resumed, tmp_path):
    names = [make.__name__ for make in KINDS]
    assert_trained_as_read(stopped, resumed, tmp_path / "resumed", names)


@pytest.mark.proof
def test_one_device_or_two(backend, tmp_path):
    names = [make.__name__ for make in KINDS]
    one = train((backend, 1), tmp_path / "one", *names)
    two = train((backend, 2), tmp_path / "two", *names)
    assert_same(one, two, 1e-9)
    for name in names:
        if name not in IN_ORDER_OF_THE_RUN:
            assert_same(expected(name), one[name], 1e-9)
    np.testing.assert_allclose(one["py_dataset"], one["py_dataset_with_threads"], rtol=0, atol=1e-9)
