"""Reads samples by index, from arrays or from records. Also lists and reads images."""

import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from kerasdp.errors import UserError

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm")


class Source(Protocol):
    """Protocol for data whose samples can be read by index, in any order and from several threads.

    Attributes:
        num_samples: number of samples.
        num_threads: number of threads that should read at the same time.
        name: name of the data set, or an empty string.
    """

    num_samples: int
    num_threads: int
    name: str

    def inputs(self, indices: np.ndarray) -> Any:
        """Returns the inputs of the samples at `indices`: an array of shape `(rows, ...)`, or a structure of arrays."""

    def targets(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Returns the targets and the sample weights of the samples at `indices`. Either of them may be None."""


class ArraySource:
    """Holds samples in memory, as data for `fit`, `evaluate`, `predict` and `kerasdp.Dataset`.

    Attributes:
        arrays: the inputs of all samples.
        all_targets: the targets and the sample weights of all samples; either may be None.
        num_samples: the number of samples.

    Args:
        inputs: array of shape `(samples, ...)`, or a structure (dict, list, tuple) of such arrays.
        targets: targets in the same form, or None.
        sample_weight: sample weights in the same form, or None.

    Raises:
        UserError: if the arrays have different numbers of samples, or no samples.

    Example:
        ```python
        import numpy as np
        import kerasdp

        x, y = np.random.rand(64, 28, 28, 1), np.random.randint(0, 10, 64)
        source = kerasdp.ArraySource(x, y)
        print(source.num_samples)  # 64
        print(source.inputs(np.array([5, 7])).shape)  # (2, 28, 28, 1)
        labels, sample_weight = source.targets(np.array([5, 7]))
        print(labels.shape, sample_weight)  # (2,) None
        ```
    """

    num_threads = 1
    name = ""

    def __init__(self, inputs: Any, targets: Any = None, sample_weight: Any = None):
        self.arrays, all_targets, all_weights = as_arrays((inputs, targets, sample_weight))
        self.all_targets = all_targets, all_weights
        self.num_samples = num_samples((self.arrays, *self.all_targets))

    @property
    def num_bytes(self) -> int:
        """Returns the size of the inputs in bytes, after conversion to the dtypes of batches."""
        return sum(
            math.prod(leaf.shape) * _type_of_rows(leaf.dtype).itemsize for leaf in keras.tree.flatten(self.arrays)
        )

    def inputs(self, indices: np.ndarray) -> Any:
        """Returns the inputs of the samples at `indices`, with floats in Keras' float type; see `Source.inputs`."""
        return in_floatx(self.arrays, indices)

    def targets(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Returns targets and sample weights of the samples at `indices`; see `Source.targets`."""
        return in_floatx(self.all_targets, indices)


def read_image(path: str, size: tuple[int, int], channels: int) -> np.ndarray:
    """Reads an image and resizes it. Returns a uint8 array of shape `(height, width, channels)`.

    Args:
        path: path of the file.
        size: height and width.
        channels: 3 for colour, 1 for grey.

    Raises:
        UserError: if the file is not an image.
    """
    from PIL import Image

    (height, width), mode = size, "RGB" if channels == 3 else "L"
    try:
        with Image.open(path) as image:
            image.draft(mode, (width, height))  # JPEG: decodes at a smaller size
            pixels = np.asarray(image.convert(mode).resize((width, height)))
    except Exception as error:  # Pillow raises many kinds of errors for files that are not images
        raise UserError(f"{path}: cannot read it as an image ({error!s:.300}); remove or replace the file") from error
    return pixels.reshape(height, width, channels)


def list_images(folder: str) -> tuple[list[str], np.ndarray, list[str]]:
    """Lists the images below a folder, sorted by name. Each sub-folder is a class.

    Returns:
        The paths, the labels (int64), and the names of the classes.

    Raises:
        UserError: if the folder does not exist, or no sub-folder contains an image.
    """
    if not os.path.isdir(folder):
        raise UserError(f"--data_dir: expected a folder. Received: {folder!r}, which does not exist; check the path")
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    paths, labels = [], []
    for label, name in enumerate(classes):
        for directory, _, files in sorted(os.walk(os.path.join(folder, name))):
            found = [os.path.join(directory, file) for file in sorted(files) if file.lower().endswith(IMAGE_ENDINGS)]
            paths += found
            labels += [label] * len(found)
    if not paths:
        raise UserError(
            f"--data_dir: expected images in {folder!r}, in one sub-folder per class. Received: "
            f"{len(classes)} sub-folders, none with a file of type {', '.join(IMAGE_ENDINGS)}"
        )
    return paths, np.asarray(labels), classes


def as_arrays(structure: Any) -> Any:
    """Converts the leaves of a structure to NumPy arrays.

    Converts float64 arrays to Keras' float type. `in_floatx` later converts arrays of other float types, batch by
    batch.
    """

    def as_array(leaf: Any) -> Any:
        if leaf is None:
            return leaf
        array = np.asarray(leaf)
        if not array.ndim and len(getattr(leaf, "shape", ())):  # NumPy treats it as one object
            raise UserError(
                f"expected arrays. Received: {type(leaf).__name__}, which NumPy cannot convert; pass a dense array"
            )
        if type(leaf).__name__ == "Series" and array.ndim == 1:  # of pandas or polars: a column, as in Keras
            array = array[:, None]
        return in_floatx(array) if array.dtype == np.float64 else array

    return keras.tree.map_structure(as_array, structure)


def in_floatx(structure: Any, rows: Any = ...) -> Any:
    """Returns the chosen rows of all arrays of a structure; by default all rows.

    Converts floats to Keras' float type, like `keras.Model.fit`.
    """
    return keras.tree.map_structure(
        lambda leaf: leaf if leaf is None else leaf[rows].astype(_type_of_rows(leaf.dtype), copy=False), structure
    )


def _type_of_rows(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of the batches that are read from an array of the given dtype.

    Recognizes bfloat16 as a float by its name, because NumPy has no `dtype.kind` for bfloat16.
    """
    return np.dtype(keras.config.floatx()) if dtype.kind not in "biu" and "float" in dtype.name else dtype


def digest_of(arrays: Iterable[Any]) -> str:
    """Returns a digest of the shapes and elements of arrays.

    Converts floats to float32 first, so the digest does not depend on their precision.
    """
    digest = hashlib.sha256()
    for array in map(np.asarray, arrays):
        digest.update(f"{array.shape}".encode())
        alike = array.astype({"f": "float32", "O": "str"}.get(array.dtype.kind, array.dtype), copy=False)
        digest.update(np.ascontiguousarray(alike).reshape(-1).view("uint8").data)
    return digest.hexdigest()[:16]


def is_of_arrays(x: Any) -> bool:
    """Returns whether `x` is an array or a structure that may contain arrays.

    Returns True also for sparse matrices. Later code raises an error for them.
    """
    return isinstance(x, (list, tuple, dict)) or hasattr(x, "__array__") or hasattr(x, "tocsr")


def num_samples(data: tuple[Any, Any, Any]) -> int:
    """Returns the number of samples in inputs, targets and sample weights.

    Raises:
        UserError: if the arrays have different numbers of samples, or no samples.
    """
    counts: dict[str, list[int]] = {}
    for name, part in zip(("x", "y", "sample_weight"), data, strict=True):
        arrays = [leaf for leaf in keras.tree.flatten(part) if leaf is not None]
        for array in arrays:
            if not array.ndim:
                refuse_strings(array, name)  # a list of strings, as from a DataLoader
                raise UserError(
                    f"{name}: expected an array, or a structure of arrays. Received: {type(part).__name__} of "
                    f"Python numbers; use numpy.array({name})"
                )
        counts[name] = sorted({len(array) for array in arrays})
    every = {count for found in counts.values() for count in found}
    if len(every) != 1 or 0 in every or not counts["x"]:
        received = ", ".join(f"{' and '.join(map(str, found))} in {name}" for name, found in counts.items() if found)
        raise UserError(f"expected arrays with the same nonzero number of samples. Received: {received or 'no array'}")
    return every.pop()


def refuse_strings(structure: Any, name: str) -> None:
    """Raises `UserError` if a structure of arrays contains strings."""
    for leaf in keras.tree.flatten(structure):
        if leaf is None or leaf.dtype.kind not in "OSU":
            continue
        raise UserError(
            f"{name}: expected numbers. Received: strings ({leaf.dtype}), which only tensorflow models accept; "
            "convert strings first, with a StringLookup or TextVectorization layer: lookup(text) for an array, "
            "ds.map(lambda text, y: (lookup(text), y)) for tf.data"
        )


def weights_of_classes(targets: Any, class_weight: dict[Any, float]) -> np.ndarray:
    """Returns the sample weights that follow from class weights. The weight of a class that is not listed is 1.

    Args:
        targets: class indices or one-hot vectors.
        class_weight: weight of each class, by class index.

    Raises:
        UserError: if there is more than one target array, or a weight is for an unknown class.
    """
    targets = as_arrays(targets)
    if not isinstance(targets, np.ndarray) or not targets.ndim:
        raise UserError(f"class_weight: expected one array as y, not a structure. Received: {type(targets)}")
    num_classes = math.inf  # unknown: a class may have no sample
    if targets.ndim > 1 and targets.shape[-1] == 1:
        targets = np.squeeze(targets, axis=-1)
    elif targets.ndim > 1:
        num_classes, targets = targets.shape[-1], np.argmax(targets, axis=-1)
    classes = np.round(targets).astype("int32")
    for label in class_weight:
        if not isinstance(label, (int, float, np.integer, np.floating)) or label % 1 or not 0 <= label < num_classes:
            raise UserError(f"class_weight: expected class indices of y as keys, from 0. Received: {label!r}")
    return np.array([class_weight.get(int(label), 1.0) for label in classes], dtype=keras.config.floatx())


def take_rows(structure: Any, indices: Any) -> Any:
    """Returns rows of all arrays of a structure. `indices` is an index array or a slice."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[indices], structure)


def split_off(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Splits arrays into training and validation samples.

    Like Keras, takes the last samples for validation, without shuffling.

    Raises:
        UserError: if `x` contains no arrays, or the training or validation samples would be empty.
    """
    if not is_of_arrays(x):
        raise UserError(f"validation_split: expected arrays. Received: {type(x).__name__}; use validation_data")
    source = ArraySource(x, y, sample_weight)
    cut = int(source.num_samples * (1.0 - fraction)) if 0 < fraction < 1 else 0
    if cut in (0, source.num_samples):
        raise UserError(
            "validation_split: expected at least one sample for training and one for validation. Received: the "
            f"fraction {fraction} of {source.num_samples} samples"
        )
    arrays = source.arrays, *source.all_targets
    return take_rows(arrays, slice(None, cut)), take_rows(arrays, slice(cut, None))


class RecordSource:
    """Reads samples by index from records, such as a PyTorch or Hugging Face data set, a Grain source or a list.

    Args:
        records: an object with `len(records)` and `records[7]`. If `records` has a method `__getitems__`, as in PyTorch
            and Grain, this method reads several records at once.
        decode: a function of a record. It returns `(inputs, targets)`, `(inputs, targets, sample_weight)` or only the
            inputs. Each of these is an array or a number without a batch axis, or a structure of arrays and numbers.
            None: the records already have this form.
        num_threads: number of threads that read and decode at the same time.

    Raises:
        UserError: if there are no records, or the records cannot be read by index.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        records = [{"image": np.full((8, 8), label / 10), "label": label} for label in range(10)] * 6
        source = kerasdp.RecordSource(records, decode=lambda record: (record["image"], record["label"]))

        def train(runner):
            model = keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(10)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model.fit(source, batch_size=20)

        kerasdp.launch(train)
        ```
    """

    name = ""

    def __init__(self, records: Any, decode: Callable[[Any], Any] | None = None, num_threads: int = 4):
        kind = type(records).__name__
        if not hasattr(records, "__getitem__") or not hasattr(records, "__len__"):
            raise UserError(
                f"expected records that can be read by index. Received: a {kind} without __len__ or __getitem__; "
                "pass sequential data to fit directly, in batches"
            )
        self.num_samples, self.num_threads = len(records), num_threads
        if not self.num_samples:
            raise UserError(f"expected at least one record. Received: an empty {kind}")
        self.records, self._decode = records, decode
        # The samples that each thread read last. Inputs and targets of a batch are requested one after the other.
        self._last = threading.local()

    def __reduce__(self) -> Any:  # samples that threads have read are not pickled
        return type(self), (self.records, self._decode, self.num_threads)

    def inputs(self, indices: np.ndarray) -> Any:
        """Returns the inputs of the samples at `indices`; see `Source.inputs`."""
        return _stacked([inputs for inputs, _, _ in self._samples(indices)])

    def targets(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Returns targets and sample weights of the samples at `indices`; see `Source.targets`."""
        samples = self._samples(indices)
        return _stacked([targets for _, targets, _ in samples]), _stacked([weight for _, _, weight in samples])

    def _samples(self, indices: np.ndarray) -> list[Any]:
        wanted = list(dict.fromkeys(indices.tolist()))  # padding repeats a row
        samples = getattr(self._last, "samples", {})
        if not samples.keys() >= set(wanted):
            samples = self._last.samples = dict(zip(wanted, self._read(wanted), strict=True))
        return [samples[index] for index in indices.tolist()]

    def _read(self, indices: list[int]) -> list[Any]:
        """Reads and decodes records. Returns inputs, targets and sample weight of each record."""
        several = hasattr(self.records, "__getitems__")
        samples = self.records.__getitems__(indices) if several else [self.records[index] for index in indices]
        samples = samples if self._decode is None else map(self._decode, samples)
        return list(map(keras.utils.unpack_x_y_sample_weight, samples))


def _stacked(samples: Sequence[Any]) -> Any:
    """Stacks the samples of a batch along a new first axis.

    Returns the same structure as one sample, or None if the first sample is None.
    """
    if samples[0] is None:
        return None
    try:
        stacked = keras.tree.map_structure(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *samples)
    except ValueError as error:
        raise UserError(
            f"records: expected samples of equal structure and shape. Received: {error}; crop or pad them in `decode`"
        ) from error
    return as_arrays(stacked)
