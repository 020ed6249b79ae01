"""Finds out about losses that are user-defined, by trying them, whether they are made of one value for each row."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import keras
import numpy as np

from kerasdp.keras_compat.models import compiled_loss, output_losses
from kerasdp.keras_compat.own_rows import wrapped_losses
from kerasdp.portability.loss_reduction import Reduction, found, reduction_of

NUM_ROWS = 12


def try_losses(model: keras.Model, targets: Any, symbols: Any) -> None:
    """Tries the losses of a compiled model that are not known, and keeps what it finds for `reduction_of`.

    Each gets random outputs, and is tried on all rows, on some, and on single ones. What fails stays unknown.

    Args:
        model: its losses built.
        targets: `NUM_ROWS` rows, NumPy arrays.
        symbols: the model's outputs, as it gives them: `KerasTensor`s, whose rows do not matter.
    """
    unknown = [loss for loss in output_losses(model) if reduction_of(loss) is Reduction.UNKNOWN]
    if not unknown:
        return
    with ThreadPoolExecutor(1) as thread:  # where no graph is being traced, and no scope is entered
        found.update(thread.submit(_try, model, targets, symbols, unknown).result())


def _try(
    model: keras.Model, targets: Any, symbols: Any, losses: list[keras.losses.Loss]
) -> dict[keras.losses.Loss, Reduction]:
    answers: dict[keras.losses.Loss, list[Reduction]] = {loss: [] for loss in losses}
    numbers, compiled = np.random.RandomState(0), cast(Any, compiled_loss(model))
    # As they are; each twice, since some losses compare rows of one class; and all the same.
    for rows in (np.arange(NUM_ROWS), np.arange(NUM_ROWS) // 2, np.zeros(NUM_ROWS, int)):
        own = keras.tree.map_structure(lambda leaf, rows=rows: None if leaf is None else leaf[rows], targets)
        with _recorded(losses) as calls:
            try:
                with keras.StatelessScope():  # the losses of several outputs are metrics, too
                    compiled(own, random_outputs(symbols, numbers))
                for loss in losses:
                    answers[loss] += [_answer(loss, y_true, y_pred) for y_true, y_pred in calls[loss]]
            except Exception:  # user-defined, on outputs that it may not expect
                return {}
    return {loss: _together(own) for loss, own in answers.items() if own}


def _together(answers: list[Reduction]) -> Reduction:
    if Reduction.UNKNOWN in answers:
        return Reduction.UNKNOWN
    return answers[0] if len(set(answers)) == 1 else Reduction.COUPLES


@contextlib.contextmanager
def _recorded(losses: list[keras.losses.Loss]) -> Iterator[dict[keras.losses.Loss, list[tuple[Any, Any]]]]:
    """Notes what Keras hands to some losses."""
    calls: dict[keras.losses.Loss, list[tuple[Any, Any]]] = {loss: [] for loss in losses}

    def noting(loss: keras.losses.Loss) -> Any:
        def call(y_true: Any, y_pred: Any) -> Any:
            calls[loss].append((y_true, y_pred))
            return type(loss).call(loss, y_true, y_pred)

        return call

    with wrapped_losses(losses, noting):
        yield calls


def random_outputs(symbols: Any, numbers: np.random.RandomState) -> Any:
    """Returns `NUM_ROWS` rows of such outputs: between 0 and 1, which suits probabilities and all else."""

    def random(tensor: Any) -> Any:
        values = numbers.uniform(0.05, 0.95, (NUM_ROWS, *tensor.shape[1:]))
        return keras.ops.convert_to_tensor(values.astype("float32"), dtype=tensor.dtype)

    return keras.tree.map_structure(random, symbols)


def _answer(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> Reduction:
    """Compares a loss of all rows with those of some and of single ones."""

    def values(begin: int, end: int) -> Any:
        y_t, y_p = keras.tree.map_structure(lambda leaf: leaf[begin:end], (y_true, y_pred))
        with keras.StatelessScope():
            return keras.ops.convert_to_numpy(type(loss).call(loss, y_t, y_p)).astype("float64")

    whole, half = values(0, NUM_ROWS), values(0, NUM_ROWS // 2)
    singles = [values(row, row + 1) for row in range(NUM_ROWS)]
    if not all(np.isfinite(each).all() for each in (whole, half, *singles)):
        return Reduction.UNKNOWN
    if whole.ndim == 0 and half.ndim == 0 and all(each.ndim == 0 for each in singles):
        is_mean = _equal(whole, np.mean(singles)) and _equal(half, np.mean(singles[: NUM_ROWS // 2]))
        return Reduction.MEAN if is_mean else Reduction.COUPLES
    if whole.ndim == 0 or len(whole) != NUM_ROWS or any(each.shape != (1, *whole.shape[1:]) for each in singles):
        return Reduction.COUPLES
    is_by_rows = _equal(whole, np.concatenate(singles)) and _equal(whole[: NUM_ROWS // 2], half)
    return Reduction.BY_ROWS if is_by_rows else Reduction.COUPLES


def _equal(received: Any, expected: Any) -> bool:
    return np.shape(received) == np.shape(expected) and bool(np.allclose(received, expected, rtol=1e-5, atol=1e-6))
