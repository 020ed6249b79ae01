"""Data that a model cannot learn from: one line before the first step, the same on each backend."""

import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run

OUTPUTS = "targets: expected labels from 0 to 2, since the model has 3 outputs. Received: "
FEWER = "targets: expected labels from 0 to 1, since the model has 2 outputs. Received: 2 (sample {}); give the last "
FEWER += "layer 3 outputs or more, or correct the labels"
NAN = "expected finite numbers. Received: {} in sample {}; replace it, or leave the sample out"
LENGTHS = "expected arrays with equally many samples, at least one. Received: "
SPLIT = "validation_split: expected a share that leaves some of the 24 samples on both sides. Received: "
NUMBERS = "expected an array, or a structure of arrays. Received: list of plain numbers; use numpy.array(x)"
TEXT = "expected numbers. Received: strings ({}), of which a model makes numbers with tensorflow alone; look them up "
TEXT += (
    "in the data: ds.map(lambda text, y: (lookup(text), y)) of tf.data, or lookup(text) of an array before fit, where "
)
TEXT += "lookup is a StringLookup or TextVectorization layer"
SPARSE = "sparse_categorical_crossentropy"
REFUSED = {
    "label too large": OUTPUTS + "3 (sample 7); give the last layer 4 outputs or more, or correct the labels",
    "label negative": OUTPUTS + "-1 (sample 7); correct the labels, or give the loss ignore_class=-1",
    "label of a fraction": f"targets: expected whole numbers as labels for {SPARSE}. Received: 0.5 (sample 7)",
    "labels as text": "targets: expected numbers. Received: <U1; encode classes as 0, 1, ...",
    "fewer outputs": FEWER.format(2),
    "fewer outputs of an own model": FEWER.format(2),
    "fewer outputs in time": FEWER.format(0),
    "one-hot under sparse": f"targets: expected shape (samples,) for {SPARSE}, one label for 3 outputs. Received: "
    "(samples, 3); use categorical_crossentropy for one-hot labels, or y.argmax(-1)",
    "sparse under one-hot": "targets: expected shape (samples, 3) for categorical_crossentropy, one-hot labels. "
    f"Received: (samples,); use {SPARSE}, or keras.utils.to_categorical(y)",
    "shape of targets": "targets: expected shape (samples, 3), that of the outputs. Received: (samples, 2)",
    "rank of targets": "targets: expected shape (samples, 3), that of the outputs. Received: (samples,)",
    "no targets": "targets of m: expected an array, since it has a loss. Received: none",
    "targets of one output": "targets of m: expected 2 arrays, one an output. Received: 1",
    "a target is missing": "targets of m: expected head, other. Received: head, othre; add other",
    "shape of inputs": "inputs of m: expected shape (samples, 4). Received: (samples, 3)",
    "text in inputs": "inputs: " + TEXT.format("|S8"),
    "text in lists": "x: " + TEXT.format("<U1"),
    "too many inputs": "inputs of m: expected 1 array. Received: 2",
    "too few inputs": "inputs of m: expected 2 arrays (a, b). Received: 1",
    "an input is missing": "inputs of m: expected a, b. Received: a, c; add b",
    "lists": "x: " + NUMBERS,
    "other lengths": LENGTHS + "24 in x, 23 in y",
    "empty": LENGTHS + "0 in x, 0 in y",
    "nothing": "x: expected arrays, or an object that gives batches. Received: NoneType",
    "an empty generator": "x: expected at least one batch. Received: none from the tuple_iterator",
    "validation of another shape": "validation data: inputs of m: expected shape (samples, 4). Received: (samples, 2)",
    "validation with a wrong label": f"validation data: {OUTPUTS}5 (sample 2); give the last layer 6 outputs or more, "
    "or correct the labels",
    "split too large": SPLIT + "0.99",
    "NaN in inputs": "inputs: " + NAN.format("nan", 5),
    "NaN in targets": "targets: " + NAN.format("nan", 21),
    "probabilities as logits": f"layer head of m gives probabilities (softmax), but the loss {SPARSE} has "
    "from_logits=True: leave out one of the two",
    "not compiled": "m is not compiled: call model.compile(...) first",
    "weights of another shape": "sample_weight: expected shape (samples,), that of the loss of each sample. Received: "
    "(samples, 3)",
    "weights of another length": LENGTHS + "24 in x, 24 in y, 23 in sample_weight",
    "weights that are NaN": "sample_weight: " + NAN.format("nan", 3),
    "weight of an unknown class": "class_weight: expected classes of y, whole numbers from 0 to 2. Received: 7",
    "weight of a class by name": "class_weight: expected classes of y, whole numbers from 0 on. Received: '0'",
}
LOSS = "the loss became {} at step {} (epoch 1) with learning rate 0.1; "
# What is said when there is more to know, which is after some steps, or besides training.
LATER = {
    "NaN in later inputs": f"NonFiniteLossError: {LOSS.format('nan', 3)}inputs: {NAN.format('nan', 21)}",
    "infinite inputs": f"NonFiniteLossError: {LOSS.format('nan', 2)}inputs: {NAN.format('inf', 12)}",
    "a learning rate too high": f"NonFiniteLossError: {LOSS.format('inf', 1)}try a lower learning_rate",
    "a later batch": f"UserError: batch 3: {OUTPUTS}9 (sample 17); give the last layer 10 outputs or more, or correct "
    "the labels",
}
WARNED = {
    "logits as probabilities": f"layer head of m has no activation, but the loss {SPARSE} expects probabilities: add "
    "from_logits=True to the loss, or softmax or sigmoid to the layer",
}
TRAINED = (
    "targets repeated",
    "label ignored",
    "labels as floats",
    "weight of a class without samples",
    "batch larger than the data",
)


def expected(case):
    """The answer, the steps before it, and warnings; the steps of a run that starts are no matter of the words."""
    if case in REFUSED:
        return ["UserError: " + REFUSED[case]]
    if case in LATER:
        return [LATER[case]]
    return ["trains", *([WARNED[case]] if case in WARNED else [])]


LARGE = "the global batch of 100 samples is larger than the data, 24 samples: each pass over them is one update"


def answers_of(backend, count):
    """Of all cases; what is only said is said once, however many processes there are."""
    done = run(PROGRAMS / "wrong_data.py", backend, count, backend=backend)
    assert done.stderr.count(f"warning: {LARGE}\n") == 1, done.stderr
    return result_of(done)


@pytest.mark.short("torch")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_answer_is_the_same_everywhere(backend):
    """And comes before the first step, or after some; each case of the program is judged."""
    answers = answers_of(backend, 1)
    assert answers.keys() - {"text to look up"} == {*REFUSED, *LATER, *WARNED, *TRAINED}
    assert ("text to look up" in answers) == (backend == "tensorflow")
    for case, (answer, steps, *warned) in answers.items():
        assert [answer, *warned] == expected(case), case
        assert (steps == 0) == (case in REFUSED), case
    assert answers["batch larger than the data"][1] == 1


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
def test_several_devices_answer_the_same(backend):
    answers = answers_of(backend, 2)
    assert {case: answer[0] for case, answer in answers.items()} == {case: expected(case)[0] for case in answers}


@pytest.mark.proof
def test_what_one_device_sees_ends_the_run(backend):
    """A later batch: each process has its own rows alone."""
    done = run(PROGRAMS / "wrong_data.py", backend, 2, "a later batch", backend=backend)
    if backend == "torch":
        words = f"by UserError: batch 3: {OUTPUTS}9 (sample 17); give the last layer 10 outputs or more"
        assert done.returncode == 1 and words in done.stderr
    else:
        assert result_of(done)["a later batch"][0] == expected("a later batch")[0]
