"""Checks targets and sample weights before the first step. The errors are the same on every backend.

Without this check, each backend would handle labels out of range differently. PyTorch raises an IndexError. TensorFlow
prints an error of 94 lines. JAX raises no error, but computes wrong results. For wrong shapes, Keras raises an error
before the first step.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.data.batch import Batch, Reader, SampleReader
from kerasdp.data.sources import ArraySource
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import all_layers
from kerasdp.keras_compat.models import (
    as_functional,
    loss_options,
    made_by_compile,
    output_symbols,
    symbols_of,
    targets_of_losses,
)
from kerasdp.keras_compat.settings import seed_of_program
from kerasdp.reporting import report
from kerasdp.run_state import ModelCache
from kerasdp.step.global_batch import is_loss_of_keras

# Targets in memory up to so many bytes are checked before the first step, in a third of a second at most. Larger
# targets, and targets that are read during the run, are checked batch by batch.
MOST_LOOKED_THROUGH = 2**30

_VALIDATION = "validation data: "
# For each model: the loss that `compile` made, the shapes of the latest data, and the symbolic outputs for them.
_outputs_of: ModelCache[tuple[Any, list[Any], Any]] = ModelCache()


@contextlib.contextmanager
def about_validation() -> Iterator[None]:
    """Adds the prefix "validation data: " to each `UserError` that the block raises."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{_VALIDATION}{error}") from None


def check_data(model: keras.Model, reader: Reader, batch: Batch, *, is_validation: bool = False) -> None:
    """Raises `UserError` if a model cannot be trained or evaluated on the data of a reader.

    Checks the shapes of the first batch, and the values of all targets. If the targets are in memory and have at most
    `MOST_LOOKED_THROUGH` bytes, checks them now. Otherwise, the reader checks the targets of each batch that it reads.
    The check costs one pass over the targets.

    Args:
        model: a built and compiled model.
        reader: reader of the data. Its attribute `check` is set if each batch has to be checked.
        batch: first batch of the reader.
        is_validation: whether the data is the validation data of `fit`.
    """
    if not _has_usual_loss(model):
        return
    symbols = symbols_of((batch.inputs, batch.targets, batch.sample_weight), len(batch.indices))
    shapes = [None if leaf is None else (leaf.shape, leaf.dtype) for leaf in keras.tree.flatten(symbols)]
    loss, _ = made_by_compile(model)
    known = _outputs_of.get(model)
    if known is None or known[0] is not loss or known[1] != shapes:
        known = loss, shapes, output_symbols(model, symbols)
        _outputs_of.put(model, known)
    outputs = known[2]
    if outputs is None:
        return
    check = functools.partial(_check_targets, model, outputs)
    source = reader.source if isinstance(reader, SampleReader) else None
    if isinstance(source, ArraySource) and _num_bytes(source.all_targets) <= MOST_LOOKED_THROUGH:
        # All ranks check all rows, so that they name the same sample.
        check(*source.all_targets, np.arange(source.num_samples), "")
        return
    check(batch.targets, batch.sample_weight, batch.own_indices, "")

    def check_batch(batch: Batch, number: int) -> None:
        title = f"{_VALIDATION if is_validation else ''}batch {number + 1}: "
        check(batch.targets, batch.sample_weight, batch.own_indices, title)

    reader.check = check_batch


# Layers that accept values of any scale, or that scale them.
_SCALING = (
    keras.layers.Rescaling, keras.layers.Normalization, keras.layers.BatchNormalization, keras.layers.Embedding,
    keras.layers.LayerNormalization, keras.layers.GroupNormalization, keras.layers.RMSNormalization,
    keras.layers.Lambda, keras.layers.Discretization, keras.layers.CategoryEncoding,
)  # fmt: skip


def warn_of_unscaled_images(model: keras.Model, batch: Batch) -> None:
    """Warns if a model gets images from 0 to 255 and no layer scales them.

    Checks only models that consist of Keras' own layers.
    """
    graph = as_functional(model)
    images = [each.dtype == "uint8" and each.ndim > 2 for each in keras.tree.flatten(batch.inputs) if each is not None]
    if graph is None or not any(images):
        return
    operations = [*graph.operations, *all_layers(model)]
    are_known = all(isinstance(each, keras.Layer) and type(each).__module__[:6] == "keras." for each in operations)
    if are_known and not any(isinstance(each, _SCALING) for each in operations):
        report.warn(
            f"{model.name}: the images have values from 0 to 255, and no layer scales them; start the model with "
            "keras.layers.Rescaling(1 / 255)"
        )


def warn_of_other_seed(seed: int) -> None:
    """Warns if the program has set a seed with `keras.utils.set_random_seed` that differs from the seed of the run."""
    given = seed_of_program()
    if given not in (None, seed):
        report.warn(f"keras.utils.set_random_seed({given}) does not set the seed of the run; use --seed={given}")


def chance_loss(model: keras.Model) -> float | None:
    """Returns the cross-entropy of a model that predicts all classes with equal probability.

    Returns None for losses other than cross-entropy.
    """
    known = _outputs_of.get(model)
    losses = [] if known is None or known[2] is None else targets_of_losses(model, known[2], known[2])
    functions = {keras.losses.sparse_categorical_crossentropy, keras.losses.categorical_crossentropy}
    if len(losses) != 1 or getattr(losses[0][1], "fn", None) not in functions:
        return None
    num_classes = losses[0][3].shape[loss_options(losses[0][1]).get("axis", -1)]
    return math.log(num_classes) if num_classes and num_classes > 1 else None


def _has_usual_loss(model: keras.Model) -> bool:
    """Returns whether the model passes targets unchanged to the losses of `compile`."""
    names = ("train_step", "test_step", "compute_loss")
    return all(getattr(type(model), name) is getattr(keras.Model, name) for name in names)


def _num_bytes(data: Any) -> int:
    return sum(leaf.nbytes for leaf in keras.tree.flatten(data) if leaf is not None)


def _check_targets(
    model: keras.Model, outputs: Any, targets: Any, sample_weight: Any, indices: np.ndarray, title: str
) -> None:
    """Raises `UserError` if targets or sample weights have wrong values.

    `indices` are the positions of the samples in the data set.
    """
    for where, loss, target, output in targets_of_losses(model, targets, outputs):
        if not is_loss_of_keras(loss):
            continue
        name = f"{title}targets{f' of output {where}' if where else ''}"
        _refuse_nan(name, target, indices)
        if getattr(loss, "fn", None) is keras.losses.sparse_categorical_crossentropy:
            options = loss_options(loss)
            num_classes = output.shape[options.get("axis", -1)]
            if num_classes is not None and target.size:
                _check_labels(name, target, num_classes, options.get("ignore_class"), indices)
    _refuse_nan(f"{title}sample_weight", sample_weight, indices)


def _check_labels(name: str, labels: np.ndarray, num_classes: int, ignored: int | None, indices: np.ndarray) -> None:
    """Raises `UserError` if a label is not a valid class index, from 0 to `num_classes - 1`."""
    is_whole = labels.dtype.kind in "iub" or not np.any(labels != np.floor(labels))
    if is_whole and labels.min() >= 0 and labels.max() < num_classes:
        return
    wrong = (labels < 0) | (labels >= num_classes) | (labels != np.floor(labels))
    if ignored is not None:
        wrong &= labels != ignored
    if not wrong.any():
        return
    place = tuple(index[0] for index in np.nonzero(wrong))
    label = labels[place].item()
    instead = "correct the labels"
    if label < 0:
        instead = f"correct the labels, or pass ignore_class={int(label)} to the loss"
    elif label >= num_classes:
        instead = f"use at least {int(label) + 1} outputs in the last layer, or correct the labels"
    raise UserError(
        f"{name}: expected whole numbers from 0 to {num_classes - 1} as labels, because the model has {num_classes} "
        f"outputs. Received: {label:g} (sample {indices[place[0]]}); {instead}"
    )


def _refuse_nan(name: str, data: Any, indices: np.ndarray) -> None:
    """Raises `UserError` if an array contains a value that is not finite. The error names the sample."""
    for leaf in keras.tree.flatten(data):
        # Minimum and maximum need no copy; both are NaN if any value is.
        if leaf is None or leaf.dtype.kind != "f" or not leaf.size:
            continue
        if np.isfinite(leaf.min()) and np.isfinite(leaf.max()):
            continue
        place = tuple(index[0] for index in np.nonzero(~np.isfinite(leaf)))
        raise UserError(
            f"{name}: expected finite numbers. Received: {leaf[place]} in sample {indices[place[0]]}; replace the "
            "value, or remove the sample"
        )
