"""Stands in for data that a dry run does not need to read: what is known of it is its shape and number of samples."""

import os

import numpy as np

from kerasdp.errors import UserError

# Samples to learn from, held-out samples, shape and number of classes of data sets as they are published.
PUBLISHED: dict[str, tuple[int, int, tuple[int, ...], int]] = {
    "mnist": (60_000, 10_000, (28, 28, 1), 10),
    "fashion_mnist": (60_000, 10_000, (28, 28, 1), 10),
    "cifar10": (50_000, 10_000, (32, 32, 3), 10),
}
_IMAGENET_CLASSES = 1000


class StandIn:
    """A `kerasdp.data.sources.Source` whose samples are zeros.

    Attributes:
        note: what is to be said of it.
        is_counted: whether the number of samples is that of the data.
    """

    num_threads = 1
    name = ""

    def __init__(self, num_samples: int | None, shape: tuple[int, ...], note: str = ""):
        """`num_samples` None: not known."""
        self.num_samples, self.is_counted = num_samples or 1, num_samples is not None
        self.note, self._shape = note, tuple(shape)

    def inputs(self, indices: np.ndarray) -> np.ndarray:
        """Returns black images, uint8."""
        return np.zeros((len(indices), *self._shape), "uint8")

    def targets(self, indices: np.ndarray) -> tuple[np.ndarray, None]:
        """Returns the first class for each."""
        return np.zeros(len(indices), "int32"), None


# Samples to learn from, held-out samples, shape of an input, number of classes.
Known = tuple[StandIn, StandIn, tuple[int, ...], int]


def published(name: str, reason: str) -> Known:
    """Returns what stands in for a data set of `PUBLISHED`; `reason`: why it is not read."""
    num_train, num_test, shape, num_classes = PUBLISHED[name]
    note = f"numbers as published; {reason}"
    return StandIn(num_train, shape, note), StandIn(num_test, shape, note), shape, num_classes


def synthetic(shape: tuple[int, ...], num_classes: int, num_samples: int, num_test_samples: int) -> Known:
    """Returns what stands in for random images, which are as many as memory holds."""
    return StandIn(num_samples, shape), StandIn(num_test_samples, shape), tuple(shape), num_classes


def images(data_dir: str | None, size: tuple[int, int], channels: int) -> Known | None:
    """Returns what stands in for a folder of images that is not here; None if it is."""
    if data_dir is None or os.path.isdir(data_dir):
        return None
    note = (
        f"{data_dir} is not here: {_IMAGENET_CLASSES:,} classes are assumed, and how many images there are is not known"
    )
    shape = (*size, channels)
    return StandIn(None, shape, note), StandIn(None, shape, note), shape, _IMAGENET_CLASSES


def not_here(name: str, error: Exception) -> UserError:
    """Returns the error of a user-defined data set that cannot be loaded in a dry run."""
    reason = " ".join(str(error).split())[:200]
    return UserError(
        f"--dry_run: {name} cannot be loaded here ({type(error).__name__}: {reason}), and the model is built for the "
        "shape of its inputs; let --dataset='synthetic(shape=(224,224,3), num_classes=1000, num_samples=1281167)' "
        "stand in for it, with its own numbers"
    )
