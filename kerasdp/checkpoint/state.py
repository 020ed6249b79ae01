"""Gathers and restores the state of a training, in NumPy and JSON, the same on every backend and device count."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from kerasdp.checkpoint.names import GROUPS, is_unsure, named, names_in
from kerasdp.checkpoint.words import arguments_of, comparable, in_words
from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.keras_compat.optimizers import inner_optimizer, learning_rate_schedule
from kerasdp.keras_compat.settings import without_tensorflow
from kerasdp.portability.portable import batch_norms

# What two runs must have in common for one to resume the other.
_FLAGS = ("dataset", "seed", "batch_norm", "optimizer", "learning_rate", "lr_base_batch", "kernel_initializer")


def gather(model: keras.Model, groups: Iterable[str] = GROUPS) -> dict[str, np.ndarray]:
    """Returns copies of all variables: of the model (seeds of random layers among them), the optimizer and the metrics.

    They are named as in `kerasdp.checkpoint.names`.
    """
    return {name: _to_numpy(variable) for group in groups for name, variable in named(model, group)}


def restore(model: keras.Model, arrays: dict[str, np.ndarray], groups: Iterable[str]) -> None:
    """Gives variables the values that `gather` took, in whatever precision they have now.

    Args:
        model: built and, for the groups other than `"model"`, compiled.
        arrays: as `gather` gave them.
        groups: of `GROUPS`; `"loss_scale"` is skipped where there is none.

    Raises:
        UserError: if the model or the optimizer has other variables than were saved, or some that share a name.
    """
    for group in groups:
        known = {name: array for name, array in arrays.items() if name.startswith(f"{group}/")}
        variables = named(model, group)
        if group == "loss_scale" and not (known and variables):
            continue
        own = {name: tuple(variable.shape) for name, variable in variables}
        odd = next((name for name in (*own, *known) if name not in known or own.get(name) != known[name].shape), None)
        if odd is not None and group == "metrics" and (odd in known) != (odd in own):
            raise UserError(
                f"--resume: the checkpoint was written within an epoch, whose metrics were others: {odd} is only "
                f"{'in the checkpoint' if odd in known else 'in this run'}; resume with the metrics of then"
            )
        if odd is not None:
            raise UserError(
                f"the checkpoint is of another {group}: {odd} has shape {known[odd].shape if odd in known else 'none'} "
                f"there, {own.get(odd, 'none')} here"
            )
        unsure = next(filter(is_unsure, own), None)
        if unsure is not None:
            raise UserError(
                f"the checkpoint has several {unsure.rpartition(' ')[0]}, and {model.name} too: which is which cannot "
                "be told; give each layer a name or an attribute of its own, and train anew"
            )
        for name, variable in variables:
            variable.assign(known[name].astype(keras.backend.standardize_dtype(variable.dtype)))


def _to_numpy(variable: Any) -> np.ndarray:
    array = np.array(keras.ops.convert_to_numpy(variable))  # a copy: the next step writes over what it came from
    return array if array.dtype.kind in "fiub" else array.astype("float32")  # bfloat16 is a type of its own


def identity(config: Config, model: keras.Model, reader: Any, micro_batch_rows: int | None = None) -> dict[str, Any]:
    """Returns what must be the same for a run to resume: choices, model, optimizer, data, in words or as digests.

    Args:
        config: the run's choices.
        model: built and compiled.
        reader: of the training data, as in `kerasdp.data.feed`.
        micro_batch_rows: that a layer sees, if neither the global batch nor a replica's part of it.
    """
    with without_tensorflow():
        found = _identity(config, model, reader)
    if micro_batch_rows is not None and batch_norms(model):
        found["rows that a batch norm sees"] = micro_batch_rows
    return found


def _identity(config: Config, model: keras.Model, reader: Any) -> dict[str, Any]:
    batch = reader.first()
    optimizer, rate = _optimizer_in_words(model.optimizer)
    others = {f"{where} of the model": _optimizer_in_words(other) for where, other in names_in(model).optimizers}
    # Of rank 0, which holds the first row whatever the number of processes.
    first_row = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:1], batch.inputs)
    data = keras.tree.flatten((batch.indices, first_row, *reader.first_targets()))
    return {
        **{f"--{name}": getattr(config, name) for name in _FLAGS},
        "global batch": len(batch.indices),
        "batches an epoch": reader.num_batches,
        "first batch of the data": _digest(leaf for leaf in data if leaf is not None),
        "model": _architecture(model),
        "loss": in_words(model.loss),
        "optimizer": optimizer,
        "learning rate": rate,
        **{name: list(words) for name, words in others.items()},
    }


def _optimizer_in_words(optimizer: Any) -> tuple[Any, Any]:
    """Returns an optimizer by its arguments, and its learning rate or schedule."""
    optimizer = inner_optimizer(optimizer)
    schedule = learning_rate_schedule(optimizer)
    words = in_words(optimizer, without=("learning_rate", "loss_scale_factor"))
    if schedule is not None:
        return words, in_words(schedule)
    return words, float(np.float32(keras.ops.convert_to_numpy(optimizer.learning_rate)))


def check_identity(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Raises `UserError` if two identities differ, with the first difference."""
    for name in dict.fromkeys((*saved, *own)):
        if saved.get(name) != own.get(name):
            raise UserError(
                f"--resume: this run differs from the one in the workdir in {name}: expected {saved.get(name)!s:.300}. "
                f"Received: {own.get(name)!s:.300}; backend, devices and precision may change, this may not"
            )


def _architecture(model: keras.Model) -> str:
    """Returns a digest of layers and their arguments, without what depends on precision, process and backend."""
    parts = []
    for name, layer in sorted(names_in(model).layers, key=lambda pair: pair[0]):
        arguments = {} if isinstance(layer, keras.Model) else arguments_of(layer)
        parts.append([*([name] if name else []), type(layer).__name__, comparable(arguments)])
    return _digest([np.frombuffer(json.dumps(parts, sort_keys=True).encode(), "uint8")])


def _digest(arrays: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        array = np.asarray(array)
        # Data may come in the precision of the run.
        array = np.ascontiguousarray(array.astype("float32") if array.dtype.kind == "f" else array)
        digest.update(f"{array.shape}".encode())
        digest.update(array.reshape(-1).view("uint8").data)
    return digest.hexdigest()[:16]
