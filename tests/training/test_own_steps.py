"""Models with a `train_step` of their own train on several devices as on one.

The step is one for all backends, by `kerasdp.value_and_grad`, or in the form of each backend's guide.
"""

import json

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, all_but, assert_alike, each_way, result_of, results, run

ALIKE = ("steps_of_keras", "as_in_the_guide", "gan", "vae", "neighbours", "clipped")
# On jax the whole batch is one program: nothing has to be refused there.
REFUSED = {
    "queue": "train_step of Queue computes different values for a split batch than for the whole batch, "
    "first in the value of queue/seen",
    "foreign_numbers": "each time for the same batch. With random numbers that are not from keras.random, all devices",
    "largest_output": "than for the whole batch, first in the change of metric maximum/value",
    "float8": "the train_step of Sum on several devices: expected no float8 variables, because ",
    "not_built": "has no weights yet, and not_built has no call() to make them",
}
NOT_ON_JAX = ("foreign_numbers", "largest_output", "clipped")  # in another form there
USUAL = (BACKENDS[0], 2)
# In the default suite.
SHORT = ("steps_of_keras", "gan", "neighbours", "queue", "foreign_numbers", "not_built", "spare_optimizer")


def outcome(backend, count, case):
    """What a case gave. On torch the cases of the default suite share one process, and the proofs another."""
    others = [name for name in (*ALIKE, *REFUSED) if name not in SHORT]
    names = (case,) if backend != "torch" else SHORT if case in SHORT else others
    return results("own_steps.py", backend, count, *names)[case]


def is_there(backend, count, case):
    return backend != "jax" or case not in NOT_ON_JAX


def is_usual(backend, count, case):
    return (backend, count) == USUAL and case in SHORT


@each_way(ALIKE, is_usual, is_there=is_there)
def test_trains_as_on_one_device(backend, count, case):
    """In float64: losses and metrics of each step, the last batch uneven, evaluation, predictions and weights."""
    # torch's function clips to a little less than TensorFlow's: each is compared with itself.
    expected = outcome(backend if case == "clipped" else BACKENDS[0], 1, case)
    received = outcome(backend, count, case)
    if backend == "jax" and case in ("gan", "neighbours"):  # where the model holds the optimizers' variables, too
        expected, received = ({**result, "weights": []} for result in (expected, received))
    assert len(expected["steps"]) == 12
    assert_alike(received, expected)


@pytest.mark.proof
@pytest.mark.parametrize("count", [1, 2, 4])
def test_in_the_form_of_each_backend(backend, count):
    """The same steps by `backward`, a GradientTape, or as functions of a state."""
    cases = ("vae",) if backend == "jax" else tuple(case for case in ALIKE if case != "clipped")
    received = results("own_steps.py", backend, count, *cases, OWN_STEPS="native")
    for case in cases:
        assert_alike(received[case], outcome(BACKENDS[0], 1, case), name=case)


@each_way(REFUSED, is_usual, is_there=is_there)
def test_refused(backend, count, case):
    """What would train something else says so before the first step; one device and jax train it."""
    received, words = outcome(backend, count, case), REFUSED[case]
    if count > 1 and backend != "jax" or case == "not_built":
        assert words in received
    else:
        assert not isinstance(received, str), received


# Where a training is stopped, and where it is resumed.
MOVES = (("torch", 1, "tensorflow", 2), ("tensorflow", 1, "jax", 1), ("jax", 2, "torch", 2), ("torch", 2, "torch", 1))


@pytest.mark.parametrize(
    ("move", "case"),
    [
        pytest.param(move, case, marks=[pytest.mark.proof] * ((move, case) != (MOVES[-1], "gan")))
        for move in MOVES
        for case in ("gan", "neighbours")
        if {move[0], move[2]} <= set(BACKENDS)
    ],
)
def test_resumes_with_all_its_optimizers(move, case, tmp_path):
    """Stopped within the second epoch, and resumed elsewhere, by optimizers that `compile` knows nothing of."""
    workdir = {"workdir": str(tmp_path / "run")}
    results("own_steps.py", *move[:2], case, json.dumps(workdir | {"max_steps": 6}))
    received = results("own_steps.py", *move[2:], case, json.dumps(workdir | {"resume": True}))[case]
    expected = outcome(BACKENDS[0], 1, case)
    if "jax" in move:  # where the model holds the optimizers' variables, too
        expected, received = ({**result, "weights": []} for result in (expected, received))
    assert_alike(received, expected)


@all_but("jax", "tensorflow")
def test_an_optimizer_that_no_checkpoint_can_hold(backend, tmp_path):
    """Without checkpoints it trains."""
    settings = json.dumps({"workdir": str(tmp_path)})
    words = results("own_steps.py", backend, 1, "spare_optimizer", settings)["spare_optimizer"]
    assert "spare.0 of sum is an optimizer that the first step does not use" in words
    assert isinstance(outcome(backend, 1, "spare_optimizer"), dict)


@pytest.mark.skipif("torch" not in BACKENDS, reason="one program elsewhere, or slower")
def test_what_each_device_keeps_for_itself_ends_the_run_after_its_first_step(tmp_path):
    settings = json.dumps({"check": "off", "workdir": str(tmp_path), "log_every": 1, "checkpoint_every": "never"})
    done = run(PROGRAMS / "own_steps.py", "torch", 2, "queue", settings, backend="torch")
    assert done.returncode and "hold different values in 1 variables, first in queue/seen" in done.stderr
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) <= 1


@each_way(["unchanged"], lambda backend, count, case: (backend, count) == (BACKENDS[0], 1), (1, 2))
def test_steps_that_tell_their_loss_alone_and_those_that_change_nothing(backend, count, case):
    """The loss of an epoch is the mean of its batches, of which one is smaller; what changes no weight is warned of."""
    done = run(PROGRAMS / "unchanged.py", backend, count, backend=backend)
    found = result_of(done)
    for received in found.values():
        means = np.reshape(received["batches"], (3, -1)).mean(1)
        np.testing.assert_allclose(received["history"]["loss"], means, rtol=1e-12)
        np.testing.assert_allclose(received["history"]["val_loss"][-1], np.mean(received["validated"]), rtol=1e-12)
    assert len(set(found["trains"]["history"]["val_loss"])) == 3
    assert len(set(found["flat"]["history"]["val_loss"])) == 1
    warned = [line.split(": ")[1] for line in done.stderr.splitlines() if "no weight has changed" in line]
    assert warned == ["flat", "all_frozen", "zero_step"]


@pytest.mark.proof
def test_the_loss_of_a_resumed_epoch_is_that_of_all_its_batches(backend, tmp_path):
    """Stopped after two of the three batches of the second epoch."""
    expected = result_of(run(PROGRAMS / "unchanged.py", backend, 1, "{}", backend=backend))["trains"]["history"]
    for choices in ({"max_steps": 5}, {"resume": True}):
        settings = json.dumps({"workdir": str(tmp_path), **choices})
        received = result_of(run(PROGRAMS / "unchanged.py", backend, 1, settings, backend=backend))["trains"]["history"]
    np.testing.assert_allclose(received["loss"], expected["loss"], rtol=1e-12)
