"""Refuses targets and sample weights that the losses of a model cannot be computed for."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kerasdp.errors import UserError
from kerasdp.keras_compat.graph_ends import last_activation
from kerasdp.keras_compat.layers import is_of_keras
from kerasdp.keras_compat.models import loss_options

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


def target_check(model: keras.Model, symbols: Any, is_chief: bool) -> Callable[[Any, Any, np.ndarray, str], None]:
    """Returns a function of targets, sample weights, their places in the data set and a title, for what is wrong."""

    def check(targets: Any, sample_weight: Any, indices: np.ndarray, title: str) -> None:
        for output, target in _outputs(model, symbols, targets, title):
            refuse_nan(output.title, target, indices, "")
            _check_shape(output, target.shape, is_chief)
            if output.loss in _SPARSE:
                _check_labels(output, target, indices)
            if sample_weight is not None and not keras.tree.is_nested(sample_weight):
                _check_weight_shape(output, sample_weight.shape, title)
        refuse_nan("sample_weight", sample_weight, indices, title)

    return check


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
        needed = [name for name, loss in zip(names, losses) if loss is not None]
        missing = [name for name in needed if name not in targets] if isinstance(targets, dict) else []
        if missing:
            raise UserError(
                f"{title}targets of {model.name}: expected {', '.join(needed)}. Received: "
                f"{', '.join(map(str, targets))}; add {', '.join(missing)}"
            )
        raise UserError(
            f"{title}targets of {model.name}: expected {count_text(len(flat), 'array')}, one an output. Received: "
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


def _check_shape(output: _Output, received: tuple[int, ...], is_chief: bool) -> None:
    """Raises if targets can be paired with the outputs by no rule of Keras (3.15)."""
    sizes, shape = tuple(output.symbol.shape[1:]), tuple(received[1:])
    if not sizes:
        return
    axis = output.class_axis - 1
    num_classes, without_classes = sizes[axis], (*sizes[:axis], *sizes[axis + 1 :])
    if output.loss in _SPARSE:
        single = (*sizes[:axis], 1, *sizes[axis + 1 :])
        if fits(shape, without_classes) or fits(shape, single):
            return
        hint = "; use categorical_crossentropy for one-hot labels, or y.argmax(-1)" if fits(shape, sizes) else ""
        raise UserError(
            f"{output.title}: expected shape {shape_text(without_classes)} for {output.loss}, one label for "
            f"{count_text(num_classes, 'output')}. Received: {shape_text(shape)}{hint}"
        )
    if fits(shape, sizes):
        return
    if output.loss in _ONE_HOT:
        is_sparse = fits(shape, without_classes) or fits(shape, (*without_classes, 1))
        hint = "; use sparse_categorical_crossentropy, or keras.utils.to_categorical(y)" if is_sparse else ""
        raise UserError(
            f"{output.title}: expected shape {shape_text(sizes)} for {output.loss}, one-hot labels. Received: "
            f"{shape_text(shape)}{hint}"
        )
    # Keras adds or removes a last axis of one; then NumPy's rules make both equal, from the last axis on.
    if len(shape) == len(sizes) + 1 and shape[-1] == 1:
        shape = shape[:-1]
    elif len(sizes) == len(shape) + 1 and sizes[-1] == 1:
        sizes = sizes[:-1] if shape else sizes
        shape = shape or (1,)
    is_paired = len(shape) == len(sizes)
    if not is_paired or any(
        own != size and 1 not in (own, size) and size is not None for own, size in zip(shape, sizes)
    ):
        raise UserError(
            f"{output.title}: expected shape {shape_text(tuple(output.symbol.shape[1:]))}, that of the outputs. "
            f"Received: {shape_text(tuple(received[1:]))}"
        )
    if is_chief and any(own != size and size is not None for own, size in zip(shape, sizes)):
        _warn(
            f"{output.title} of shape {shape_text(tuple(received[1:]))} are repeated to meet outputs of shape "
            f"{shape_text(tuple(output.symbol.shape[1:]))}: is that what you mean?"
        )


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
        f"{count_text(num_classes, 'output')}. {where}; {instead}"
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
            f"{title}sample_weight: expected shape {shape_text(sizes)}, that of the loss of each sample. Received: "
            f"{shape_text(tuple(received[1:]))}"
        )


def check_activations(model: keras.Model, symbols: Any, targets: Any, is_chief: bool) -> None:
    """Raises if a loss of logits gets probabilities; warns where it may be the other way round."""
    for output, _ in _outputs(model, symbols, targets, ""):
        if output.loss in _OF_PROBABILITIES:
            _check_activation(model, output, is_chief)


def _check_activation(model: keras.Model, output: _Output, is_chief: bool) -> None:
    layer, activation = last_activation(output.symbol)
    takes_logits = bool(output.options.get("from_logits"))
    if takes_logits and activation in ("softmax", "sigmoid"):
        raise UserError(
            f"layer {layer} of {model.name} gives probabilities ({activation}), but the loss {output.loss} has "
            "from_logits=True: leave out one of the two"
        )
    if is_chief and not takes_logits and activation == "linear":
        _warn(
            f"layer {layer} of {model.name} has no activation, but the loss {output.loss} expects probabilities: add "
            f"from_logits=True to the loss, or softmax or sigmoid to the layer"
        )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def refuse_nan(name: str, data: Any, indices: np.ndarray, title: str, only_nan: bool = False) -> None:
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


def fits(shape: tuple[int, ...], allowed: tuple[int | None, ...]) -> bool:
    """Returns whether a shape is one of those allowed; None stands for any size."""
    return len(shape) == len(allowed) and all(size is None or size == own for own, size in zip(shape, allowed))


def shape_text(sizes: tuple[Any, ...]) -> str:
    """Returns the shape of a batch in words; `sizes` are those of a sample."""
    return f"(samples, {', '.join('any' if size is None else str(size) for size in sizes)})".replace(", )", ",)")


def count_text(number: int, what: str) -> str:
    """Returns a number of things in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"
