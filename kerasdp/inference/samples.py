"""Opens what a model is used on: a data set, arrays, or images."""

import dataclasses
import os
from typing import Any

import keras
import numpy as np

from kerasdp.config import Config
from kerasdp.config.request import Request
from kerasdp.data.datasets import load_data
from kerasdp.data.sources import IMAGE_ENDINGS, ArraySource, ImageFolder, Source, list_images
from kerasdp.errors import UserError
from kerasdp.inference.trained import Trained, named_by_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples in a fixed order.

    Args:
        source: the samples, for `runner.evaluate` and `runner.predict`.
        names: of each sample: its file, or its row number.
        title: what they are, in words.
        labels: the class of each, shape `(samples,)`; None if they have none.
        class_names: of the folders; None if classes have numbers only.
    """

    source: Source
    names: list[Any]
    title: str
    labels: np.ndarray | None
    class_names: list[str] | None = None


def open_samples(request: Request, trained: Trained) -> Samples:
    """Opens the inputs of a request, or the held-out part of its data set, else of the one that the model is from.

    Args:
        request: `inputs`, `dataset`, `data_dir` and `trust_checkpoint` are read.
        trained: its model says the size of images.

    Raises:
        UserError: if there is no data, it cannot be read, or it takes code that the model's file names and nobody else.
    """
    path = request.inputs
    if path is None:
        return _of_dataset(request, trained)
    if os.path.isdir(path) or path.lower().endswith(IMAGE_ENDINGS):
        return _of_images(path, trained.model)
    if path.endswith((".npy", ".npz")):
        return _of_arrays(path)
    raise UserError(
        f"--inputs: expected .npy, .npz, a folder of images, or an image ({', '.join(IMAGE_ENDINGS)}). "
        f"Received: {path!r}"
    )


def _of_dataset(request: Request, trained: Trained) -> Samples:
    name = request.dataset
    if name is None and trained.dataset is not None:
        name = named_by_file(trained.dataset, "dataset", trained.path, request)
    if name is None:
        raise UserError(f"{trained.path} does not say what it was trained on: add --inputs or --dataset")
    own_folder = trained.data_dir if request.dataset is None else None
    data = load_data(Config(dataset=name, data_dir=request.data_dir or own_folder))
    source = data.test
    labels = np.asarray(source.targets(np.arange(source.num_samples))[0])
    names = list(getattr(source, "paths", range(source.num_samples)))
    return Samples(source=source, names=names, title=f"{name}, held-out samples", labels=labels)


def _of_arrays(path: str) -> Samples:
    try:
        found = np.load(path, allow_pickle=False)
        arrays = dict(found) if path.endswith(".npz") else {"x": found}
    except Exception as error:  # of zip, zlib and NumPy: anybody may have written the file
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"--inputs: {path} cannot be read as arrays ({line:.300})") from error
    labels = arrays.pop("y", None)
    inputs = arrays.get("x") if list(arrays) == ["x"] else arrays
    source = ArraySource(inputs, labels)
    if labels is not None:
        labels = labels.reshape(len(labels), -1)
        if labels.shape[1] != 1 or labels.dtype.kind not in "iu":
            raise UserError(
                f"--inputs: expected whole numbers of shape (samples,) as y of {path}. Received: {labels.dtype} of "
                f"shape {labels.shape}"
            )
        labels = labels[:, 0]
        source = ArraySource(inputs, labels)
    return Samples(source=source, names=list(range(source.num_samples)), title=path, labels=labels)


def _of_images(path: str, model: keras.Model) -> Samples:
    shape = getattr(model, "input_shape", None)
    if not isinstance(shape, tuple) or len(shape) != 4 or None in shape[1:]:
        raise UserError(f"--inputs: images need a model with inputs (height, width, channels). Received: {shape}")
    classes: list[str] | None = None
    labels = None
    if os.path.isdir(path):
        directly = sorted(name for name in os.listdir(path) if name.lower().endswith(IMAGE_ENDINGS))
        paths = [os.path.join(path, name) for name in directly]
        has_folders = any(entry.is_dir() for entry in os.scandir(path))
        if directly and has_folders:
            raise UserError(f"--inputs: expected images or sub-folders, one per class. Received: {path!r}, with both")
        if has_folders:
            try:
                paths, labels, classes = list_images(path)
            except UserError as error:
                raise UserError(str(error).replace("--data_dir", "--inputs")) from error
        if not paths:
            raise UserError(f"--inputs: expected images ({', '.join(IMAGE_ENDINGS)}) in {path!r}. Received: none")
    else:
        paths = [path]
    none = np.zeros(len(paths), "int32")
    height, width, channels = shape[1:]
    source = ImageFolder(paths, none if labels is None else labels.astype("int32"), (height, width), channels)
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    names = [os.path.relpath(each, folder) for each in paths]
    return Samples(source=source, names=names, title=path, labels=labels, class_names=classes)
