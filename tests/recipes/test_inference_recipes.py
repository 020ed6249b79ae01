"""recipes/predict.py and recipes/evaluate.py: any model on any backend and number of devices, each sample once."""

import csv
import functools
import json
import re
import shutil

import keras
import numpy as np
import pytest

from tests.helpers import BACKENDS, ROOT, make_images, run
from tests.recipes.test_recipes import NINE, assert_one_line_and_exit_code_2, some_of

# Batches of 16, 16 and 5.
NUM_SAMPLES = 37


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a function of a backend, which gives the workdir of a run of the convnet, model.keras in it."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def workdir(backend):
        path = folder / backend
        flags = ("--device=cpu", "--model=convnet", "--optimizer=adam", "--max_steps=3", f"--workdir={path}")
        done = run("recipes/train.py", f"--backend={backend}", *flags, f"--export={path}/model.keras", backend=backend)
        assert done.returncode == 0, done.stderr
        return path

    return workdir


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Images in an .npy file, labels beside them in an .npz."""
    folder = tmp_path_factory.mktemp("images")
    x = np.random.RandomState(0).randint(0, 256, (NUM_SAMPLES, 28, 28, 1)).astype("uint8")
    np.save(folder / "x.npy", x)
    np.savez(folder / "both.npz", x=x, y=np.arange(NUM_SAMPLES) % 10)
    return folder


def expected_of(workdir, x):
    """Plain Keras, in this process: probabilities."""
    model = keras.saving.load_model(workdir / "model.keras", compile=False)
    return keras.ops.convert_to_numpy(keras.ops.softmax(model.predict(x, verbose=0)))


def use(recipe, *flags, backend, **settings):
    return run(f"recipes/{recipe}.py", f"--backend={backend}", "--device=cpu", *flags, backend=backend, **settings)


@pytest.mark.parametrize("source", some_of([(name,) for name in BACKENDS], [(BACKENDS[0],)]))
@pytest.mark.parametrize(("backend", "count"), some_of(NINE, [(BACKENDS[-1], 2)]))
def test_predictions_are_the_same_everywhere(source, backend, count, trained, images, tmp_path):
    flags = (f"--gpus={count}", "--batch_size=16", f"--inputs={images}/x.npy", f"--output={tmp_path}/all.npy")
    done = use("predict", f"--checkpoint={trained(source)}", *flags, f"--workdir={tmp_path}/run", backend=backend)
    assert done.returncode == 0, done.stderr
    expected = expected_of(trained(source), np.load(images / "x.npy"))
    assert expected.std(axis=0).max() > 1e-4  # the images' rows differ, so their order is seen
    np.testing.assert_allclose(np.load(tmp_path / "all.npy"), expected, rtol=0, atol=1e-5)
    assert not (tmp_path / "run").exists()  # nothing is left in it
    first, last = done.stdout.splitlines()[-2:]
    assert re.fullmatch(r"37 samples .*x.npy. \| softmax of the outputs \| .*/step-0*3.safetensors", first)
    assert re.fullmatch(rf"{backend} on {count} virtual CPU devices? .*; predictions in {tmp_path}/all.npy", last)


@pytest.mark.parametrize(("backend", "count"), some_of(NINE, [(BACKENDS[0], 1)]))
def test_an_evaluation_counts_each_sample_once(backend, count, trained, tmp_path):
    """On the held-out digits, since the run was trained on digits."""
    workdir = trained(BACKENDS[0])
    flags = (f"--gpus={count}", f"--checkpoint={workdir}", f"--workdir={tmp_path}")
    done = use("evaluate", *flags, backend=backend)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "evaluation.json").read_text())
    at_the_end = json.loads((workdir / "report.json").read_text())["final"]
    assert found["loss"] == pytest.approx(at_the_end["val_loss"], abs=1e-5)
    assert found["accuracy"] == pytest.approx(at_the_end["val_accuracy"], abs=1e-6)
    with open(tmp_path / "confusion.csv", newline="") as file:
        matrix = np.array([list(map(int, row[1:])) for row in list(csv.reader(file))[1:]])
    assert matrix.sum() == found["num_samples"] == 360
    assert matrix.trace() == pytest.approx(360 * found["accuracy"], abs=1e-3)
    assert (tmp_path / "confusion.png").stat().st_size > 10_000
    assert done.stdout.startswith(f"accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f} | 360 samples (digits,")


@pytest.mark.proof
def test_wrong_use_is_one_line(trained, images, tmp_path):
    model = f"--checkpoint={trained(BACKENDS[0])}"
    np.save(tmp_path / "wide.npy", np.zeros((4, 28, 30, 1), "uint8"))
    np.savez(tmp_path / "eleven.npz", x=np.zeros((4, 28, 28, 1), "uint8"), y=np.array([0, 1, 10, 2]))
    for recipe, flags, words in [
        ("predict", [f"--checkpoint={tmp_path}/nowhere"], "--checkpoint: there is no file or folder"),
        ("predict", [model, f"--inputs={tmp_path}/wide.npy"], r"expected shape .samples, 28, 28, 1.. Received"),
        ("evaluate", [model, f"--inputs={tmp_path}/eleven.npz"], "expected labels from 0 to 9, .* Received: 10"),
        ("evaluate", [model, f"--inputs={images}/x.npy"], "an evaluation needs labels"),
    ]:
        done = use(recipe, *flags, f"--workdir={tmp_path}/run", backend=BACKENDS[0])
        assert_one_line_and_exit_code_2(done, words)
    assert not (tmp_path / "run").exists()


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_keras_file_and_a_folder_of_images(backend, trained, tmp_path):
    """The file of another backend; images of three classes of ten, so that the others have empty folders."""
    make_images(tmp_path / "photos", {str(label): 3 if label < 3 else 0 for label in range(10)}, size=(28, 28))
    model = f"--checkpoint={trained(BACKENDS[BACKENDS.index(backend) - 1])}/model.keras"
    flags = (model, f"--inputs={tmp_path}/photos", "--gpus=2", f"--workdir={tmp_path}/run")
    done = use("evaluate", *flags, backend=backend)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["num_samples"] == 9
    done = use("predict", *flags, f"--output={tmp_path}/all.parquet", backend=backend)
    assert done.returncode == 0, done.stderr
    table = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "all.parquet").to_pydict()
    assert table["sample"] == [f"{label}/{number}.png" for label in range(3) for number in range(3)]


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", ["from_scratch", "evaluate", "predict"])
def test_a_copy_in_an_empty_folder(recipe, backend, trained, tmp_path):
    shutil.copy(ROOT / "recipes" / f"{recipe}.py", tmp_path)
    flags = [f"--checkpoint={trained(backend)}"]
    if recipe == "from_scratch":
        flags = ["--dataset=synthetic(num_samples=32)", "--batch_size=16", "--epochs=1"]
    flags += [f"--backend={backend}", "--device=cpu", "--gpus=2"]
    done = run(f"{recipe}.py", *flags, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    (workdir,) = (tmp_path / "runs").iterdir()
    left = {"from_scratch": "steps.jsonl", "evaluate": "confusion.png", "predict": "predictions.csv"}
    assert (workdir / left[recipe]).exists()
