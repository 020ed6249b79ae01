"""Data that a model cannot learn from: one line before the first step, the same on each backend."""

import re

import pytest

from tests.helpers import PROGRAMS, result_of, run

LABELS = "targets: expected whole numbers from 0 to {} as labels, because the model has {} outputs. Received: "
OUTPUTS = LABELS.format(2, 3)
FEWER = LABELS.format(1, 2) + "2 (sample {}); use at least 3 outputs in the last layer, or correct the labels"
NAN = "expected finite numbers. Received: {} in sample {}; replace the value, or remove the sample"
LENGTHS = "expected arrays with the same nonzero number of samples. Received: "
SPLIT = "validation_split: expected at least one sample for training and one for validation. Received: the fraction "
NUMBERS = "expected an array, or a structure of arrays. Received: list of Python numbers; use numpy.array(x)"
TEXT = "expected numbers. Received: strings ({}), which only tensorflow models accept; convert strings first, with a "
TEXT += "StringLookup or TextVectorization layer: lookup(text) for an array, ds.map(lambda text, y: (lookup(text), y)) "
TEXT += "for tf.data"
REFUSED = {
    "label too large": OUTPUTS + "3 (sample 7); use at least 4 outputs in the last layer, or correct the labels",
    "label negative": OUTPUTS + "-1 (sample 7); correct the labels, or pass ignore_class=-1 to the loss",
    "label of a fraction": OUTPUTS + "0.5 (sample 7); correct the labels",
    "fewer outputs": FEWER.format(2),
    "fewer outputs of an own model": FEWER.format(2),
    "fewer outputs in time": FEWER.format(0),
    "text in lists": "x: " + TEXT.format("<U1"),
    "lists": "x: " + NUMBERS,
    "other lengths": LENGTHS + "24 in x, 23 in y",
    "empty": LENGTHS + "0 in x, 0 in y",
    "nothing": "x: expected arrays, or an object that yields batches. Received: NoneType",
    "an empty generator": "x: expected at least one batch. Received: none from the tuple_iterator; pass more data",
    "validation with a wrong label": f"validation data: {OUTPUTS}5 (sample 2); use at least 6 outputs in the last "
    "layer, or correct the labels",
    "split too large": SPLIT + "0.99 of 24 samples",
    "NaN in targets": "targets: " + NAN.format("nan", 21),
    "not compiled": "m is not compiled: call model.compile(...) first",
    "weights of another length": LENGTHS + "24 in x, 24 in y, 23 in sample_weight",
    "weights that are NaN": "sample_weight: " + NAN.format("nan", 3),
    "weight of an unknown class": "class_weight: expected class indices of y as keys, from 0. Received: 7",
    "weight of a class by name": "class_weight: expected class indices of y as keys, from 0. Received: '0'",
}
# What Keras refuses, or the backend in Keras' functions, each in its own words.
OF_KERAS = (
    "one-hot under sparse", "sparse under one-hot", "shape of targets", "rank of targets", "no targets",
    "targets of one output", "a target is missing", "shape of inputs", "too many inputs", "too few inputs",
    "an input is missing", "validation of another shape", "weights of another shape",
)  # fmt: skip
# Strings are for tensorflow alone.
STRINGS = {"labels as text": "targets: " + TEXT.format("<U1"), "text in inputs": "inputs: " + TEXT.format("|S8")}
LOSS = "the loss became {} at step {} (epoch 1) with learning rate 0.1; try a lower learning_rate, or check the data "
LOSS += "for NaN"
# What is said when there is more to know, which is after some steps, or besides training.
LATER = {
    "NaN in inputs": f"NonFiniteLossError: {LOSS.format('nan', 1)}",
    "NaN in later inputs": f"NonFiniteLossError: {LOSS.format('nan', 3)}",
    "infinite inputs": f"NonFiniteLossError: {LOSS.format('nan', 2)}",
    "a learning rate too high": f"NonFiniteLossError: {LOSS.format('inf', 1)}",
    "a later batch": f"UserError: batch 3: {OUTPUTS}9 (sample 17); use at least 10 outputs in the last layer, or "
    "correct the labels",
}
TRAINED = (
    "targets repeated",
    "label ignored",
    "labels as floats",
    "weight of a class without samples",
    "batch larger than the data",
)


def expected(case):
    """The answer; the steps of a run that starts are no matter of the words."""
    if case in REFUSED:
        return "UserError: " + REFUSED[case]
    return LATER.get(case, "trains")


def answers_of(backend, count):
    return result_of(run(PROGRAMS / "wrong_data.py", backend, count, backend=backend))


@pytest.mark.short("torch")
def test_the_answer_is_the_same_everywhere(backend):
    """And comes before the first step, or after some; each case of the program is judged."""
    answers = answers_of(backend, 1)
    assert answers.keys() - {"text to look up"} == {*REFUSED, *OF_KERAS, *STRINGS, *LATER, *TRAINED}
    assert ("text to look up" in answers) == (backend == "tensorflow")
    require_expected(backend, answers)
    for case, (_, steps) in answers.items():
        assert (steps == 0) == (case in (*REFUSED, *OF_KERAS, *STRINGS)), case
    assert answers["batch larger than the data"][1] == 1


def require_expected(backend, answers):
    for case, (answer, _) in answers.items():
        if case in OF_KERAS or (case in STRINGS and backend == "tensorflow"):
            # On several devices the model is tried on a few samples, which says so around the backend's words.
            assert answer.startswith(("of Keras, or of the backend: ", "UserError: m fails on 4 samples")), case
        elif case in STRINGS:
            assert answer == "UserError: " + STRINGS[case]
        else:
            assert answer == expected(case), case


@pytest.mark.proof
def test_several_devices_answer_the_same(backend):
    require_expected(backend, answers_of(backend, 2))


@pytest.mark.proof
def test_what_one_device_sees_ends_the_run(backend):
    """A later batch: each process has its own rows alone. One that catches the error leaves the others waiting."""
    done = run(PROGRAMS / "wrong_data.py", backend, 2, "a later batch", backend=backend)
    if backend == "torch":
        assert done.returncode == 1 and re.search(r"rank 0 is at .*, rank 1 is at .*: no progress for", done.stderr)
    else:
        assert result_of(done)["a later batch"][0] == expected("a later batch")


UNSCALED = """
import keras
import numpy as np
import kerasdp

def train(runner):
    random = np.random.RandomState(0)
    x, y = random.randint(0, 256, (128, 8, 8, 1)).astype("uint8"), random.randint(0, 10, 128)
    first = {"scaled": [keras.layers.Rescaling(1 / 255)], "own": [Own()], "unscaled": [], "floats": []}
    for name, layers in first.items():
        layers = [*layers, keras.layers.Flatten(), keras.layers.Dense(64), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((8, 8, 1)), *layers], name=name)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        given = x.astype("float32") * 100 if name == "floats" else x
        model.fit(given, y, batch_size=64, epochs=1, steps_per_epoch=1, verbose=0)

class Own(keras.layers.Layer):
    def call(self, x):
        return keras.ops.cast(x, "float32") / 255

kerasdp.launch(train, num_devices=1, device="cpu", verbose=0)
"""


@pytest.mark.short("jax")
def test_images_that_nothing_scales_are_named(backend):
    done = run("-c", UNSCALED, KERAS_BACKEND=backend)
    lines = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    unscaled = (
        "warning: unscaled: the images have values from 0 to 255, and no layer scales them; start the model with "
        "keras.layers.Rescaling(1 / 255)"
    )
    assert lines and lines[0] == unscaled, done.stderr
    far = r"warning: the first loss is \d+(\.\d+)?, but random guesses have a loss of 2\.3"
    assert all(re.match(far, line) for line in lines[1:])
    assert len(lines) == 3


WITHOUT_EFFECT = """
import sys
import keras
import numpy as np
import kerasdp

keras.utils.set_random_seed(7)

def train(runner):
    x = np.ones((16, 4), "float32")
    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for batch in runner.batches(x, batch_size=8, epochs=1):
        pass
    for seed in (3, 8):
        keras.utils.set_random_seed(seed)
        model.fit(x, x[:, :1], batch_size=8, verbose=0)

kerasdp.launch(train, num_devices=1, device="cpu", verbose=0, seed=3, workdir=sys.argv[1])
"""


@pytest.mark.short("jax")
def test_a_seed_without_effect_and_a_loop_that_is_not_saved_are_named(backend, tmp_path):
    done = run("-c", WITHOUT_EFFECT, tmp_path / "run", KERAS_BACKEND=backend)
    assert [line for line in done.stderr.splitlines() if line.startswith("warning: ")] == [
        "warning: keras.utils.set_random_seed(7) does not set the seed of the run; use seed=7",
        "warning: this loop saves no checkpoints and no logs; call runner.checkpoint before it",
        "warning: keras.utils.set_random_seed(8) does not set the seed of the run; use seed=8",
    ], done.stderr
