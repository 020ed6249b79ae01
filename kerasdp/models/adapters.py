"""Chooses what is trained of a model that is fine-tuned: adapters beside frozen weights (LoRA, arXiv:2106.09685)."""

import keras

from kerasdp.checkpoint.names import names_in
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import (
    all_layers,
    freeze_all_but,
    frozen_weights,
    hold_in,
    is_named,
    parts_of,
    takes_adapters,
)
from kerasdp.sharding import numbers_in

# The projections to which the paper adds adapters, as Keras, KerasHub and others call them.
_QUERIES_AND_VALUES = ("*query*", "*value*", "q_proj", "v_proj", "*/q_proj", "*/v_proj")
_Named = list[tuple[str, keras.layers.Layer]]


def add_adapters(
    model: keras.Model,
    rank: int,
    *,
    alpha: float | None = None,
    targets: str | None = None,
    also_train: str | None = None,
    frozen: str = "float32",
) -> str:
    """Adds adapters to layers of a model, and freezes all other weights: call it before `compile`.

    Args:
        model: built, its weights loaded.
        rank: of the adapters.
        alpha: what they give is multiplied by `alpha / rank`. None: by 1.
        targets: the layers, by patterns of names or paths, comma-separated. None: projections to queries and values;
            where there are none, every Dense and EinsumDense but the last.
        also_train: layers whose weights train, too, likewise. None: what a KerasHub task has beside its backbone.
        frozen: the type in which frozen weights lie, `"bfloat16"`, or `"float32"`, as they are.

    Returns:
        A line that says what was chosen, and how many weights train.

    Raises:
        UserError: if a pattern names nothing, or no layer that can have adapters.
    """
    layers = sorted(names_in(model).layers, key=lambda pair: pair[0])
    chosen = _targets(model, layers, targets)
    freeze_all_but(model, _others(model, layers, also_train))
    for _, layer in chosen:
        layer.enable_lora(rank, lora_alpha=alpha)
    if frozen != "float32":
        _hold_frozen_in(model, frozen)
    train, every = numbers_in(model.trainable_variables), numbers_in(model.weights)
    names = list(dict.fromkeys(layer.name for _, layer in chosen))
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"LoRA of rank {rank} on {len(chosen)} layers ({shown}): {train:,} of {every:,} weights train"


def _targets(model: keras.Model, layers: _Named, patterns: str | None) -> _Named:
    able = [pair for pair in layers if takes_adapters(pair[1])]
    if patterns is not None:
        return _named("--lora_targets", "layers that can have adapters", able, patterns)
    dense = [pair for pair in able if isinstance(pair[1], (keras.layers.Dense, keras.layers.EinsumDense))]
    of_attention = [pair for pair in dense if is_named(pair[1], _QUERIES_AND_VALUES, pair[0])]
    known = {id(layer) for _, layer in dense}
    last = next((id(layer) for layer in reversed(all_layers(model)) if id(layer) in known), None)
    found = of_attention or [pair for pair in dense if id(pair[1]) != last]
    if not found:
        raise UserError(
            f"--lora_rank: {model.name} has no Dense or EinsumDense layer before its last one; name layers that can "
            "have adapters by --lora_targets, or train all of it: --lora_rank=0"
        )
    return found


def _others(model: keras.Model, layers: _Named, patterns: str | None) -> list[keras.layers.Layer]:
    if patterns is not None:
        having = [pair for pair in layers if pair[1].weights]
        return [layer for _, layer in _named("--also_train", "layers with weights", having, patterns)]
    backbone = getattr(model, "backbone", None)
    within = {id(layer) for layer in all_layers(backbone)} if isinstance(backbone, keras.Model) else None
    return [] if within is None else [layer for _, layer in layers if id(layer) not in within]


def _named(flag: str, what: str, layers: _Named, patterns: str) -> _Named:
    """Returns the layers that patterns name. Raises `UserError` for a pattern that names none."""
    each = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in each:
        if not any(is_named(layer, [pattern], name) for name, layer in layers):
            some = ", ".join(name for name, _ in layers)
            raise UserError(
                f"{flag}: expected names or paths of {what}, as {some or 'none':.200}. Received: {pattern!r}"
            )
    return [(name, layer) for name, layer in layers if is_named(layer, each, name)]


def _hold_frozen_in(model: keras.Model, dtype: str) -> None:
    frozen = {id(variable) for variable in frozen_weights(model)}
    for layer in all_layers(model):
        own = [one for one, _ in parts_of(layer).variables if id(one) in frozen and one.dtype in ("float32", "float64")]
        if own:
            hold_in(layer, own, dtype)
