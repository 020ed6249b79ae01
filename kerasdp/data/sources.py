"""Reads samples from arrays in memory, or from a folder of images that is larger than memory."""

import numbers
import os
from collections.abc import Sequence
from typing import Any, Protocol

import keras
import numpy as np

from kerasdp.errors import UserError

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm")


class Source(Protocol):
    """Samples that can be read by number, in any order, from several threads.

    Attributes:
        num_samples: how many there are.
        num_threads: threads that should read at once.
        name: of the data set, if it has one.
    """

    num_samples: int
    num_threads: int
    name: str

    def inputs(self, indices: np.ndarray) -> Any:
        """Returns the inputs of these samples: an array of shape `(rows, ...)`, or a structure of such arrays."""

    def targets(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Returns the targets and the sample weights of these samples; either may be None."""


class ArraySource:
    """Samples in memory.

    Args:
        inputs: array of shape `(samples, ...)`, or a structure (dict, list, tuple) of such arrays.
        targets: likewise, or None.
        sample_weight: likewise, or None.

    Raises:
        UserError: if the arrays do not hold equally many samples, or none.
    """

    num_threads = 1
    name = ""

    def __init__(self, inputs: Any, targets: Any = None, sample_weight: Any = None):
        self._inputs, self._targets, self._sample_weight = as_arrays((inputs, targets, sample_weight))
        self.num_samples = num_samples((self._inputs, self._targets, self._sample_weight))

    @property
    def arrays(self) -> Any:
        """Returns the inputs of all samples."""
        return self._inputs

    @property
    def all_targets(self) -> tuple[Any, Any]:
        """Returns the targets and the sample weights of all samples; either may be None."""
        return self._targets, self._sample_weight

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the inputs."""
        return sum(leaf.nbytes for leaf in keras.tree.flatten(self._inputs))

    def inputs(self, indices: np.ndarray) -> Any:
        """See `Source`."""
        return _take(self._inputs, indices)

    def targets(self, indices: np.ndarray) -> tuple[Any, Any]:
        """See `Source`."""
        return _take(self._targets, indices), _take(self._sample_weight, indices)


class ImageFolder:
    """Images in folders, one sub-folder per class; read when they are needed, in parallel.

    Args:
        paths: the image files.
        labels: class of each, whole numbers, shape `(samples,)`.
        size: height and width to which every image is scaled.
        channels: 3 for colour, 1 for grey.
    """

    name = ""

    def __init__(self, paths: Sequence[str], labels: np.ndarray, size: tuple[int, int], channels: int = 3):
        self.paths, self.labels, self.size, self.channels = list(paths), labels, tuple(size), channels
        self.num_samples = len(self.paths)
        self.num_threads = min(16, os.cpu_count() or 1)

    def inputs(self, indices: np.ndarray) -> np.ndarray:
        """Reads the images, uint8, shape `(rows, height, width, channels)`."""
        return np.stack([self._read(self.paths[index]) for index in indices])

    def targets(self, indices: np.ndarray) -> tuple[np.ndarray, None]:
        """Returns the labels."""
        return self.labels[indices], None

    def _read(self, path: str) -> np.ndarray:
        from PIL import Image

        height, width = self.size
        try:
            with Image.open(path) as image:
                image.draft("RGB" if self.channels == 3 else "L", (width, height))  # JPEG: decodes at a smaller size
                pixels = np.asarray(image.convert("RGB" if self.channels == 3 else "L").resize((width, height)))
        except Exception as error:  # Pillow's readers raise anything of a file that is none of theirs
            raise UserError(f"{path}: cannot be read as an image ({error!s:.300}); remove or replace it") from error
        return pixels.reshape(height, width, self.channels)


class ColumnSource:
    """Columns of a table that gives rows by their numbers, such as a Hugging Face `Dataset`.

    Args:
        table: `table[[7, 2]]` must be a dictionary of columns, each with the values of these two rows.
        inputs: the column, or a list of columns, which become a dictionary of arrays.
        targets: likewise, or None.
        sample_weight: the column, or None.
        num_threads: that read at once.

    Raises:
        UserError: if the table has no such columns, or no rows.
    """

    name = ""

    def __init__(
        self,
        table: Any,
        inputs: str | list[str],
        targets: str | list[str] | None = None,
        sample_weight: str | None = None,
        num_threads: int = 4,
    ):
        self._names = inputs, targets, sample_weight
        self.num_samples, self.num_threads = len(table), num_threads
        if not self.num_samples:
            raise UserError(f"expected a table with rows. Received: a {type(table).__name__} without any")
        there, named = list(table[[0]]), keras.tree.flatten([names for names in self._names if names is not None])
        for name in named:
            if name not in there:
                raise UserError(f"expected one of the columns {', '.join(map(str, there))}. Received: {name!r}")
        kind = table.format["type"] if hasattr(table, "select_columns") else "custom"
        if kind is None:
            table = table.with_format("numpy")  # else each image is a list of lists
        # Columns are read apart, but where a function of the table's owner makes all of them.
        parts = [keras.tree.flatten(inputs), [name for name in named if name not in keras.tree.flatten(inputs)]]
        self._tables = [table if kind == "custom" else table.select_columns(part) for part in parts]

    def inputs(self, indices: np.ndarray) -> Any:
        """See `Source`."""
        return _columns(self._tables[0][indices.tolist()], self._names[0])

    def targets(self, indices: np.ndarray) -> tuple[Any, Any]:
        """See `Source`."""
        if self._names[1:] == (None, None):
            return None, None
        rows = self._tables[1][indices.tolist()]
        return _columns(rows, self._names[1]), _columns(rows, self._names[2])


def _columns(rows: Any, names: Any) -> Any:
    if isinstance(names, list):
        return {name: _columns(rows, name) for name in names}
    return None if names is None else as_arrays(np.asarray(rows[names]))


def list_images(folder: str) -> tuple[list[str], np.ndarray, list[str]]:
    """Lists the images below a folder, in the order of their names.

    Returns:
        Paths, labels (int64), and the class names.

    Raises:
        UserError: if there is no such folder, or no image in a sub-folder.
    """
    if not os.path.isdir(folder):
        raise UserError(f"--data_dir: there is no folder {folder!r}")
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    paths, labels = [], []
    for label, name in enumerate(classes):
        for directory, _, files in sorted(os.walk(os.path.join(folder, name))):
            found = [os.path.join(directory, file) for file in sorted(files) if file.lower().endswith(IMAGE_ENDINGS)]
            paths += found
            labels += [label] * len(found)
    if not paths:
        raise UserError(
            f"--data_dir: expected images in {folder!r}, one sub-folder per class. Received: {len(classes)} "
            f"sub-folders without a file that ends in {', '.join(IMAGE_ENDINGS)}"
        )
    return paths, np.asarray(labels), classes


def as_arrays(structure: Any) -> Any:
    """Returns the structure with NumPy arrays as leaves; float64 becomes Keras' float type, as in `keras.Model.fit`."""

    def as_array(leaf: Any) -> Any:
        if leaf is None:
            return None
        if hasattr(leaf, "toarray"):  # of SciPy: NumPy would take it for one object
            raise UserError(f"expected arrays. Received: {type(leaf).__name__}, which is sparse; use its toarray()")
        try:
            array = np.asarray(leaf)
        except ValueError as error:  # lists of different lengths
            raise UserError(f"expected arrays. Received: {type(leaf).__name__}, which is none ({error})") from error
        if type(leaf).__name__ == "Series" and array.ndim == 1:  # of pandas or polars: a column, as in Keras
            array = array[:, None]
        return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array

    return keras.tree.map_structure(as_array, structure)


def num_samples(data: tuple[Any, Any, Any]) -> int:
    """Returns how many samples there are in inputs, targets and sample weights.

    Raises:
        UserError: if they do not have equally many, or none.
    """
    given = dict(zip(("x", "y", "sample_weight"), data, strict=True))
    return common_length({name: _arrays(part, name) for name, part in given.items()})


def common_length(leaves: dict[str, list[Any]]) -> int:
    """Returns how many samples each of the arrays or lists under "x", "y" and "sample_weight" has.

    Raises:
        UserError: if they do not have equally many, or none.
    """
    counts = {name: sorted({len(leaf) for leaf in found}) for name, found in leaves.items()}
    every = {count for found in counts.values() for count in found}
    if len(every) != 1 or 0 in every or not counts["x"]:
        received = ", ".join(f"{' and '.join(map(str, found))} in {name}" for name, found in counts.items() if found)
        raise UserError(f"expected arrays with equally many samples, at least one. Received: {received or 'no array'}")
    return every.pop()


def _arrays(structure: Any, name: str) -> list[np.ndarray]:
    """Returns the arrays in a structure; raises `UserError` if there is one without samples, such as a plain number."""
    arrays = [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]
    for array in arrays:
        if not array.ndim:
            raise UserError(
                f"{name}: expected an array, or a structure of arrays. Received: {type(structure).__name__} of "
                f"plain numbers; use numpy.array({name})"
            )
    return arrays


def weights_of_classes(targets: Any, class_weight: dict[Any, float]) -> np.ndarray:
    """Returns the weight of each sample by its class, 1 for classes without one; targets are classes, or one-hot.

    Raises:
        UserError: if there are several targets, or weights for what is no class of theirs.
    """
    targets = as_arrays(targets)
    if not isinstance(targets, np.ndarray) or not targets.ndim:
        raise UserError(f"class_weight: expected an array as y, for the model's only output. Received: {type(targets)}")
    largest = None  # unknown: a class may have no sample
    if targets.ndim > 1:
        largest = targets.shape[-1] - 1 or None
        targets = np.squeeze(targets, axis=-1) if largest is None else np.argmax(targets, axis=-1)
    classes = np.round(targets).astype("int32")
    for label in class_weight:
        is_class = isinstance(label, numbers.Real) and float(label).is_integer() and float(label) >= 0
        if not is_class or (largest is not None and label > largest):
            limit = "on" if largest is None else f"to {largest}"
            raise UserError(f"class_weight: expected classes of y, whole numbers from 0 {limit}. Received: {label!r}")
    return np.array([class_weight.get(int(label), 1.0) for label in classes], dtype=keras.config.floatx())


def _take(structure: Any, indices: np.ndarray) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[indices], structure)


def split_off(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Splits off the end of the arrays, before any shuffling, as Keras does.

    Raises:
        UserError: if nothing would be left on one side.
    """
    source = ArraySource(x, y, sample_weight) if isinstance(x, (list, tuple, dict)) or hasattr(x, "__array__") else None
    if source is None:
        raise UserError(f"validation_split: expected arrays. Received: {type(x).__name__}; give validation_data")
    cut = int(source.num_samples * (1.0 - fraction)) if 0 < fraction < 1 else 0
    if cut in (0, source.num_samples):
        raise UserError(
            f"validation_split: expected a share that leaves some of the {source.num_samples} samples on both sides. "
            f"Received: {fraction}"
        )
    arrays = source.arrays, *source.all_targets
    return tuple(
        keras.tree.map_structure(lambda leaf, part=part: None if leaf is None else leaf[part], arrays)
        for part in (slice(None, cut), slice(cut, None))
    )
