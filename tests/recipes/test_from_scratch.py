"""The lesson: data parallelism by hand learns what recipes/train.py learns, on one device and on several; its page."""

import importlib.util
import json
import re
import sys

import keras
import numpy as np
import pytest
from absl import flags

from kerasdp.errors import UserError
from tests.helpers import BACKENDS, ROOT, losses_in, run
from tests.recipes.test_recipes import NINE, assert_one_line_and_exit_code_2

# 1,437 digits in twice 15 batches of 96, the last one of 93, which divides neither by two nor by four.
DIGITS = ("--dataset=digits", "--batch_size=96", "--epochs=2", "--learning_rate=0.03")


OF_RECIPES = {"batch_size", "epochs", "learning_rate", "model", "dataset"}
PAGE = (ROOT / "docs" / "from-scratch.md").read_text()


def module_in(folder, name):
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lesson():
    """The recipe as a module. Of the flags that another recipe has defined in this process it defines its own."""
    for name in OF_RECIPES & set(flags.FLAGS):
        delattr(flags.FLAGS, name)
    return module_in("recipes", "from_scratch")


def follow(*flags, backend, **settings):
    return run("recipes/from_scratch.py", f"--backend={backend}", "--device=cpu", *flags, backend=backend, **settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The losses of recipes/train.py with LeNet as it was published, and its accuracy."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    flags = (
        "--device=cpu",
        "--model=lenet(activation='relu')",
        "--optimizer=sgd",
        "--log_every=1",
        f"--workdir={workdir}",
    )
    done = run("recipes/train.py", f"--backend={BACKENDS[0]}", *flags, *DIGITS, backend=BACKENDS[0])
    assert done.returncode == 0, done.stderr
    return losses_in(workdir), json.loads((workdir / "report.json").read_text())["final"]["val_accuracy"]


@pytest.mark.proof
@pytest.mark.parametrize(("backend", "count"), NINE)
def test_the_losses_of_the_main_recipe(backend, count, trained, tmp_path):
    done = follow(f"--gpus={count}", *DIGITS, f"--workdir={tmp_path}", backend=backend)
    assert done.returncode == 0, done.stderr
    losses, accuracy = trained
    assert len(losses) == 30 and losses[-1] < 0.95 * losses[0]
    np.testing.assert_allclose(losses_in(tmp_path), losses, rtol=0, atol=1e-5)
    if count > 1:
        assert "allreduce: [[3.0, 3.0]] [[3.0, 3.0]]\nsplit_and_load: (2, 4) (2, 4)\n" in done.stdout
    size, others = 4 * 129_068, count - 1
    first, *rest = map(int, re.search(r"allreduce \[(.*?)\]", done.stdout)[1].split(", "))
    assert (first, rest) == (size * others, [size] * others)
    in_ring = list(map(int, re.search(r"ring \[(.*?)\]", done.stdout)[1].split(", ")))
    assert in_ring == [2 * size * others // count] * count
    found = float(re.search(r"^epoch 2: .*test accuracy ([\d.]+)$", done.stdout, re.M)[1])
    assert found == pytest.approx(accuracy, abs=0.006)  # 2 of 360 images


def test_a_batch_that_does_not_divide(tmp_path):
    flags = ("--gpus=2", "--dataset=synthetic(num_samples=9)", "--batch_size=3", f"--workdir={tmp_path}")
    done = follow(*flags, backend=BACKENDS[0])
    assert_one_line_and_exit_code_2(done, "--batch_size: expected a multiple of 2, the number of devices. Received: 3")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_sums_by_way_of_the_first_and_in_a_ring(lesson, count):
    devices = ["cpu:0"] * count
    vectors = np.random.RandomState(0).rand(count, 11).astype("float32")  # 11 numbers: pieces of unequal length
    placed = [lesson.copy_to(*pair) for pair in zip(devices, vectors, strict=True)]
    around, sent = lesson.ring_allreduce(placed, devices)
    for summed in (*lesson.allreduce(placed, devices), *around):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(summed), vectors.sum(axis=0), rtol=1e-6)
    assert sum(sent) == 2 * (count - 1) * 11  # each piece is sent so often, by one device or another
    assert max(sent) <= 2 * (count - 1) * -(-11 // count)


def test_shards_of_a_batch(lesson):
    halves = lesson.split_and_load(np.arange(16.0).reshape(4, 4), ["cpu:0", "cpu:0"])
    assert [keras.ops.convert_to_numpy(half).tolist() for half in halves] == [
        np.arange(8.0).reshape(2, 4).tolist(), np.arange(8.0, 16.0).reshape(2, 4).tolist(),
    ]  # fmt: skip
    with pytest.raises(UserError, match="expected a multiple of 3, the number of devices. Received: 4 samples"):
        lesson.split_and_load(np.zeros((4, 4)), ["cpu:0"] * 3)


@pytest.mark.proof
def test_the_answers_of_the_exercises(lesson, monkeypatch):
    """They run one after the other, as a reader runs them; each checks itself."""
    monkeypatch.setitem(sys.modules, "from_scratch", lesson)
    setup, *answers = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    assert len(answers) == len(re.findall(r"^\*\*\d\. ", PAGE, re.M)) == PAGE.count("<details>") == 6
    exec(compile(setup, "setup", "exec"), names := {})
    for number, answer in enumerate(answers, 1):
        assert "\nassert " in answer or "    assert " in answer
        exec(compile(answer, f"answer {number}", "exec"), dict(names))


def test_the_picture_of_the_ring(lesson):
    """It is what its program draws: after half of the steps one sum is ready on each device, in the end all are."""
    ring = module_in("docs", "ring")
    assert (ROOT / "docs" / "ring.svg").read_text() == ring.drawing()
    found, count = list(ring.states()), ring.COUNT
    everybody = set(range(count))
    assert sum(piece == everybody for own in found[count - 1][0] for piece in own) == count
    assert all(piece == everybody for own in found[-1][0] for piece in own)
    _, sent = lesson.ring_allreduce([np.ones(count)] * count, ["cpu:0"] * count)
    assert sent == [len(found) - 1] * count  # a piece a step
