"""Data in many forms, in its order; predictions and evaluations in files."""

import csv
import json

import keras
import numpy as np
import pytest
from PIL import Image

from kerasdp.config import Request
from kerasdp.errors import UserError
from kerasdp.inference import (
    Samples,
    Trained,
    confusion_matrix,
    open_samples,
    probabilities,
    write_evaluation,
    write_predictions,
)
from tests.helpers import make_images


def trained_on(shape=(8, 6, 3), kind="softmax", applied=True, dataset=None):
    """A model for images, which gives four outputs."""
    model = keras.Sequential([keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(4)])
    return Trained(model=model, path="m.keras", dataset=dataset, data_dir=None, kind=kind, applied=applied)


def opened(path, trained=None):
    return open_samples(Request(checkpoint="m.keras", inputs=str(path)), trained or trained_on())


def test_images_with_and_without_folders_of_classes(tmp_path):
    make_images(tmp_path / "classes", {"dog": 3, "cat": 11})
    samples = opened(tmp_path / "classes")
    assert samples.class_names == ["cat", "dog"] and samples.labels.tolist() == [0] * 11 + [1] * 3
    assert samples.names[:3] == ["cat/0.png", "cat/1.png", "cat/10.png"]  # in the order of their names
    pixels = samples.source.inputs(np.arange(14))
    assert pixels.shape == (14, 8, 6, 3) and pixels[:3, 0, 0, 0].tolist() == [5, 15, 105]
    samples = opened(tmp_path / "classes" / "dog")
    assert (samples.names, samples.labels, samples.class_names) == (["0.png", "1.png", "2.png"], None, None)
    samples = opened(tmp_path / "classes" / "dog" / "1.png")
    assert samples.names == ["1.png"] and samples.source.num_samples == 1


def test_arrays(tmp_path):
    x, y = np.arange(24.0).reshape(4, 6), np.array([0, 3, 2, 1])
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "both.npz", x=x, y=y[:, None])
    np.savez(tmp_path / "named.npz", left=x, right=2 * x)
    samples = opened(tmp_path / "x.npy")
    assert (samples.names, samples.labels) == ([0, 1, 2, 3], None)
    samples = opened(tmp_path / "both.npz")
    assert samples.labels.tolist() == y.tolist()
    np.testing.assert_array_equal(samples.source.inputs(np.array([2])), x[2:3])
    assert sorted(opened(tmp_path / "named.npz").source.inputs(np.array([0]))) == ["left", "right"]


def test_the_data_set_of_the_run():
    samples = open_samples(Request(checkpoint="runs/mine"), trained_on((28, 28, 1), dataset="digits"))
    assert (samples.source.num_samples, len(samples.labels), samples.names[:2]) == (360, 360, [0, 1])
    with pytest.raises(UserError, match="does not say what it was trained on: add --inputs or --dataset"):
        open_samples(Request(checkpoint="m.keras"), trained_on())


def test_data_that_cannot_be_used(tmp_path):
    (tmp_path / "text.npy").write_text("no array")
    np.savez(tmp_path / "words.npz", x=np.zeros((2, 3)), y=np.array(["a", "b"]))
    np.savez(tmp_path / "uneven.npz", x=np.zeros((2, 3)), y=np.zeros(3, int))
    (tmp_path / "empty").mkdir()
    make_images(tmp_path / "mixed", {"cat": 1})
    Image.new("RGB", (4, 4)).save(tmp_path / "mixed" / "one.png")
    (tmp_path / "notes.txt").write_text("")
    for name, words in [
        ("text.npy", "text.npy cannot be read as arrays"),
        ("words.npz", "expected whole numbers of shape .samples,. as y"),
        ("uneven.npz", "expected arrays with equally many samples"),
        ("empty", "expected images"),
        ("mixed", "expected images or sub-folders, one per class. Received: .* with both"),
        ("notes.txt", "--inputs: expected .npy, .npz, a folder of images, or an image"),
    ]:
        with pytest.raises(UserError, match=words):
            opened(tmp_path / name)
    with pytest.raises(UserError, match="images need a model with inputs .height, width, channels."):
        opened(tmp_path / "mixed" / "one.png", trained_on((7,)))


def test_logits_become_probabilities():
    logits = np.array([[0.0, np.log(3.0)], [1000.0, 0.0]], "float32")
    softmax = probabilities(logits, trained_on(kind="softmax"))
    np.testing.assert_allclose(softmax, [[0.25, 0.75], [1, 0]], atol=1e-7)
    assert softmax.dtype == "float32"
    sigmoid = probabilities(np.array([[-1000.0, 0.0, np.log(3.0)]]), trained_on(kind="sigmoid"))
    np.testing.assert_allclose(sigmoid, [[0, 0.5, 0.75]], atol=1e-7)
    assert probabilities(logits, trained_on(applied=False)) is logits
    with pytest.raises(UserError, match="expected one output. Received: a list of several"):
        probabilities([logits, logits], trained_on())


@pytest.fixture
def four_samples():
    return Samples(source=None, names=["a.png", "b.png", "c.png", "d.png"], title="four", labels=np.array([0, 1, 1, 2]))


OUTPUTS = np.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [1 / 3, 1 / 3, 0.34]], "float32")


def test_names_of_files_are_no_formulas(tmp_path):
    """As a spreadsheet would take them: https://owasp.org/www-community/attacks/CSV_Injection."""
    names = [
        "=cmd|' /C calc'!A0.png",
        "+1.png",
        "-1.png",
        "@SUM(A1).png",
        "\t=1.png",
        "\r=1.png",
        "a,=1.png",
        "\udcff.png",
    ]
    samples = Samples(source=None, names=names, title="eight", labels=np.arange(8) % 2, class_names=["=a", "b"])
    outputs = np.tile(np.array([[-0.7, 0.2]], "float32"), (8, 1))
    write_predictions(path := str(tmp_path / "all.csv"), outputs, samples, trained_on(kind="none"))
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["sample"] for row in rows] == [f"'{name}" for name in names[:6]] + ["a,=1.png", "\\udcff.png"]
    assert float(rows[0]["output_0"]) == np.float32(-0.7)  # numbers stay numbers
    write_evaluation(str(tmp_path), {}, confusion_matrix(samples, outputs), samples)
    with open(tmp_path / "confusion.csv", newline="") as file:
        assert [row[0] for row in csv.reader(file)] == ["label", "'=a", "b"]


def test_files_of_predictions(four_samples, tmp_path):
    paths = [str(tmp_path / "new" / f"all{ending}") for ending in (".npy", ".csv", ".parquet")]
    for path in paths:
        write_predictions(path, OUTPUTS, four_samples, trained_on())
    np.testing.assert_array_equal(np.load(paths[0]), OUTPUTS)
    with open(paths[1], newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ["sample", "class", "probability", "probability_0", "probability_1", "probability_2"]
    assert list(rows[0]) == columns
    assert [(row["sample"], row["class"]) for row in rows] == [
        ("a.png", "0"), ("b.png", "0"), ("c.png", "1"), ("d.png", "2"),
    ]  # fmt: skip
    np.testing.assert_array_equal([np.float32(row["probability_1"]) for row in rows], OUTPUTS[:, 1])  # bit by bit
    parquet = pytest.importorskip("pyarrow.parquet").read_table(paths[2]).to_pydict()
    assert list(parquet) == columns and parquet["sample"] == four_samples.names
    np.testing.assert_array_equal(np.float32(parquet["probability"]), OUTPUTS.max(axis=1))
    write_predictions(paths[1], OUTPUTS, four_samples, trained_on(kind="none"))
    with open(paths[1]) as file:
        assert file.readline() == "sample,output_0,output_1,output_2\n"
    with pytest.raises(UserError, match="expected one row of outputs a sample"):
        write_predictions(paths[1], OUTPUTS[..., None], four_samples, trained_on())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output: cannot write"):
        write_predictions(str(tmp_path / "file" / "all.csv"), OUTPUTS, four_samples, trained_on())


def test_an_evaluation(four_samples, tmp_path):
    matrix = confusion_matrix(four_samples, OUTPUTS)
    assert matrix.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]  # b.png, of class 1, is taken for a 0
    paths = write_evaluation(str(tmp_path), {"loss": 0.5, "accuracy": 0.75}, matrix, four_samples, backend="jax")
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert (content["num_samples"], content["accuracy"], content["backend"]) == (4, 0.75, "jax")
    assert content["classes"]["1"] == {"samples": 2, "accuracy": 0.5}
    assert (tmp_path / "confusion.csv").read_text().split() == ["label,0,1,2", "0,1,0,0", "1,1,1,0", "2,0,0,1"]
    with Image.open(paths["confusion.png"]) as picture:
        assert min(picture.size) > 400


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": None}, "an evaluation needs labels. Received: four without"),
        (
            {"labels": np.array([0, 1, 1, 3])},
            "four: expected labels from 0 to 2, the classes of the model. Received: 3",
        ),
        (
            {"class_names": ["cat", "dog"]},
            "expected 3 sub-folders in four, one for each class of the model. Received: 2",
        ),
    ],
)
def test_samples_that_cannot_be_evaluated(changes, words, four_samples):
    fields = {name: getattr(four_samples, name) for name in ("source", "names", "title", "labels")} | changes
    with pytest.raises(UserError, match=words):
        confusion_matrix(Samples(**fields), OUTPUTS)
