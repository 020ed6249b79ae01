"""Loads the built-in data sets. Images are uint8 with values from 0 to 255, and are copied to the device as uint8."""

import contextlib
import dataclasses
import fcntl
import functools
import os
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.config import choices
from kerasdp.data.sampling import epoch_order
from kerasdp.data.sources import ArraySource, RecordSource, Source, list_images, read_image
from kerasdp.errors import UserError

# Where Debian and Ubuntu put the package dataset-fashion-mnist: the files that Keras downloads.
DEBIAN_FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
Arrays = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set for classification.

    Args:
        train: samples to train with, a `kerasdp.ArraySource` or a `kerasdp.RecordSource`.
        test: samples to test with.
        input_shape: shape of one input, without the batch axis.
        num_classes: number of classes; labels are 0 to `num_classes - 1`.

    Example:
        ```python
        import numpy as np
        import kerasdp

        x, y = np.random.randint(0, 256, (64, 28, 28, 1)).astype("uint8"), np.random.randint(0, 10, 64)
        data = kerasdp.Dataset(
            train=kerasdp.ArraySource(x[:48], y[:48]),
            test=kerasdp.ArraySource(x[48:], y[48:]),
            input_shape=(28, 28, 1),
            num_classes=10,
        )
        model = kerasdp.build_model("mlp", data.input_shape, data.num_classes)
        ```
    """

    train: Source
    test: Source
    input_shape: tuple[int, ...]
    num_classes: int


def load_data(name: str, data_dir: str | None = None) -> Dataset:
    """Loads a data set by its name.

    Images are uint8 with values from 0 to 255. Scale the images in the model.

    Args:
        name: name of the data set. `"digits"` is part of this package. Keras downloads `"fashion_mnist"`, `"mnist"` and
            `"cifar10"`. `"synthetic(shape=(28,28,1))"` makes random images. `"images(size=(64,64))"` reads a folder.
            `"my_data.py:load"` calls a custom function that returns `(x_train, y_train), (x_test, y_test)`.
        data_dir: the folder for `"images"`, with a sub-folder for each class.

    Returns:
        A `kerasdp.Dataset`.

    Raises:
        UserError: if the data set does not exist, or its files are missing or damaged.

    Example:
        ```python
        import kerasdp

        data = kerasdp.load_data("digits")
        print(data.train.num_samples, data.test.num_samples)  # 1437 360
        print(data.input_shape, data.num_classes)  # (28, 28, 1) 10
        ```
    """
    data = _load(name, data_dir)
    data.train.name = data.test.name = name  # for the titles of the run's pictures
    return data


def _load(text: str, data_dir: str | None) -> Dataset:
    name, arguments = choices.parse(text, "dataset")
    if name != "images" and data_dir is not None:
        raise UserError(f"--data_dir has no effect on --dataset={name}. Received: {data_dir!r}; remove it")
    if ":" in name:  # of the user
        function = choices.load_user_function(name, "dataset")
        return from_arrays(function(**arguments), text)
    if name not in DATASETS:
        raise UserError(f"--dataset: expected one of {', '.join(DATASETS)}, or file.py:function. Received: {name!r}")
    try:
        return images(data_dir, **arguments) if name == "images" else DATASETS[name](**arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError) or not arguments:
            raise
        raise UserError(f"--dataset: {name} does not take these arguments: {arguments} ({error}); fix them") from error


def from_arrays(arrays: Arrays, name: str, num_classes: int | None = None) -> Dataset:
    """Makes a `Dataset` from `(x_train, y_train), (x_test, y_test)`.

    Args:
        arrays: inputs of shape `(samples, ...)`, labels of shape `(samples,)` or `(samples, 1)`.
        name: name of the data set, for the error message.
        num_classes: number of classes; None: one more than the largest training label.

    Raises:
        UserError: if the labels are not integers. `fit` checks their range.
    """
    try:
        (x_train, y_train), (x_test, y_test) = arrays
        y_train, y_test = (
            np.asarray(y).reshape(len(y)).astype("int32", casting="same_kind") for y in (y_train, y_test)
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"--dataset: {name} must return (x_train, y_train), (x_test, y_test) arrays with integer labels: {error}"
        ) from error
    return Dataset(
        train=ArraySource(x_train, y_train),
        test=ArraySource(x_test, y_test),
        input_shape=tuple(np.shape(x_train)[1:]),
        num_classes=int(y_train.max(initial=-1)) + 1 if num_classes is None else num_classes,
    )


def digits() -> Dataset:
    """Loads 1,797 real handwritten digits (Alpaydin and Kaynak 1998), which are part of this package (see digits.txt).

    Enlarges each pixel of the 8x8 images to 3x3 pixels, and adds a border of 2 pixels. So the images have 28x28 pixels,
    the same size as in MNIST. 1,437 images are for training, 360 for testing.
    """
    with np.load(os.path.join(os.path.dirname(__file__), "digits.npz")) as stored:
        images, labels = stored["images"], stored["labels"]
    images = np.rint(images * (255 / 16)).astype("uint8")
    images = np.pad(np.kron(images, np.ones((1, 3, 3), "uint8")), ((0, 0), (2, 2), (2, 2)))[..., None]
    order = epoch_order(len(images), seed=0, epoch=0)
    train, test = order[:1437], order[1437:]
    return from_arrays(((images[train], labels[train]), (images[test], labels[test])), "digits", num_classes=10)


def synthetic(
    shape: tuple[int, ...] = (28, 28, 1), num_classes: int = 10, num_samples: int = 1024, num_test_samples: int = 256
) -> Dataset:
    """Makes random images and labels to measure speed. A model cannot learn anything from these random values."""
    random = np.random.RandomState(0)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.randint(0, 256, (count, *shape)).astype("uint8"), random.randint(0, num_classes, count)

    return from_arrays((draw(num_samples), draw(num_test_samples)), "synthetic", num_classes)


def images(data_dir: str | None, size: tuple[int, int] = (224, 224), channels: int = 3) -> Dataset:
    """Reads a folder of images that has one sub-folder for each class.

    If the folder contains `train/` and `test/` (or `val/`), these folders have the training and the test images.
    Otherwise, a fifth of the images becomes the test images.
    """
    if data_dir is None:
        raise UserError("--dataset=images needs a folder with a sub-folder for each class; add --data_dir")
    held_out = next((name for name in ("test", "val") if os.path.isdir(os.path.join(data_dir, name))), None)
    if held_out and os.path.isdir(os.path.join(data_dir, "train")):
        paths, labels, classes = list_images(os.path.join(data_dir, "train"))
        test_paths, test_labels, test_classes = list_images(os.path.join(data_dir, held_out))
        if not set(test_classes) <= set(classes):
            raise UserError(
                f"--data_dir: train/ lacks classes of {held_out}/: {set(test_classes) - set(classes)}; add them"
            )
        test_labels = np.asarray([classes.index(name) for name in test_classes])[test_labels]
    else:
        paths, labels, classes = list_images(data_dir)
        order = epoch_order(len(paths), seed=0, epoch=0)
        cut = max(1, len(paths) // 5)
        test_paths, test_labels = [paths[index] for index in order[:cut]], labels[order[:cut]]
        paths, labels = [paths[index] for index in order[cut:]], labels[order[cut:]]

    names = textwrap.shorten(", ".join(classes), 200, placeholder=" ...")
    print(f"{data_dir}: {len(paths)} images, and {len(test_paths)} held out, of {len(classes)} classes: {names}")

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


def published(name: str) -> Dataset:
    """Loads a data set from `keras.datasets`."""
    try:
        with one_download_at_a_time("datasets") as folder:
            kept = os.path.join(folder, "fashion-mnist")
            if name == "fashion_mnist" and os.path.isdir(DEBIAN_FASHION_MNIST) and not os.path.lexists(kept):
                os.symlink(DEBIAN_FASHION_MNIST, kept)
            (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, name).load_data()
    except Exception as error:  # Keras raises bare Exception for a failed download
        raise UserError(
            f"--dataset: {name} could not be loaded ({error}); copy its files to "
            "$KERAS_HOME/datasets or ~/.keras/datasets, or use --dataset=digits, which needs no download"
        ) from error
    if x_train.ndim == 3:
        x_train, x_test = x_train[..., None], x_test[..., None]
    return from_arrays(((x_train, y_train), (x_test, y_test)), name, num_classes=10)


@contextlib.contextmanager
def one_download_at_a_time(kind: str) -> Iterator[str]:
    """Locks a Keras download folder, and yields its path.

    Without the lock, several processes would write the same file at the same time.

    Args:
        kind: Keras' name of the folder, `"datasets"` or `"models"`.
    """
    folder = os.path.join(os.environ.get("KERAS_HOME", os.path.expanduser("~/.keras")), kind)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".kerasdp.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


DATASETS: dict[str, Callable[..., Any]] = {
    "digits": digits,
    **{name: functools.partial(published, name) for name in ("mnist", "fashion_mnist", "cifar10")},
    "synthetic": synthetic,
    "images": images,
}
