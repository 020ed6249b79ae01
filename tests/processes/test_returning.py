"""What `train` returns comes back from worker processes, or is saved in a file that is named."""

import re
import threading

import h5py
import keras
import numpy as np
import pytest

from kerasdp.errors import UserError
from kerasdp.processes.sending import SentResult
from tests.helpers import BACKENDS, PROGRAMS, all_but, result_of, run


@keras.saving.register_keras_serializable("tests")
class Scale(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.factor * x


class Model(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = Scale(), keras.layers.Dense(1, activation=own_activation)

    def call(self, x):
        return self.second(self.first(x))


class MadeHereAlone(Model):
    @classmethod
    def from_config(cls, config):
        raise KeyError("made here alone")


def own_activation(x):
    return 2 * x


def trained(kind=Model, loss="mse"):
    model = kind()
    model.compile("adam", loss)
    return model, model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=2, verbose=0)


@all_but("jax", "tensorflow")
def test_a_model_of_the_users_class_comes_back(backend, tmp_path):
    arguments = (PROGRAMS / "returned.py", backend, 2, tmp_path / "run", "whole")
    losses, after, num_updates = result_of(run(*arguments, backend=backend))
    assert losses[0] > losses[1] > after and num_updates == 4


@pytest.mark.skipif("torch" not in BACKENDS, reason="others train in the process that gets the result")
def test_what_was_trained_is_saved_if_it_cannot_be_sent(tmp_path):
    arguments = (PROGRAMS / "returned.py", "torch", 2, tmp_path / "run", "without_config")
    text = result_of(run(*arguments, backend="torch"))
    assert text.startswith("train returned a dict, which cannot be sent from a worker process (Object WithoutConfig")
    (weights,) = re.findall(re.escape(f"{tmp_path / 'run'}/returned-") + r"[^,;]+", text)
    with h5py.File(weights) as file:
        assert [file[f"dense/vars/{number}"].shape for number in range(2)] == [(8, 2), (2,)]


def test_functions_and_classes_within_a_model_come_with_it():
    def own_loss(targets, outputs):
        return keras.ops.mean(keras.ops.abs(targets - outputs), axis=-1)

    model, history = trained(loss=own_loss)
    found, again = SentResult((model, history)).received()
    assert type(found) is Model and found.loss.__code__ == own_loss.__code__
    for ours, theirs in zip(model.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert again.history == history.history and again.model is None and history.model is model


def test_a_function_within_a_functional_model_comes_with_it():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation=own_activation)])
    assert SentResult(model).received().layers[0].activation is own_activation


def test_classes_of_one_name_are_not_taken_for_each_other(tmp_path):
    def another():
        class Scale(keras.layers.Layer):
            def call(self, x):
                return -x

        return Scale

    model = keras.Sequential([keras.Input((2,)), another()(), another()(), keras.layers.Dense(1)])
    with pytest.raises(UserError, match="two classes or functions have the name Scale.*weights.h5"):
        SentResult(model, str(tmp_path))


def test_a_model_that_cannot_be_made_in_the_callers_process_is_saved_there(tmp_path):
    model, history = trained(MadeHereAlone)
    with pytest.raises(UserError, match="cannot be unpickled in this process .*made here alone") as refused:
        SentResult([history, model], str(tmp_path)).received()
    (weights,) = re.findall(re.escape(str(tmp_path)) + r"[^,;]+", str(refused.value))
    other, _ = trained()
    other.load_weights(weights)
    np.testing.assert_array_equal(other.get_weights()[0], model.get_weights()[0])


def test_where_the_folder_cannot_be_written_the_temporary_one_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, _ = trained()
    with pytest.raises(UserError, match=re.escape(f"the trained model is saved in {tmp_path}/returned-")):
        SentResult([model, threading.Lock()], str(tmp_path / "missing"))


def test_a_result_that_cannot_be_sent_is_named(tmp_path):
    with pytest.raises(UserError, match="train returned a lock, which cannot be sent from a worker process"):
        SentResult(threading.Lock(), str(tmp_path))
    assert not list(tmp_path.iterdir())
