"""recipes/predict.py, evaluate.py and export.py: any model on any backend and number of devices, each sample once."""

import functools
import json
import re

import keras
import numpy as np
import pytest

from tests.helpers import BACKENDS, run
from tests.recipes.test_recipes import NINE, assert_one_line_and_exit_code_2, some_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a function of a backend, which gives the workdir of a run of the convnet, model.keras in it."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def workdir(backend):
        path = folder / backend
        flags = ("--device=cpu", "--model=convnet", "--optimizer=adam", "--max_steps=3", f"--workdir={path}")
        done = run("recipes/train.py", f"--backend={backend}", *flags, backend=backend)
        assert done.returncode == 0, done.stderr
        return path

    return workdir


DATA = """
import numpy as np
def load():
    both = tuple(np.load(__file__.replace("data.py", "both.npz")).values())
    return both, both
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """37 images, so batches of 16, 16 and 5, and the name of the function that loads them."""
    folder = tmp_path_factory.mktemp("images")
    x = np.random.RandomState(0).randint(0, 256, (37, 28, 28, 1)).astype("uint8")
    np.savez(folder / "both.npz", x=x, y=np.arange(37) % 10)
    (folder / "data.py").write_text(DATA)
    return x, f"--dataset={folder}/data.py:load"


def use(recipe, *flags, backend, **settings):
    return run(f"recipes/{recipe}.py", f"--backend={backend}", "--device=cpu", *flags, backend=backend, **settings)


@pytest.mark.parametrize("source", some_of([(name,) for name in BACKENDS], [(BACKENDS[0],)]))
@pytest.mark.parametrize(("backend", "count"), some_of(NINE, [(BACKENDS[-1], 2)]))
def test_predictions_are_the_same_everywhere(source, backend, count, trained, images, tmp_path):
    """Of a checkpoint of each backend, beside plain Keras in this process, which has the file of the run."""
    x, data = images
    flags = (f"--gpus={count}", "--batch_size=16", data, f"--output={tmp_path}/all.npy")
    done = use("predict", f"--checkpoint={trained(source)}", *flags, f"--workdir={tmp_path}/run", backend=backend)
    assert done.returncode == 0, done.stderr
    expected = keras.saving.load_model(trained(source) / "model.keras", compile=False).predict(x, verbose=0)
    assert expected.std(axis=0).max() > 1e-4  # the images' rows differ, so their order is seen
    np.testing.assert_allclose(np.load(tmp_path / "all.npy"), expected, rtol=0, atol=1e-5)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    first, last = done.stdout.splitlines()[-2:]
    assert re.fullmatch(r"37 held-out samples of .*data.py:load \| .*", first)
    assert re.fullmatch(rf"{backend} on {count} virtual CPU devices? .*; predictions in {tmp_path}/all.npy", last)


@pytest.mark.parametrize(("backend", "count"), some_of(NINE, [(BACKENDS[0], 1)]))
def test_an_evaluation_counts_each_sample_once(backend, count, trained, tmp_path):
    """On the held-out digits, on which the run was evaluated, too."""
    workdir = trained(BACKENDS[0])
    done = use("evaluate", f"--gpus={count}", f"--checkpoint={workdir}", f"--workdir={tmp_path}", backend=backend)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "evaluation.json").read_text())
    at_the_end = json.loads((workdir / "report.json").read_text())["final"]
    assert found["loss"] == pytest.approx(at_the_end["val_loss"], abs=1e-5)
    assert found["accuracy"] == pytest.approx(at_the_end["val_accuracy"], abs=1e-6)
    line = f"accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f} | 360 held-out samples of digits | "
    assert done.stdout.startswith(line)


@pytest.mark.proof
def test_wrong_use_is_one_line(trained, tmp_path):
    model = f"--checkpoint={trained(BACKENDS[0])}"
    for recipe, flags, words in [
        ("predict", [f"--checkpoint={tmp_path}/nowhere"], "load_model: there is no file or folder"),
        ("export", [model, f"--to={tmp_path}"], "exists already; remove it, or choose another name"),
    ]:
        workdir = [] if recipe == "export" else [f"--workdir={tmp_path}/run"]
        assert_one_line_and_exit_code_2(use(recipe, *flags, *workdir, backend=BACKENDS[0]), words)
    flags = (model, "--dataset=synthetic(shape=(28,30,1))", f"--workdir={tmp_path}/run")
    wide = use("predict", *flags, backend=BACKENDS[0])
    assert wide.returncode == 1 and "is incompatible with the layer" in wide.stderr  # Keras' own error
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


@pytest.mark.proof
def test_a_saved_model(backend, trained, tmp_path):
    """Written by TensorFlow; another backend says in a line why it does not."""
    flags = (f"--checkpoint={trained(BACKENDS[0])}", f"--to={tmp_path}/saved")
    done = use("export", *flags, backend=backend)
    if backend == "tensorflow":
        assert done.returncode == 0 and (tmp_path / "saved" / "saved_model.pb").exists(), done.stderr
    elif done.returncode != 0:
        assert done.returncode == 2 and re.search(f"error: --to: Keras cannot write .*saved' on {backend}", done.stderr)
