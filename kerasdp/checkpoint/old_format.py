"""Reads checkpoints of format 1, which named variables by their place in `model.variables`."""

import dataclasses
from typing import Any

import keras

from kerasdp.checkpoint.files import Checkpoint
from kerasdp.checkpoint.names import GROUPS, named, without_numbers
from kerasdp.checkpoint.state import digest_of_layers
from kerasdp.keras_compat.layers import all_layers
from kerasdp.keras_compat.settings import without_tensorflow


def converted(checkpoint: Checkpoint, model: keras.Model, identity: dict[str, Any]) -> Checkpoint:
    """Returns a checkpoint of format 1 as one of today's; one of today's as it is.

    Args:
        checkpoint: of either format.
        model: built and compiled; its order of variables is that of the one that was saved, or it is refused later.
        identity: of the run, in which a model that is the saved one by the old digest gets today's.
    """
    if checkpoint.format > 1:
        return checkpoint
    new_names = {}
    by_id = {id(variable): name for group in GROUPS for name, variable in named(model, group)}
    for group in ("model", "optimizer", "loss_scale", "metrics"):
        for place, variable in enumerate(_variables(model, group)):
            # A slot's path holds its optimizer's name, and, in one word, that of the variable it belongs to.
            path = variable.path.rpartition("/")[2] if group in ("optimizer", "loss_scale") else variable.path
            new_names[f"{group}/{place:04d} {without_numbers(path)}"] = by_id[id(variable)]
    arrays = {new_names.get(name, name): array for name, array in checkpoint.arrays.items()}
    saved = dict(checkpoint.state["identity"])
    with without_tensorflow():
        layers = (("", layer) for layer in all_layers(model, include_self=False))
        digest = digest_of_layers(layers, with_lines=True)
    if saved.get("model") == digest:
        saved["model"] = identity["model"]
    return dataclasses.replace(checkpoint, arrays=arrays, state=checkpoint.state | {"identity": saved})


def _variables(model: keras.Model, group: str) -> list[Any]:
    if group in ("model", "metrics"):
        return model.variables if group == "model" else model.metrics_variables
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = {id(variable) for variable in optimizer.inner_optimizer.variables}
        if group == "optimizer":
            return optimizer.inner_optimizer.variables
        return [variable for variable in optimizer.variables if id(variable) not in inner]
    return [] if optimizer is None or group == "loss_scale" else optimizer.variables
