"""Models that preprocess raw data get it whole, or one line says what is wrong with it."""

import keras
import numpy as np
import pytest

from kerasdp.errors import UserError
from kerasdp.step.contract import SingleProcess
from kerasdp.training.model_calls import preprocess_all


class Lengths(keras.Model):
    """Makes a number of each text, as a tokenizer would."""

    def preprocess_samples(self, x, y=None, sample_weight=None):
        return keras.utils.pack_x_y_sample_weight(np.array([len(text) for text in x]), y, sample_weight)


TEXTS, LABELS = ["a", "bb", "ccc"], np.arange(3)


def test_all_data_is_preprocessed():
    found = preprocess_all(
        Lengths(), {"x": TEXTS, "y": LABELS, "validation_data": (TEXTS[:2], LABELS[:2])}, SingleProcess()
    )
    assert found["x"].tolist() == [1, 2, 3]
    assert [part.tolist() for part in found["validation_data"]] == [[1, 2], [0, 1]]


EXPECTED = "expected arrays with equally many samples, at least one. Received: "


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, EXPECTED + "no array"),
        ({"x": None, "y": LABELS}, EXPECTED + "3 in y"),
        ({"x": []}, EXPECTED + "0 in x"),
        ({"x": [], "y": []}, EXPECTED + "0 in x, 0 in y"),
        ({"x": np.array([], str), "y": LABELS[:0]}, EXPECTED + "0 in x, 0 in y"),
        ({"x": TEXTS, "y": LABELS[:2]}, EXPECTED + "3 in x, 2 in y"),
        ({"x": (TEXTS, TEXTS[:2]), "y": LABELS}, EXPECTED + "2 and 3 in x, 3 in y"),
        ({"x": TEXTS, "y": LABELS, "validation_data": ([], [])}, f"validation data: {EXPECTED}0 in x, 0 in y"),
        ({"x": iter(TEXTS)}, "with Lengths, which preprocesses its data: expected lists or arrays. Received: list_it"),
    ],
)
def test_data_that_cannot_be_preprocessed(arguments, words):
    with pytest.raises(UserError) as caught:
        preprocess_all(Lengths(), arguments, SingleProcess())
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
