"""Refuses data that a model or its loss cannot learn from, before the first step and in the same words on each backend.

Backends differ in what they do with it: labels that are out of range are an IndexError with torch, 94 lines with
TensorFlow, and another training, without a word, with JAX.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.data.batch import Batch, Reader, SampleReader
from kerasdp.data.sources import ArraySource, refuse_strings
from kerasdp.errors import NonFiniteLossError, UserError
from kerasdp.keras_compat.layers import is_of_keras
from kerasdp.keras_compat.models import (
    as_functional,
    calls_own_graph,
    inputs_structure,
    last_activation,
    loss_options,
    output_symbols,
    symbols_of,
)
from kerasdp.run_state import RunState

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
        raise UserError(f"{model.name} is not compiled: call model.compile(...) first")
    _check_inputs(model, batch.inputs)
    if is_validation:
        refuse_nan_inputs(model, reader, batch)
    if not with_targets or not _has_usual_loss(model):
        return
    symbols = output_symbols(model, symbols_of(batch.inputs, len(batch.indices)))
    if symbols is None:
        return
    check = functools.partial(_check_targets, model, symbols)
    source = reader.source if isinstance(reader, SampleReader) else None
    looks_at_all = isinstance(source, ArraySource) and _num_bytes(source.all_targets) <= MOST_LOOKED_THROUGH
    if isinstance(source, ArraySource) and looks_at_all:  # so that all ranks, each with other rows, name one sample
        check(*source.all_targets, np.arange(source.num_samples), "")
    else:
        check(batch.targets, batch.sample_weight, batch.own_indices, "")
    if not is_validation:
        _check_activations(model, symbols, batch.targets, is_chief=reader.shard[0] == 0)
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
        _refuse_nan("inputs", whole.inputs, whole.own_indices, "", only_nan=True)
    except UserError:
        outputs = keras.tree.flatten(model(keras.tree.map_structure(keras.ops.convert_to_tensor, whole.inputs)))
        if not all(np.isfinite(keras.ops.convert_to_numpy(output)).all() for output in outputs):
            raise


def name_culprit(error: NonFiniteLossError, reader: Reader, state: RunState) -> NonFiniteLossError:
    """Returns the error with the sample that is to blame instead of advice, if the batch of that step shows one."""
    number = state.batch - 1 - (state.step - error.step)
    batch = reader.whole(state.epoch, number) if number >= 0 else None
    if batch is None:
        return error
    try:
        for name in ("inputs", "targets", "sample_weight"):
            _refuse_nan(name, getattr(batch, name), batch.indices, "")
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
        _require_names(f"inputs of {model.name}", names, inputs)
        leaves = [inputs[name] for name in names]
    if len(leaves) != len(symbols):
        which = f" ({', '.join(names)})" if len(names) > 1 else ""
        raise UserError(
            f"inputs of {model.name}: expected {_count_text(len(symbols), 'array')}{which}. Received: {len(leaves)}"
        )
    for name, symbol, leaf in zip(names, symbols, leaves, strict=True):
        if leaf is None or keras.tree.is_nested(leaf):
            continue
        if symbol.dtype != "string":
            refuse_strings(leaf, "inputs")
        shape, allowed = tuple(leaf.shape[1:]), tuple(symbol.shape[1:])
        # Keras adds or removes a last axis of one.
        if not any(_fits(one, allowed) for one in (shape, (*shape, 1), *([shape[:-1]] if shape[-1:] == (1,) else []))):
            which = f" {name}" if len(symbols) > 1 else ""
            raise UserError(
                f"inputs{which} of {model.name}: expected shape {_shape_text(allowed)}. Received: {_shape_text(shape)}"
            )


def _require_names(title: str, names: list[str], data: dict[str, Any]) -> None:
    missing = [name for name in names if name not in data]
    if missing:
        raise UserError(
            f"{title}: expected {', '.join(names)}. Received: {', '.join(map(str, data))}; add {', '.join(missing)}"
        )


_SPARSE = ("sparse_categorical_crossentropy",)
_ONE_HOT = ("categorical_crossentropy", "categorical_focal_crossentropy", "categorical_hinge")
_BINARY = ("binary_crossentropy", "binary_focal_crossentropy")
_ELEMENTWISE = (
    *_BINARY, "cosine_similarity", "hinge", "huber", "kl_divergence", "log_cosh", "mean_absolute_error",
    "mean_absolute_percentage_error", "mean_squared_error", "mean_squared_logarithmic_error", "poisson",
    "squared_hinge",
)  # fmt: skip
_OF_PROBABILITIES = (*_SPARSE, *_BINARY, "categorical_crossentropy", "categorical_focal_crossentropy")
_NAMES = {getattr(keras.losses, name): name for name in (*_SPARSE, *_ONE_HOT, *_ELEMENTWISE)}


@dataclasses.dataclass(frozen=True)
class _Output:
    """An output of a model that has a built-in loss.

    Args:
        title: what its targets are called in messages.
        loss: name of the loss, as in `keras.losses`.
        options: arguments of that function.
        symbol: `KerasTensor` of the output.
    """

    title: str
    loss: str
    options: dict[str, Any]
    symbol: Any

    @property
    def class_axis(self) -> int:
        """Returns the axis of the output that holds a number for each class."""
        return self.options.get("axis", -1) % len(self.symbol.shape)


def _check_targets(
    model: keras.Model, symbols: Any, targets: Any, sample_weight: Any, indices: np.ndarray, title: str
) -> None:
    """Raises if something is wrong with targets or sample weights; `indices`: their places in the data set."""
    for output, target in _outputs(model, symbols, targets, title):
        _refuse_nan(output.title, target, indices, "")
        _check_shape(output, target.shape)
        if output.loss in _SPARSE:
            _check_labels(output, target, indices)
        if sample_weight is not None and not keras.tree.is_nested(sample_weight):
            _check_weight_shape(output, sample_weight.shape, title)
    _refuse_nan("sample_weight", sample_weight, indices, title)


def _outputs(model: keras.Model, symbols: Any, targets: Any, title: str) -> list[tuple[_Output, np.ndarray]]:
    """Returns the outputs that have a built-in loss, each with its targets, where the structures tell them."""
    losses = model.loss
    names = list(symbols) if isinstance(symbols, dict) else list(getattr(model, "output_names", None) or [])
    if not keras.tree.is_nested(symbols):
        symbols, names = [symbols], names[:1]
    flat = list(symbols.values()) if isinstance(symbols, dict) else list(symbols)
    if any(keras.tree.is_nested(symbol) for symbol in flat) or (isinstance(targets, dict) and not names):
        return []
    if not isinstance(losses, (dict, list, tuple)):
        losses = [losses] * len(flat)
    elif isinstance(losses, dict):
        losses = [losses.get(name) for name in names]
    given = [targets[name] for name in names if name in targets] if isinstance(targets, dict) else targets
    given = list(given) if isinstance(given, (list, tuple)) else [given]
    num_losses = sum(loss is not None for loss in losses)
    if targets is None:
        if num_losses:
            raise UserError(f"{title}targets of {model.name}: expected an array, since it has a loss. Received: none")
        return []
    if len(given) not in (len(flat), num_losses):
        if isinstance(targets, dict):
            needed = [name for name, loss in zip(names, losses) if loss is not None]
            _require_names(f"{title}targets of {model.name}", needed, targets)
        raise UserError(
            f"{title}targets of {model.name}: expected {_count_text(len(flat), 'array')}, one an output. Received: "
            f"{len(given)}"
        )
    if len(losses) != len(flat) or len(given) != len(flat):
        return []
    found = []
    for number, (loss, symbol, target) in enumerate(zip(losses, flat, given, strict=True)):
        loss = keras.losses.get(loss) if isinstance(loss, str) and loss.lower() not in ("crossentropy", "ce") else loss
        is_own = isinstance(loss, keras.losses.Loss) and not is_of_keras(type(loss))  # with any `call`
        name = _NAMES.get(getattr(loss, "fn", loss)) if callable(loss) and not is_own else None
        if name is not None and target is not None and not keras.tree.is_nested(target):
            which = f" of output {names[number]}" if len(flat) > 1 and len(names) == len(flat) else ""
            found.append((_Output(f"{title}targets{which}", name, dict(loss_options(loss)), symbol), target))
    return found


def _check_shape(output: _Output, received: tuple[int, ...]) -> None:
    """Raises if targets can be paired with the outputs by no rule of Keras (3.15)."""
    sizes, shape, axis = tuple(output.symbol.shape[1:]), tuple(received[1:]), output.class_axis - 1
    if not sizes:
        return
    labels, num_classes = (*sizes[:axis], *sizes[axis + 1 :]), sizes[axis]
    expected, meaning, hint = sizes, ", that of the outputs", ""
    if output.loss in _SPARSE:
        if _fits(shape, labels) or _fits(shape, (*sizes[:axis], 1, *sizes[axis + 1 :])):
            return
        expected, meaning = labels, f" for {output.loss}, one label for {_count_text(num_classes, 'output')}"
        if _fits(shape, sizes):
            hint = "; use categorical_crossentropy for one-hot labels, or y.argmax(-1)"
    elif _fits(shape, sizes) or (output.loss not in _ONE_HOT and _are_broadcast(shape, sizes)):
        return
    elif output.loss in _ONE_HOT:
        meaning = f" for {output.loss}, one-hot labels"
        if _fits(shape, labels) or _fits(shape, (*labels, 1)):
            hint = "; use sparse_categorical_crossentropy, or keras.utils.to_categorical(y)"
    raise UserError(
        f"{output.title}: expected shape {_shape_text(expected)}{meaning}. Received: {_shape_text(shape)}{hint}"
    )


def _are_broadcast(shape: tuple[int, ...], sizes: tuple[int | None, ...]) -> bool:
    """Returns whether NumPy's rules make two shapes equal, once Keras has added or removed a last axis of one."""
    if len(shape) == len(sizes) + 1 and shape[-1] == 1:
        shape = shape[:-1]
    elif len(sizes) == len(shape) + 1 and sizes[-1] == 1:
        shape = (*shape, 1)
    return len(shape) == len(sizes) and all(own == 1 or size in (own, 1, None) for own, size in zip(shape, sizes))


def _check_labels(output: _Output, labels: np.ndarray, indices: np.ndarray) -> None:
    """Raises if a label is no number of one of the outputs."""
    num_classes, ignored = output.symbol.shape[output.class_axis], output.options.get("ignore_class")
    if num_classes is None or not labels.size:
        return
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
    where = f"Received: {label:g} (sample {indices[place[0]]})"
    if label != int(label):
        raise UserError(f"{output.title}: expected whole numbers as labels for {output.loss}. {where}")
    instead = f"give the last layer {int(label) + 1} outputs or more, or correct the labels"
    if label < 0:
        instead = f"correct the labels, or give the loss ignore_class={int(label)}"
    raise UserError(
        f"{output.title}: expected labels from 0 to {num_classes - 1}, since the model has "
        f"{_count_text(num_classes, 'output')}. {where}; {instead}"
    )


def _check_weight_shape(output: _Output, received: tuple[int, ...], title: str) -> None:
    axis = output.class_axis
    sizes = tuple(size for number, size in enumerate(output.symbol.shape) if number not in (0, axis))
    shape = tuple(received[1:])
    if len(shape) == len(sizes) + 1 and shape[-1] == 1:
        shape = shape[:-1]
    if not shape and sizes == (1,):  # Keras (3.15) adds the axis
        return
    if len(shape) != len(sizes) or any(own not in (1, size) and size is not None for own, size in zip(shape, sizes)):
        raise UserError(
            f"{title}sample_weight: expected shape {_shape_text(sizes)}, that of the loss of each sample. Received: "
            f"{_shape_text(tuple(received[1:]))}"
        )


def _check_activations(model: keras.Model, symbols: Any, targets: Any, *, is_chief: bool) -> None:
    """Raises if a loss of logits gets probabilities; warns where it may be the other way round."""
    for output, _ in _outputs(model, symbols, targets, ""):
        if output.loss not in _OF_PROBABILITIES:
            continue
        layer, activation = last_activation(output.symbol)
        takes_logits = bool(output.options.get("from_logits"))
        if takes_logits and activation in ("softmax", "sigmoid"):
            raise UserError(
                f"layer {layer} of {model.name} gives probabilities ({activation}), but the loss {output.loss} has "
                "from_logits=True: leave out one of the two"
            )
        if is_chief and not takes_logits and activation == "linear":
            text = f"layer {layer} of {model.name} has no activation, but the loss {output.loss} expects probabilities"
            warnings.warn(f"{text}: add from_logits=True to the loss, or softmax or sigmoid to the layer", stacklevel=2)


def _refuse_nan(name: str, data: Any, indices: np.ndarray, title: str, only_nan: bool = False) -> None:
    """Raises if there is a number that is not finite, and says in which sample."""
    for leaf in keras.tree.flatten(data):
        if leaf is None or leaf.dtype.kind in "OUS":
            if leaf is not None and name != "inputs":
                raise UserError(f"{title}{name}: expected numbers. Received: {leaf.dtype}; encode classes as 0, 1, ...")
            continue
        # One pass without another array: a NaN is least and largest.
        if leaf.dtype.kind != "f" or not leaf.size or (np.isfinite(leaf.min()) and np.isfinite(leaf.max())):
            continue
        wrong = np.isnan(leaf) if only_nan else ~np.isfinite(leaf)
        if wrong.any():
            place = tuple(index[0] for index in np.nonzero(wrong))
            raise UserError(
                f"{title}{name}: expected finite numbers. Received: {leaf[place]} in sample {indices[place[0]]}; "
                "replace it, or leave the sample out"
            )


def _fits(shape: tuple[int, ...], allowed: tuple[int | None, ...]) -> bool:
    """Returns whether a shape is one of those allowed; None stands for any size."""
    return len(shape) == len(allowed) and all(size is None or size == own for own, size in zip(shape, allowed))


def _shape_text(sizes: tuple[Any, ...]) -> str:
    """Returns the shape of a batch in words; `sizes` are those of a sample."""
    return f"(samples, {', '.join('any' if size is None else str(size) for size in sizes)})".replace(", )", ",)")


def _count_text(number: int, what: str) -> str:
    """Returns a number of things in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"
