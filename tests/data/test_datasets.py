"""The named data sets, from real and from made files."""

import gzip
import hashlib
import io

import keras
import numpy as np
import pytest
from PIL import Image

from kerasdp.data.datasets import load_data
from kerasdp.data.sources import ArraySource, read_image, weights_of_classes
from kerasdp.errors import UserError
from tests.helpers import make_images, run, some_images


def test_digits():
    data = load_data("digits")
    assert (data.input_shape, data.num_classes) == ((28, 28, 1), 10)
    assert (data.train.num_samples, data.test.num_samples) == (1437, 360)
    train, test = data.train.inputs(np.arange(1437)), data.test.inputs(np.arange(360))
    assert train.dtype == "uint8"
    assert (train.min(), train.max()) == (0, 255)
    seen = {image.tobytes() for image in train}
    assert not any(image.tobytes() in seen for image in test)
    # As they have always been, so that the figures on the pages hold.
    digest = hashlib.sha256(train.tobytes() + data.train.targets(np.arange(1437))[0].tobytes()).hexdigest()
    assert digest == "dc2223bd78fbaece90f53411d17010cbc23ecf0addefa6809bb314ff36974fa3"


def test_synthetic_of_any_shape():
    data = load_data("synthetic(shape=(8, 6, 3), num_classes=7, num_samples=5, num_test_samples=2)")
    assert (data.input_shape, data.num_classes) == ((8, 6, 3), 7)
    assert data.train.inputs(np.arange(5)).shape == (5, 8, 6, 3)
    with pytest.raises(UserError, match="does not take these arguments"):
        load_data("synthetic(colour=3)")
    with pytest.raises(UserError, match="--data_dir has no effect"):
        load_data("synthetic", "somewhere")


def write_fashion_mnist(folder, num_train, num_test):
    """Random images in the four files that Keras downloads."""
    folder.mkdir(parents=True)
    for split, count in (("train", num_train), ("t10k", num_test)):
        images, labels = some_images(count, 28, 28)
        with gzip.open(folder / f"{split}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + images.tobytes())
        with gzip.open(folder / f"{split}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + labels.astype("uint8").tobytes())


@pytest.mark.parametrize("place", ["datasets/fashion-mnist", "package"])
def test_files_that_are_there_need_no_network(tmp_path, place):
    """Where Keras keeps its own, or of a package of the system."""
    write_fashion_mnist(tmp_path / place, 6, 3)
    code = (
        "from kerasdp.config import Config\nfrom kerasdp.data import datasets\n"
        f"datasets.DEBIAN_FASHION_MNIST = {str(tmp_path / 'package')!r}\n"
        "data = datasets.load_data('fashion_mnist')\n"
        "print(data.input_shape, data.train.num_samples, data.test.num_samples)"
    )
    assert run("-c", code, KERAS_HOME=str(tmp_path)).stdout.strip() == "(28, 28, 1) 6 3"


def test_what_keras_downloads(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(keras.datasets.mnist, "load_data", lambda: (some_images(6, 28, 28), some_images(3, 28, 28)))
    data = load_data("mnist")
    assert data.input_shape == (28, 28, 1)
    assert data.train.targets(np.arange(6))[0].tolist() == some_images(6, 28, 28)[1].tolist()

    def fail():
        raise Exception("URL fetch failure")  # as Keras raises it

    monkeypatch.setattr(keras.datasets.mnist, "load_data", fail)
    with pytest.raises(UserError, match="mnist could not be loaded .* or use --dataset=digits"):
        load_data("mnist")


def test_a_folder_of_images(tmp_path):
    make_images(tmp_path, {"cat": 6, "dog": 4})
    data = load_data("images(size=(8, 8))", str(tmp_path))
    assert (data.input_shape, data.num_classes) == ((8, 8, 3), 2)
    assert (data.train.num_samples, data.test.num_samples) == (8, 2)
    images = data.train.inputs(np.array([0, 3]))
    assert (images.shape, images.dtype) == ((2, 8, 8, 3), "uint8")
    assert set(data.train.records).isdisjoint(data.test.records)
    for path, label in data.train.records:
        assert ("cat", "dog")[label] in path


def test_folders_for_training_and_test(tmp_path):
    make_images(tmp_path / "train", {"cat": 3, "dog": 2, "eel": 1})
    make_images(tmp_path / "val", {"dog": 2, "eel": 1})
    data = load_data("images(size=(4, 4), channels=1)", str(tmp_path))
    assert data.num_classes == 3
    assert data.test.targets(np.arange(3))[0].tolist() == [1, 1, 2]
    assert data.test.inputs(np.arange(3)).shape == (3, 4, 4, 1)


def test_a_folder_without_images(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "notes.txt").touch()
    for folder, words in ((tmp_path, "expected images in"), (tmp_path / "none", "does not exist")):
        with pytest.raises(UserError, match=words):
            load_data("images", str(folder))
    with pytest.raises(UserError, match="add --data_dir"):
        load_data("images")


def bomb():
    """A picture of 400 million pixels in a few bytes."""
    picture = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(picture, "png")
    return picture.getvalue()


@pytest.mark.parametrize("kind", ["bomb.png", "broken.ppm", "half.gif"])
def test_an_image_that_cannot_be_read_is_one_line(kind, tmp_path):
    content = {"bomb.png": bomb(), "broken.ppm": b"P6 3 x 255\n", "half.gif": b"GIF89a\1"}[kind]
    path = tmp_path / kind
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{kind}: cannot read it as an image") as caught:
        read_image(str(path), (8, 8), 3)
    assert "\n" not in str(caught.value)


def test_the_users_own_data(tmp_path):
    file = tmp_path / "own_data.py"
    file.write_text(
        "import numpy as np\n"
        "def load(count=3):\n"
        "    return (np.zeros((count, 2)), np.arange(count)), (np.zeros((1, 2)), np.zeros((1, 1), int))\n"
        "def wrong():\n    return 3\n"
        "def fractions():\n    return (np.zeros((2, 2)), np.array([0.0, 0.5])), (np.zeros((1, 2)), np.zeros(1, int))\n"
    )
    data = load_data(f"{file}:load(count=5)")
    assert (data.input_shape, data.num_classes) == ((2,), 5)
    for name in ("wrong", "fractions"):
        with pytest.raises(UserError, match="must return .* arrays with integer labels"):
            load_data(f"{file}:{name}")


@pytest.mark.parametrize("floatx", ["float32", "float64"])
def test_numbers_come_in_the_float_type_of_keras(floatx):
    """As from Keras' own adapter of arrays: also those of 16 bits, and in a run of float64 those of 32."""
    import keras
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    before = keras.config.floatx()
    keras.config.set_floatx(floatx)
    try:
        bfloat16 = pytest.importorskip("ml_dtypes").bfloat16  # comes with jax
        kinds = ("float16", "float32", "float64", "int8", bfloat16)
        arrays = [np.arange(6).reshape(3, 2).astype(kind) for kind in kinds]
        x, y, weight = dict(enumerate(arrays)), arrays[0], arrays[1][:, 0]
        source, rows = ArraySource(x, y, weight), np.arange(3)
        found = source.inputs(rows), *source.targets(rows)
        expected = next(ArrayDataAdapter(x, y, sample_weight=weight, batch_size=3).get_numpy_iterator())
    finally:
        keras.config.set_floatx(before)
    types = [[leaf.dtype for leaf in keras.tree.flatten(each)] for each in (found, expected)]
    assert types[0] == types[1] and types[0][0] == floatx


def test_what_is_an_array_for_others_is_named():
    class RaggedTensor:
        shape = (3, None)

    sparse = pytest.importorskip("scipy.sparse")  # comes with jax
    for given, name in ((RaggedTensor(), "RaggedTensor"), (sparse.csr_matrix(np.eye(3)), "csr_matrix")):
        with pytest.raises(UserError, match=f"expected arrays. Received: {name}, which NumPy cannot convert"):
            ArraySource(given)


def test_weights_of_classes():
    """A class may have no sample; scikit-learn gives floats, those of labels that are floats."""
    weights = {0: 2.0, 1.0: 3.0, np.int64(7): 4.0}
    np.testing.assert_array_equal(weights_of_classes(np.array([0, 1, 2]), weights), [2, 3, 1])
    np.testing.assert_array_equal(weights_of_classes(np.eye(2), {0: 2.0, 1: 3.0}), [2, 3])
    for targets, label in ((np.eye(3), 3), (np.arange(3), -1), (np.arange(3), 0.5), (np.arange(3), "0")):
        with pytest.raises(UserError, match="class_weight: expected class indices of y as keys, from 0"):
            weights_of_classes(targets, {label: 1.0})
