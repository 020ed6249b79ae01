"""Counts what a device needs for a training step, before the first, and chooses how that fits into its memory."""

import collections
import contextlib
import dataclasses
from typing import Any

import keras

from kerasdp.backends.base import SingleProcess, Strategy
from kerasdp.backends.parts import CutVariables
from kerasdp.checkpoint.names import names_in
from kerasdp.config import Config
from kerasdp.config.ladder import bytes_in, rungs
from kerasdp.data.batch import batch_of
from kerasdp.data.feed import Reader
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import all_layers
from kerasdp.keras_compat.models import own_steps
from kerasdp.keras_compat.optimizers import slots_by_weight
from kerasdp.pipeline.plan import make_plan
from kerasdp.portability.portable import batch_norms
from kerasdp.portability.remat import blocks_of, chosen_layers, rematerialize_in
from kerasdp.runtime.hardware import bytes_of_device
from kerasdp.sharding import bytes_of, numbers_in

PARTS = ("weights", "gradients", "optimizer", "activations")
# Rows of the smaller one of two passes that are counted.
_ROWS = 4
# What is to stay free: the count is not exact, and frameworks and drivers hold some memory.
_FREE = 0.1


@dataclasses.dataclass(frozen=True)
class Activations:
    """What a forward pass keeps for the backward pass, by layer.

    Args:
        layers: bytes with no rows, and bytes a row.
    """

    layers: dict[str, tuple[float, float]]

    def by_layer(self, rows: int) -> dict[str, int]:
        """Returns the bytes of each layer with so many rows on a replica."""
        return {name: max(0, round(constant + slope * rows)) for name, (constant, slope) in self.layers.items()}


def count_activations(model: keras.Model, reader: Reader, strategy: Strategy, remat: str) -> Activations | None:
    """Counts what two forward passes of few rows keep; no variable changes. None where that cannot be told.

    With `Config.remat`, whose layers are marked afterwards, what is there while one is computed once more is added.
    """
    if "train_step" in own_steps(model) or model.optimizer is None:
        return None
    chosen = rematerialize_in(model, remat)
    kept = _count(model, reader, strategy)
    if kept is None or not chosen:
        return kept
    rematerialize_in(model, "none")
    whole = _count(model, reader, strategy)
    rematerialize_in(model, remat)
    return whole and _with_again(model, chosen, whole, kept)


def _with_again(
    model: keras.Model, chosen: list[keras.layers.Layer], whole: Activations, kept: Activations
) -> Activations:
    """Adds to `kept` what is there while the largest of some layers is computed once more: as much, and gradients.

    What the blocks after the last of these layers keep is gone by then. `whole`: without rematerialization.
    """
    spared = [sum(each[part] for each in whole.layers.values()) for part in (0, 1)]
    # In place of what names do not tell apart, as those of tensorflow's graphs: that of the mean.
    mean = [(spared[part] - sum(each[part] for each in kept.layers.values())) / len(chosen) for part in (0, 1)]
    largest = max((*_of_each(model, chosen, whole), mean), key=lambda pair: pair[1])
    blocks = blocks_of(model)
    later = blocks[max((blocks.index(layer) for layer in chosen if layer in blocks), default=len(blocks)) + 1 :]
    gone = [sum(part) for part in zip((0, 0), *(own if own[1] else mean for own in _of_each(model, later, whole)))]
    constant, slope = (max(0.0, 2 * one - other) for one, other in zip(largest, gone))
    return Activations(kept.layers | {"what is computed once more": (constant, slope)})


def _of_each(model: keras.Model, some: list[keras.layers.Layer], whole: Activations) -> list[list[float]]:
    """Returns bytes, and bytes a row, that each of some layers keeps; those of one name have equal shares."""
    num_with = collections.Counter(layer.name for layer in all_layers(model))
    names = [[layer.name for layer in all_layers(one)] for one in some]
    return [
        [sum(whole.layers.get(name, (0.0, 0.0))[part] / num_with[name] for name in own) for part in (0, 1)]
        for own in names
    ]


def _count(model: keras.Model, reader: Reader, strategy: Strategy) -> Activations | None:
    def kept(rows: int) -> dict[str, int] | None:
        sample = reader.sample(rows * strategy.num_replicas)
        return strategy.bytes_kept(model, strategy.shard_batch(batch_of(sample, strategy.split, strategy.shard)))

    if (few := kept(_ROWS)) is None or (more := kept(2 * _ROWS)) is None:
        return None
    # XLA computes the rows of all replicas in one program.
    counted = _ROWS * (1 if strategy.splits_batches else strategy.num_replicas)
    slopes = {name: (more.get(name, 0) - few.get(name, 0)) / counted for name in more | few}
    return Activations({name: (few.get(name, 0) - counted * slope, slope) for name, slope in slopes.items()})


def count_each(model: keras.Model, reader: Reader, strategy: Strategy, config: Config) -> dict[str, Activations | None]:
    """Counts the activations with `Config.remat` as asked, and as `Config.fit_into` may choose it."""
    if config.strategy != "data":
        return {config.remat: None}
    found = {config.remat: count_activations(model, reader, strategy, config.remat)}
    if config.fit_into is not None and config.remat == "none" and (whole := found["none"]) is not None:
        with contextlib.suppress(UserError):  # there are no blocks
            blocks = rematerialize_in(model, "blocks")
            if (kept := _count(model, reader, strategy)) is not None:
                found |= _with_some(model, blocks, whole, kept)
        rematerialize_in(model, "none")
    return found


def _with_some(
    model: keras.Model, blocks: list[keras.layers.Layer], whole: Activations, kept: Activations
) -> dict[str, Activations]:
    """Returns the activations where a quarter of the blocks, a half, or more are computed once more, by their names.

    The first ones, whose activations are needed last. `whole`, `kept`: where none are, and all.
    """
    slopes = [slope for _, slope in _of_each(model, blocks, whole)]
    found = {}
    for count in dict.fromkeys(-(-len(blocks) * quarters // 4) for quarters in (1, 2, 3)):
        some, names = blocks[:count], ",".join(block.name for block in blocks[:count])
        if count < len(blocks) and chosen_layers(model, names) == some:
            part = sum(slopes[:count]) / sum(slopes) if sum(slopes) else count / len(blocks)
            found[names] = _with_again(model, some, whole, _mixed(whole, kept, part))
    return found | {"blocks": _with_again(model, blocks, whole, kept)}


def _mixed(whole: Activations, kept: Activations, part: float) -> Activations:
    """Returns the activations where that part of what could be spared is spared."""

    def mix(name: str) -> tuple[float, float]:
        (constant, slope), (less, smaller) = (each.layers.get(name, (0.0, 0.0)) for each in (whole, kept))
        return constant + part * (less - constant), slope + part * (smaller - slope)

    return Activations({name: mix(name) for name in whole.layers | kept.layers})


def model_bytes(
    model: keras.Model, weights: list[Any] | None = None, *, shard: str = "none", num_devices: int = 1
) -> dict[str, int]:
    """Returns the bytes that a device holds of a model, or a stage of some of its weights; `shard`: see `Config`."""
    of_weights, of_others = (num_devices if shard in held else 1 for held in (("weights",), ("weights", "optimizer")))
    # There each replica has all gradients, which it clips by norms.
    of_gradients = of_weights if keras.backend.backend() == "tensorflow" else of_others
    own = {id(variable): variable for variable in (model.variables if weights is None else weights)}
    optimizers = [model.optimizer] if model.optimizer is not None else []
    optimizers += [optimizer for _, optimizer in names_in(model).optimizers]
    held = {id(variable): variable for optimizer in optimizers for variable in optimizer.variables}
    if weights is not None:
        of_weight = slots_by_weight(model.optimizer)
        held = {key: variable for key, variable in held.items() if key in of_weight and id(of_weight[key][1]) in own}
    trainable = [variable for variable in model.trainable_variables if id(variable) in own]
    others = [variable for key, variable in own.items() if key not in {id(each) for each in trainable} | held.keys()]
    return {
        "num_trainable": numbers_in(trainable), "num_others": numbers_in(others),
        "weights": bytes_of([*trainable, *others], of_weights), "gradients": bytes_of(trainable, of_gradients),
        "optimizer": bytes_of(held.values(), of_others),
    }  # fmt: skip


def needed(model: keras.Model, activations: Activations | None, config: Config, num_devices: int) -> dict[str, Any]:
    """Returns the bytes that a device needs for a training step, by what they are for, and in all.

    `activations` of the layers are those of a full batch, of which `--accumulate` has a part at a time.
    """
    found: dict[str, Any] = model_bytes(model, shard=config.shard, num_devices=num_devices)
    rows = -(-config.replica_batch_size(config.num_replicas(num_devices)) // config.accumulate)
    layers = {} if activations is None else activations.by_layer(rows)
    largest = sorted(layers.items(), key=lambda each: -each[1])[:3]
    found |= {"activations": None if activations is None else sum(layers.values()), "largest": largest}
    return found | {"total": sum(found[part] or 0 for part in PARTS)}


def make_ladder(
    model: keras.Model, counted: dict[str, Activations | None], config: Config, num_devices: int
) -> dict[str, Any]:
    """Returns what fits into the memory that `Config.fit_into` names; `counted`: as `count_each` gives it.

    Returns:
        `rungs`, in the order of `kerasdp.config.ladder.rungs`, each with its flags, the choices they stand for, bytes
        as `needed` returns them, and whether it fits; `chosen`, the number of the first that does, or None; `budget`.

    Raises:
        UserError: if the need cannot be counted.
    """
    if counted[config.remat] is None:
        raise UserError(
            f"--fit_into: what {model.name} keeps for the backward pass is not known, for a train_step of its own, "
            "or a loop over time with tensorflow; leave it out"
        )
    budget, rows = budget_of(config, num_devices), []
    ladder = list(rungs(config, config.num_replicas(num_devices), tuple(counted)))
    can_be_cut = any(rung.shard != config.shard for _, rung in ladder) and _can_be_cut(model, config, num_devices)
    for flags, rung in ladder:
        is_split, is_cut = rung.accumulate > config.accumulate, rung.shard != config.shard
        if (is_split and not _takes_parts(model, rung, num_devices)) or (is_cut and not can_be_cut):
            continue
        need = needed(model, counted[rung.remat], rung, num_devices)
        changes = {name: value for name, value in vars(rung).items() if value != getattr(config, name)}
        rows.append({"flags": flags, "changes": changes, "fits": need["total"] <= (1 - _FREE) * budget, **need})
    chosen = next((number for number, row in enumerate(rows) if row["fits"]), None)
    # Weights, gradients and slots stay in float32.
    halved = None if config.precision in ("bfloat16", "float16") else rows[0]["total"] - rows[0]["activations"] // 2
    return {"budget": budget, "free": _FREE, "rungs": rows, "chosen": chosen, "with_bfloat16": halved}


def _takes_parts(model: keras.Model, rung: Config, num_devices: int) -> bool:
    """Returns whether a model trains alike in micro-batches: batch norm would see each by itself."""
    try:
        make_plan(model, rung, num_devices, SingleProcess().broadcast_from_rank0)
    except UserError:
        return False
    return not any(norm.trainable for norm in batch_norms(model))


def _can_be_cut(model: keras.Model, config: Config, num_devices: int) -> bool:
    """Returns whether a model's optimizer may have parts of the weights; on jax it sees the wholes."""
    try:
        return config.backend == "jax" or bool(CutVariables(model, config, num_devices).to_cut())
    except UserError:
        return False


def budget_of(config: Config, num_devices: int) -> int:
    """Returns the bytes that `Config.fit_into` names."""
    size = None if config.fit_into == "auto" else bytes_in(config.fit_into or "")
    found = size or bytes_of_device(str(config.backend), config.device, num_devices)
    if found is None:
        raise UserError("--fit_into=auto: the driver does not tell how much memory a device has; give it, as 24GB")
    return found
