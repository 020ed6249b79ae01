"""Loads the built-in data sets. Images are uint8 from 0 to 255: that is how they travel to the device.

IDX is the format of MNIST and Fashion-MNIST (http://yann.lecun.com/exdb/mnist).
"""

import contextlib
import dataclasses
import fcntl
import functools
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.config import Config, choices
from kerasdp.data.sampling import epoch_order
from kerasdp.data.sources import ArraySource, RecordSource, Source, list_images, read_image
from kerasdp.errors import UserError

# Where Debian and Ubuntu put the package dataset-fashion-mnist.
DEBIAN_FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
Arrays = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set for classification.

    Args:
        train: samples to learn from.
        test: held-out samples.
        input_shape: shape of one input, without the batch axis.
        num_classes: labels are 0 to num_classes - 1.
    """

    train: Source
    test: Source
    input_shape: tuple[int, ...]
    num_classes: int


def load_data(config: Config) -> Dataset:
    """Loads `config.dataset`.

    Raises:
        UserError: if there is no such data set, or its files are missing, damaged or out of range.
    """
    data = _load(config)
    data.train.name = data.test.name = config.dataset  # by which pictures of the run are headed
    return data


def _load(config: Config) -> Dataset:
    name, arguments = choices.parse(config.dataset, "dataset")
    if ":" in name:  # of the user
        _refuse_data_dir(name, config.data_dir)
        function = choices.load_user_function(name, "dataset")
        return from_arrays(function(**arguments), config.dataset)
    try:
        return DATASETS[name](config.data_dir, **arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError) or not arguments:
            raise
        raise UserError(f"--dataset: {name} does not take these arguments: {arguments} ({error})") from error


def from_arrays(arrays: Arrays, name: str, num_classes: int | None = None) -> Dataset:
    """Makes a `Dataset` of `(x_train, y_train), (x_test, y_test)`.

    Args:
        arrays: inputs of shape `(samples, ...)`, labels of shape `(samples,)` or `(samples, 1)`.
        name: the data set's name, for the error message.
        num_classes: None: one more than the largest label of the training data.

    Raises:
        UserError: if the labels are not whole numbers; `fit` looks whether they are classes.
    """
    try:
        (x_train, y_train), (x_test, y_test) = arrays
        y_train, y_test = (
            np.asarray(y).reshape(len(y)).astype("int32", casting="same_kind") for y in (y_train, y_test)
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"--dataset: {name} must return (x_train, y_train), (x_test, y_test) arrays, with whole numbers as labels: "
            f"{error}"
        ) from error
    return Dataset(
        train=ArraySource(x_train, y_train),
        test=ArraySource(x_test, y_test),
        input_shape=tuple(np.shape(x_train)[1:]),
        num_classes=int(y_train.max(initial=-1)) + 1 if num_classes is None else num_classes,
    )


def digits(data_dir: str | None) -> Dataset:
    """Loads 1,797 real handwritten digits (Alpaydin and Kaynak 1998), which come with this package (digits.txt).

    Each of the 8x8 pixels becomes 3x3, with a border of 2: 28x28, like MNIST. 1,437 to learn from, 360 held out.
    """
    _refuse_data_dir("digits", data_dir)
    with np.load(os.path.join(os.path.dirname(__file__), "digits.npz")) as stored:
        images, labels = stored["images"], stored["labels"]
    images = np.rint(images * (255 / 16)).astype("uint8")
    images = np.pad(np.kron(images, np.ones((1, 3, 3), "uint8")), ((0, 0), (2, 2), (2, 2)))[..., None]
    order = epoch_order(len(images), seed=0, epoch=0)
    train, test = order[:1437], order[1437:]
    return from_arrays(((images[train], labels[train]), (images[test], labels[test])), "digits", num_classes=10)


def synthetic(
    data_dir: str | None,
    shape: tuple[int, ...] = (28, 28, 1),
    num_classes: int = 10,
    num_samples: int = 1024,
    num_test_samples: int = 256,
) -> Dataset:
    """Makes random images and labels of any shape and number: nothing to learn, something to measure."""
    _refuse_data_dir("synthetic", data_dir)
    random = np.random.RandomState(0)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.randint(0, 256, (count, *shape)).astype("uint8"), random.randint(0, num_classes, count)

    return from_arrays((draw(num_samples), draw(num_test_samples)), "synthetic", num_classes)


def images(data_dir: str | None, size: tuple[int, int] = (224, 224), channels: int = 3) -> Dataset:
    """Reads images, one sub-folder per class, in `train/` and `test/` (or `val/`); else holds out a fifth."""
    if data_dir is None:
        raise UserError("--dataset=images needs --data_dir: a folder with a sub-folder for each class")
    held_out = next((name for name in ("test", "val") if os.path.isdir(os.path.join(data_dir, name))), None)
    if held_out and os.path.isdir(os.path.join(data_dir, "train")):
        paths, labels, classes = list_images(os.path.join(data_dir, "train"))
        test_paths, test_labels, test_classes = list_images(os.path.join(data_dir, held_out))
        if not set(test_classes) <= set(classes):
            raise UserError(
                f"--data_dir: {held_out}/ has classes that train/ lacks: {set(test_classes) - set(classes)}"
            )
        test_labels = np.asarray([classes.index(name) for name in test_classes])[test_labels]
    else:
        paths, labels, classes = list_images(data_dir)
        order = epoch_order(len(paths), seed=0, epoch=0)
        cut = max(1, len(paths) // 5)
        test_paths, test_labels = [paths[index] for index in order[:cut]], labels[order[:cut]]
        paths, labels = [paths[index] for index in order[cut:]], labels[order[cut:]]

    def source(paths: list[str], labels: np.ndarray) -> Source:
        decode = functools.partial(_labelled_image, size=size, channels=channels)
        return RecordSource(list(zip(paths, labels.astype("int32"))), decode, num_threads=min(16, os.cpu_count() or 1))

    return Dataset(
        train=source(paths, labels),
        test=source(test_paths, test_labels),
        input_shape=(*size, channels),
        num_classes=len(classes),
    )


def _labelled_image(record: tuple[str, Any], size: tuple[int, int], channels: int) -> tuple[np.ndarray, Any]:
    path, label = record
    return read_image(path, size, channels), label


def published(name: str, data_dir: str | None) -> Dataset:
    """Loads a data set of `keras.datasets`, or of IDX files in a folder."""
    folder = data_dir
    if folder is None and name == "fashion_mnist" and os.path.isdir(DEBIAN_FASHION_MNIST):
        folder = DEBIAN_FASHION_MNIST
    if folder is not None:
        return from_arrays((read_idx_split(folder, "train"), read_idx_split(folder, "t10k")), name, num_classes=10)
    try:
        with one_download_at_a_time("datasets"):
            (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, name).load_data()
    except Exception as error:  # Keras raises bare Exception for a failed download
        raise UserError(
            f"--dataset: {name} could not be downloaded ({error}); put its IDX files into a folder and add "
            "--data_dir=FOLDER, or choose --dataset=digits, which needs no download"
        ) from error
    if x_train.ndim == 3:
        x_train, x_test = x_train[..., None], x_test[..., None]
    return from_arrays(((x_train, y_train), (x_test, y_test)), name, num_classes=10)


@contextlib.contextmanager
def one_download_at_a_time(kind: str) -> Iterator[None]:
    """Lets one process at a time download: Keras would let them all write one file at the same time.

    Args:
        kind: Keras' folder for it, `"datasets"` or `"models"`.
    """
    folder = os.path.join(os.environ.get("KERAS_HOME", os.path.expanduser("~/.keras")), kind)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".kerasdp.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _refuse_data_dir(name: str, data_dir: str | None) -> None:
    if data_dir is not None:
        raise UserError(f"--data_dir has no effect on --dataset={name}. Received: {data_dir!r}; leave it out")


DATASETS: dict[str, Callable[..., Any]] = {
    "digits": digits,
    **{name: functools.partial(published, name) for name in ("mnist", "fashion_mnist", "cifar10")},
    "synthetic": synthetic,
    "images": images,
}


def read_idx(path: str) -> np.ndarray:
    """Reads one IDX file of unsigned bytes, plain or gzipped.

    Raises:
        UserError: if the file is truncated, damaged or no IDX file.
    """
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            content = file.read()
        num_axes = content[3]
        if content[:3] != b"\0\0\x08":
            raise ValueError("it does not begin as one of unsigned bytes")
        shape = np.frombuffer(content, ">u4", num_axes, offset=4).tolist()
        return np.frombuffer(content, "uint8", offset=4 + 4 * num_axes).reshape(shape)
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: cannot be read as an IDX file ({reason}); fetch the file again") from error


def read_idx_split(folder: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads images and labels of `"train"` or `"t10k"` from the four files of MNIST's naming.

    Returns:
        Images, uint8, shape `(samples, height, width, channels)`, and labels, shape `(samples,)`.

    Raises:
        UserError: if a file is missing or damaged.
    """
    arrays = []
    for kinds in (("images-idx3-ubyte", "images-idx4-ubyte"), ("labels-idx1-ubyte",)):
        paths = [os.path.join(folder, f"{split}-{kind}{ending}") for kind in kinds for ending in ("", ".gz")]
        path = next(filter(os.path.isfile, paths), None)
        if path is None:
            raise UserError(f"--data_dir: expected {split}-{kinds[0]} (or with .gz) in {folder!r}; it is not there")
        arrays.append(read_idx(path))
    images, labels = arrays
    return images.reshape(images.shape if images.ndim == 4 else (*images.shape, 1)), labels
