"""Refuses data that a model or its loss cannot learn from, before the first step and in the same words on each backend.

Backends differ in what they do with it: labels that are out of range are an IndexError with torch, 94 lines with
TensorFlow, and another training, without a word, with JAX.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.data.batch import Batch, SampleReader
from kerasdp.data.feed import Reader
from kerasdp.data.sources import ArraySource
from kerasdp.errors import NonFiniteLossError, UserError
from kerasdp.keras_compat.graph_ends import calls_own_graph, output_symbols, symbols_of
from kerasdp.keras_compat.models import as_functional, inputs_structure
from kerasdp.runtime.run_state import RunState
from kerasdp.training.target_checks import (
    check_activations,
    count_text,
    fits,
    refuse_nan,
    shape_text,
    target_check,
)

# Bytes of targets in memory that are looked through before the first step, in a third of a second at most; of more, and
# of what is read while the run goes, each batch is looked at before it is trained.
MOST_LOOKED_THROUGH = 2**30

_VALIDATION = "validation data: "


@contextlib.contextmanager
def about_validation() -> Iterator[None]:
    """Lets messages say that they are about the validation data."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{_VALIDATION}{error}") from None


def check_data(
    model: keras.Model,
    reader: Reader,
    batch: Batch,
    *,
    with_targets: bool = True,
    is_validation: bool = False,
) -> None:
    """Raises `UserError` if a model cannot be trained on, or evaluated with, the data of a reader.

    Looks at the shapes of the first batch, and at all targets: those that are not in memory, or too large, when they
    are read. Costs one pass over the targets.

    Args:
        model: may be not built yet; called in the scope in which it may be built.
        reader: gets the function that looks at the targets of each batch, if that is needed.
        batch: its first one.
        with_targets: False: the inputs alone matter.
        is_validation: whether the model has been checked with the training data.

    Raises:
        UserError: also if the model is not compiled.
    """
    if with_targets and not model.compiled:
        raise UserError(f"{model.name} is not compiled: call model.compile(...) within runner.scope() first")
    _check_inputs(model, batch.inputs)
    if is_validation:
        refuse_nan_inputs(model, reader, batch)
    if not with_targets or not _has_usual_loss(model):
        return
    symbols = output_symbols(model, symbols_of(batch.inputs, len(batch.indices)))
    if symbols is None:
        return
    is_chief = reader.shard[0] == 0
    check = target_check(model, symbols, is_chief)
    source = reader.source if isinstance(reader, SampleReader) else None
    looks_at_all = isinstance(source, ArraySource) and _num_bytes(source.all_targets) <= MOST_LOOKED_THROUGH
    if isinstance(source, ArraySource) and looks_at_all:  # so that all ranks, each with other rows, name one sample
        check(*source.all_targets, np.arange(source.num_samples), "")
    else:
        check(batch.targets, batch.sample_weight, batch.own_indices, "")
    if not is_validation:
        check_activations(model, symbols, batch.targets, is_chief)
    if looks_at_all:
        return

    def check_batch(batch: Batch, number: int) -> None:
        title = f"{_VALIDATION if is_validation else ''}batch {number + 1}: "
        check(batch.targets, batch.sample_weight, batch.own_indices, title)

    reader.check = check_batch


def refuse_nan_inputs(model: keras.Model, reader: Reader, batch: Batch) -> None:
    """Raises `UserError` if inputs of the first batch are NaN, unless the model, built by now, takes them."""
    # Each process has its own inputs, and all should name the same sample.
    whole = batch if reader.shard[1] == 1 else reader.whole(0, 0) or batch
    try:
        refuse_nan("inputs", whole.inputs, whole.own_indices, "", only_nan=True)
    except UserError:
        outputs = keras.tree.flatten(model(keras.tree.map_structure(keras.ops.convert_to_tensor, whole.inputs)))
        if not all(np.isfinite(keras.ops.convert_to_numpy(output)).all() for output in outputs):
            raise


def explained(error: NonFiniteLossError, reader: Reader, state: RunState) -> NonFiniteLossError:
    """Returns the error with the sample that is to blame instead of advice, if the batch of that step shows one."""
    number = state.batch - 1 - (state.step - error.step)
    batch = reader.whole(state.epoch, number) if number >= 0 else None
    if batch is None:
        return error
    try:
        for name in ("inputs", "targets", "sample_weight"):
            refuse_nan(name, getattr(batch, name), batch.indices, "")
    except UserError as reason:
        return NonFiniteLossError(f"{str(error).partition(';')[0]}; {reason}", error.step)
    return error


def _has_usual_loss(model: keras.Model) -> bool:
    """Returns whether targets go to the losses of `compile` as they are."""
    names = ("train_step", "test_step", "compute_loss")
    return model.compiled and all(getattr(type(model), name) is getattr(keras.Model, name) for name in names)


def _num_bytes(data: Any) -> int:
    return sum(leaf.nbytes for leaf in keras.tree.flatten(data) if leaf is not None)


def _check_inputs(model: keras.Model, inputs: Any) -> None:
    """Raises if inputs do not have the number and the shapes that a functional model says it takes."""
    functional = as_functional(model)
    if functional is None or not calls_own_graph(model):
        return
    expected = inputs_structure(functional)
    symbols = keras.tree.flatten(expected)
    names = sorted(expected) if isinstance(expected, dict) else [symbol.name for symbol in symbols]
    if len(names) != len(symbols):  # a structure within a structure: Keras says what is wrong with it
        return
    leaves = keras.tree.flatten(inputs)
    if isinstance(inputs, dict):
        missing = [name for name in names if name not in inputs]
        if missing:
            raise UserError(
                f"inputs of {model.name}: expected {', '.join(names)}. Received: {', '.join(map(str, inputs))}; "
                f"add {', '.join(missing)}"
            )
        leaves = [inputs[name] for name in names]
    if len(leaves) != len(symbols):
        which = f" ({', '.join(names)})" if len(names) > 1 else ""
        raise UserError(
            f"inputs of {model.name}: expected {count_text(len(symbols), 'array')}{which}. Received: {len(leaves)}"
        )
    for name, symbol, leaf in zip(names, symbols, leaves, strict=True):
        if leaf is None or keras.tree.is_nested(leaf):
            continue
        shape, allowed = tuple(leaf.shape[1:]), tuple(symbol.shape[1:])
        # Keras adds or removes a last axis of one.
        if not any(fits(one, allowed) for one in (shape, (*shape, 1), *([shape[:-1]] if shape[-1:] == (1,) else []))):
            which = f" {name}" if len(symbols) > 1 else ""
            raise UserError(
                f"inputs{which} of {model.name}: expected shape {shape_text(allowed)}. Received: {shape_text(shape)}"
            )
