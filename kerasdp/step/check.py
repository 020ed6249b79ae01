"""Checks, before the first update on several devices, that the shards of a batch give what the whole batch gives."""

import contextlib
import dataclasses
import inspect
import itertools
import math
import pickle
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.config import Config
from kerasdp.contract import ShardPass, Strategy
from kerasdp.data.batch import Reader, batch_of
from kerasdp.data.sources import take_rows
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import all_layers, is_of_keras
from kerasdp.keras_compat.models import compute_loss, has_call, losses_of_whole_batch, own_steps
from kerasdp.keras_compat.patches import step_with
from kerasdp.reporting import report
from kerasdp.run_state import ModelCache
from kerasdp.same.layers import BatchNormalization
from kerasdp.same.portable import batch_norms
from kerasdp.same.random import generators_of
from kerasdp.same.replica_context import RowOrder
from kerasdp.step.custom_steps import leave_unchanged, title_of, try_whole_step
from kerasdp.step.observer import layer_name, layers_within, shard_outputs
from kerasdp.step.row_search import (
    NUM_ROWS,
    SHARD,
    call_in_training,
    explaining_trial,
    fixed_values,
    is_close,
    row_layout_of,
    rows_of,
    to_array,
    tolerance_of,
    trial,
    with_noise,
)

# Round-off of a pass, as a share of the weights.
_NOISE = 1e-6
_LAST = 10**9
# Trials of a user-defined step, and samples of which their batches are taken.
_NUM_TRIALS, _NUM_SAMPLED = 3, 64
# What a sum loses in a number type, as a share of the number: four of its last bits.
_LOST = {"float64": 2.0**-50, "float32": 2.0**-21, "float16": 2.0**-8, "bfloat16": 2.0**-5}
_were_asked_for_draws: ModelCache[bool] = ModelCache()
_WITH_KERAS = "use keras.random with a keras.random.SeedGenerator that the layer holds"


def check_first_step(
    model: keras.Model, config: Config, strategy: Strategy, reader: Reader, *, with_loss: bool = True
) -> None:
    """Compares a forward pass of training on a few samples, whole on one device, with one that is split over all.

    So before the first evaluation or prediction of a model that was not trained.

    The batch is uneven: one less than four samples a replica, so that there is padding as well. Where one replica has
    all rows of each micro-batch, a micro-batch is compared with the whole. No variable changes. jax without
    `accumulate` computes the whole batch as one program: there is nothing to compare.

    Args:
        model: built, compiled, made portable, and looked at by `kerasdp.step.row_search`.
        config: `check` is read.
        strategy: how the devices share the work.
        reader: of the training data.
        with_loss: whether there is a loss: not of a prediction.

    Raises:
        UserError: if layers, outputs or loss differ by more than round-off, with the first layer that does; a layer for
            which that can be mended is called with the rows of all devices from now on.
    """
    if config.check == "off":
        return
    if not (strategy.split.runs_on_shards or config.has_micro_batches):
        if strategy.processes.rank == 0 and has_call(model) and not own_steps(model):
            _warn_of_other_draws(model, strategy, reader)
        return
    if "train_step" in own_steps(model):
        _check_custom_step(model, strategy, reader)
        return
    name, text, num_rows = _first_of_all(model, strategy, reader, with_loss)
    while text and not config.has_micro_batches and _calls_with_all_rows(model, name):
        mixing, (name, text, num_rows) = name, _first_of_all(model, strategy, reader, with_loss)
        if name == mixing:
            break
        if strategy.processes.rank == 0:
            report.warn(
                f"{mixing} of {model.name} mixes the samples of a batch: each device computes it for the whole batch, "
                "which takes time"
            )
    if text:
        whole = "without --accumulate" if config.accumulate > 1 else (
            "on one device, with --backend=jax and --strategy=data, which computes the whole batch as one program"
        )  # fmt: skip
        raise UserError(
            f"{model.name} computes something else for some samples of a batch than for all of it, first in {name} "
            f"({text}, of {num_rows} samples): it, or what comes just before it, mixes the samples of a batch (a mean "
            f"over axis 0, a product of samples) or draws other random numbers for them; train {whole}, or, all the "
            "same, with --check=off"
        )
    row_layout_of(model).checked |= {"outputs", "loss"} if with_loss else {"outputs"}


def _first_of_all(model: keras.Model, strategy: Strategy, reader: Reader, with_loss: bool) -> tuple[str, str, int]:
    """Returns name and size of the earliest difference of all ranks, the same on each, and how many rows were tried."""
    again = noisy = None
    if not strategy.split.runs_on_shards:
        whole, shards = _passes_in_turn(model, reader.sample(NUM_ROWS)[0])
    else:
        num_rows = 4 * strategy.split.num_replicas - 1
        data = reader.sample(num_rows)
        with _statistics_of_whole_batch(model), explaining_trial(model.name, num_rows):
            batch = strategy.shard_batch(batch_of(data, dataclasses.replace(strategy.split, micro_batch_rows=None)))
            steps = strategy.shard_steps(model)
            shards = strategy.each_replica(lambda: steps.shard_pass(batch, with_loss))
            whole = _whole_pass(model, data, with_loss)
            if any(_first_difference(whole, shard)[2] for shard in shards):
                again, noisy = (_whole_pass(model, data, with_loss, noise) for noise in (0.0, _NOISE))
    drawn = _first_difference(whole, again) if again else (_LAST, "", "")
    found = [(drawn, _first_difference(whole, shard, noisy)) for shard in shards]
    drawn, (_, name, text) = map(min, zip(*itertools.chain(*strategy.processes.all_gather_object(found))))
    if drawn[2]:
        raise UserError(
            f"{drawn[1]} of {model.name} gives other numbers each time for the same samples: random numbers that are "
            f"not from keras.random would be others on each device; {_WITH_KERAS}, or train on one device, or, all the "
            "same, with --check=off"
        )
    return name, text, whole.rows


def _warn_of_other_draws(model: keras.Model, strategy: Strategy, reader: Reader) -> None:
    """Warns of a user-defined layer that draws past `keras.random`, and so otherwise with each backend."""
    layers = [layer for layer in all_layers(model) if _is_user_defined(layer)]
    if not layers or _were_asked_for_draws.get(model):
        return
    _were_asked_for_draws.put(model, True)
    generators = generators_of(layers)
    kept = [get() for get, _ in generators]
    before, culprits = pickle.dumps(kept), list[str]()

    def record(layer: keras.layers.Layer, outputs: Any) -> None:
        if not culprits and pickle.dumps([get() for get, _ in generators]) != before:
            culprits.append(layer.name)

    inputs = reader.sample(NUM_ROWS)[0]
    with contextlib.suppress(Exception), step_with(record=record), keras.StatelessScope():
        # What fails on a few samples may not on a batch.
        strategy.each_replica(lambda: call_in_training(model, rows_of(inputs, slice(None))))
    for (_, restore), state in zip(generators, kept):
        restore(state)
    for name in culprits:
        report.warn(
            f"layer {name} of {model.name} draws random numbers that are not from keras.random: each backend trains "
            f"something else (jax and tensorflow draw them once for all steps); {_WITH_KERAS}"
        )


def _is_user_defined(layer: keras.layers.Layer) -> bool:
    kind = type(layer)
    is_known = is_of_keras(kind) or kind.__module__ == BatchNormalization.__module__
    return not is_known or isinstance(layer, keras.layers.Lambda)


def _calls_with_all_rows(model: keras.Model, name: str) -> bool:
    """Lets each device call the layer of that name with the rows of all; returns whether that can be."""
    layer, layout = dict(layers_within(model)).get(name.removeprefix("layer ")), row_layout_of(model)
    if layer is None or not layout.can_call_with_all_rows(layer):
        return False
    layout.mixing[id(layer)] = layer
    return True


def _check_custom_step(model: keras.Model, strategy: Strategy, reader: Reader) -> None:
    """Compares what a user-defined `train_step` hands to optimizers and metrics, and what it leaves in variables.

    Where a step divides by what it finds in a batch (a number of tokens, a sum of weights), devices that find equally
    much by chance hide it. So it is tried several times, with other rows and other random numbers.

    Raises:
        UserError: if they differ by more than round-off.
    """
    samples = reader.sample(max(_NUM_SAMPLED, 4 * strategy.split.num_replicas - 1))
    for number, rows in enumerate(_rows_of_trials(samples, 4 * strategy.split.num_replicas - 1)):
        _compare_custom_step(model, strategy, take_rows(samples, rows), number)


def _rows_of_trials(samples: Any, num_rows: int) -> list[np.ndarray]:
    """Returns which samples are in the batch of each trial: the first ones, those that differ most, and others.

    The samples differ by how much of them is zero, negative, or the largest number, as padding, ignored labels and
    masks are. The first half of the replicas gets those that differ most from most others, the second half the usual.
    """
    score, size = np.zeros(1), 0
    for leaf in keras.tree.flatten(samples):
        if leaf is None:
            continue
        array = np.asarray(leaf).reshape(len(leaf), -1)
        size = len(array)
        counted = [array == 0, array == array.max(initial=0), array < 0, array] if array.dtype.kind in "biuf" else []
        for counts in (each.mean(axis=1, dtype="float64") for each in counted):
            if np.isfinite(counts).all() and np.ptp(counts) > 0:
                far = ((counts - counts.mean()) / counts.std()) ** 3  # what few samples have counts most
                score = score + far * (1.0 if far.mean() >= 0 else -1.0)
    unusual = np.argsort(-np.broadcast_to(score, size), kind="stable")
    half, others = -(-num_rows // 2), np.random.RandomState(0)
    trials = [np.arange(num_rows), np.concatenate([unusual[:half], unusual[half - num_rows :]])]
    return trials + [others.permutation(size)[:num_rows] for _ in range(_NUM_TRIALS - len(trials))]


def _compare_custom_step(model: keras.Model, strategy: Strategy, data: Any, number: int) -> None:
    """Does one trial of `_check_custom_step`, with these samples; `number`: others draw other random numbers."""
    batch = strategy.shard_batch(batch_of(data, dataclasses.replace(strategy.split, micro_batch_rows=None)))

    def begun(noise: float = 0.0) -> list[np.ndarray]:
        """Lets the step begin with other values of variables; returns these."""
        for variable, value in fixed_values(model, noise) if noise or number else ():
            is_seed = variable.name == "seed_generator_state"
            variable.assign(to_array(value) + np.asarray(1000 * number, variable.dtype) if is_seed else value)
        return [to_array(variable.value) for variable in model.variables]

    def on_one(noise: float = 0.0) -> dict[str, Any]:
        with leave_unchanged(model):
            before = begun(noise)
            found = try_whole_step(model, data, strategy)
            return _by_name(model, found, before)

    title = title_of(model, "train_step")
    with _statistics_of_whole_batch(model), explaining_trial(title, len(batch.indices)):
        with leave_unchanged(model):
            before = begun()
            steps = strategy.shard_steps(model)
            found, *_ = strategy.each_replica(lambda: steps.try_own_step(batch))
            split = _by_name(model, found, before)
            apart = [f"value of {path}" for path in strategy.diverged_variables(model)]
        whole = on_one()
        differing = [name for name in whole | split if not _is_alike(whole, split, name)]
        again = on_one() if differing else whole
        noisy = on_one(_NOISE) if differing else whole
    drawn = [name for name in differing if not _is_alike(whole, again, name)]
    differing = [*apart, *(name for name in differing if not _is_alike(whole, split, name, noisy))]
    found = strategy.processes.all_gather_object((drawn[:1], differing[:1]))  # all ranks report the same
    drawn, differing = (next(filter(None, names), []) for names in zip(*found))
    if drawn:
        raise UserError(
            f"{title} gives another {drawn[0]} each time for the same batch: random numbers that are not from "
            "keras.random would be the same on each device; use keras.random with a keras.random.SeedGenerator that "
            "the model holds, or train on one device"
        )
    if differing:
        function = getattr(model, "function", type(model).train_step)
        raise UserError(
            f"{title} does something else with a batch that is split over the devices than with all of it, first in "
            f"the {differing[0]}{_line_of(function)}: its losses must be means over the samples, each of which it "
            "looks at by itself, and its metrics must add up; what it takes of several samples (a number of tokens or "
            "boxes to divide by, a sum of weights, a comparison) must be that of all devices, by kerasdp.all_rows; or "
            "train on one device, with --backend=jax, or, all the same, with --check=off"
        )


def _line_of(function: Any) -> str:
    """Returns where a user's function begins, in words; nothing where that is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f", {code.co_filename}:{code.co_firstlineno}"


def _by_name(model: keras.Model, in_step: list[tuple[str, Any]], before: list[np.ndarray]) -> dict[str, Any]:
    """Returns what a step found, by name, and by how much it changed variables, of which `before` has the values."""
    found = {
        f"{name} (number {number + 1})": to_array(tensor)
        for number, (name, tensor) in enumerate(in_step)
        if tensor is not None
    }
    for variable, array in zip(model.variables, before):
        after = to_array(variable.value)
        if not (after == array).all():
            change = after.astype("float64") - array
            # Beside it, a number that makes `is_close` accept what is lost of a small change to a large value.
            lost = np.abs(after.astype("float64")).max() * _LOST.get(variable.dtype, 0.0) / tolerance_of(variable)
            found[f"value of {variable.path}"] = np.append(change, lost).astype(after.dtype)
    return {name: keras.ops.convert_to_tensor(array) for name, array in found.items()}  # as they are now


def _is_alike(whole: dict[str, Any], split: dict[str, Any], name: str, noisy: dict[str, Any] | None = None) -> bool:
    if name not in whole or name not in split:
        return False
    tolerance = _tolerance(whole[name], noisy and noisy.get(name))
    return is_close(to_array(whole[name]), to_array(split[name]), tolerance)


def _passes_in_turn(model: keras.Model, inputs: Any) -> tuple[ShardPass, list[ShardPass]]:
    """Returns what layers give for a whole batch, and for a micro-batch of it, in this process.

    Batch norm takes its moving statistics in both: those of micro-batches differ, as the user asked for.
    """
    passes = []
    for rows in (slice(0, NUM_ROWS), SHARD):
        with trial(model, row_layout_of(model), rows, is_micro_batch=True), shard_outputs(model) as layers:
            call_in_training(model, rows_of(inputs, rows))
        num_rows = rows.stop - rows.start
        passes.append(ShardPass(layers, [], None, first_row=rows.start, num_rows=num_rows, rows=num_rows))
    return passes[0], passes[1:]


@contextlib.contextmanager
def _statistics_of_whole_batch(model: keras.Model) -> Iterator[None]:
    """Lets batch norms take the statistics of the global batch: each replica's own are another training by choice."""
    norms = [layer for layer in batch_norms(model) if isinstance(layer, BatchNormalization)]
    kept = [layer.statistics for layer in norms]
    for layer in norms:
        layer.statistics = "sync"
    try:
        yield
    finally:
        for layer, statistics in zip(norms, kept):
            layer.statistics = statistics


def _whole_pass(model: keras.Model, data: tuple[Any, Any, Any], with_loss: bool, noise: float = 0.0) -> ShardPass:
    """Runs a forward pass of training on one device.

    `noise`: by how much each weight and each number of the inputs is changed, up or down, as a share of it. When
    all inputs are the same, a batch norm leaves round-off alone.
    """
    inputs, targets, sample_weight = rows_of((with_noise(data[0], noise), *data[1:]), slice(None))
    # One scope for both: it holds the penalties of activities.
    with keras.StatelessScope(fixed_values(model, noise), collect_losses=True):
        with shard_outputs(model) as layers:
            outputs = call_in_training(model, inputs)
        loss = None
        if with_loss:
            with losses_of_whole_batch():
                loss = compute_loss(model, inputs, targets, outputs, sample_weight, training=True)
    num_rows = len(keras.tree.flatten(inputs)[0])
    return ShardPass(layers, keras.tree.flatten(outputs), loss, first_row=0, num_rows=num_rows, rows=num_rows)


def _first_difference(whole: ShardPass, shard: ShardPass, noisy: ShardPass | None = None) -> tuple[int, str, str]:
    """Returns place, name and size of the first difference; without one the last place of all, and no text.

    `noisy`: the whole, with weights that differ by round-off. Deep nets with batch norm make much of it: what differs
    there as much as here is no fault.
    """
    of_shard, of_noisy = _named(shard), {} if noisy is None else _named(noisy)
    for place, (key, (name, expected)) in enumerate(_named(whole).items()):
        if key not in of_shard:
            if isinstance(key, int):  # the loss is not computed of the outputs of all
                continue
            return place, name, "it is not called"
        received, tolerance = of_shard[key][1], _tolerance(expected, of_noisy.get(key, (name, None))[1])
        # With a loss, outputs are those of the whole batch; those of a prediction are the replica's.
        if key == "loss" or (isinstance(key, int) and whole.loss is not None):
            is_alike = is_close(to_array(expected), to_array(received), tolerance)
        else:
            is_alike = _is_shard(expected, received, whole.rows, shard, tolerance)
        if not is_alike:
            return place, name, _size(expected, received)
    return _LAST, "", ""


def _named(one: ShardPass) -> dict[Any, tuple[str, Any]]:
    """Returns what a pass gave, in its order, each with its name for messages; outputs by their numbers."""
    return (
        {key: (f"layer {layer_name(key)}", tensor) for key, tensor in one.layers.items()}
        | {number: ("the outputs", tensor) for number, tensor in enumerate(one.outputs)}
        | ({} if one.loss is None else {"loss": ("the loss", one.loss)})
    )


def _tolerance(expected: Any, noisy: Any) -> float:
    """Returns how much a tensor may differ, as a share of its largest number.

    Whole numbers (the expert of a token, the entry of a codebook) may be any where round-off changes one of them.
    """
    if noisy is None:
        return tolerance_of(expected)
    own, other = to_array(expected), to_array(noisy)
    if own.dtype.kind not in "fc" and (own != other).any():
        return math.inf
    own, other = own.astype("float64"), other.astype("float64")
    return max(tolerance_of(expected), 10 * float(np.abs(own - other).max(initial=0) / np.abs(own).max(initial=1e-30)))


def _is_shard(whole_tensor: Any, own_tensor: Any, total_rows: int, shard: ShardPass, tolerance: float) -> bool:
    """Returns whether a tensor holds a shard's rows of the whole, wherever in it the rows are."""
    whole, own = to_array(whole_tensor), to_array(own_tensor)
    if shard.num_rows == 0:
        return True  # all of it is padding
    if whole.shape == own.shape:
        return is_close(whole, own, tolerance)
    differing = [axis for axis, sizes in enumerate(zip(whole.shape, own.shape)) if sizes[0] != sizes[1]]
    if len(whole.shape) != len(own.shape) or len(differing) != 1:
        return False
    (axis,) = differing
    others = own.shape[axis] // shard.rows
    whole, own = np.moveaxis(whole, axis, 0), np.moveaxis(own, axis, 0)
    if len(whole) != others * total_rows or len(own) != others * shard.rows:
        return _is_part(whole, own, shard, tolerance)
    size = others * shard.num_rows

    def is_at(order: RowOrder) -> bool:
        taken = []
        for array, first_row, rows in ((whole, shard.first_row, total_rows), (own, 0, shard.rows)):
            indices: Any = np.asarray(order.indices(size, shard.num_rows, first_row, rows))
            if (np.diff(indices) == 1).all():  # a view: outputs may be large
                indices = np.s_[indices[0] : indices[-1] + 1]
            taken.append(array[indices])
        return is_close(taken[0], taken[1], tolerance)

    return any(map(is_at, RowOrder))


def _is_part(whole: np.ndarray, own: np.ndarray, shard: ShardPass, tolerance: float) -> bool:
    """Returns whether one tensor is a part of another, where rows of several lengths are laid one after the other.

    Whole numbers may be counted from the part's first entry (nodes, rows). Padding is at the end, after the last row.
    """

    def is_at(place: int) -> bool:
        size = min(len(own), len(whole) - place)
        expected, received = whole[place : place + size], own[:size]
        if whole.dtype.kind in "iu" and (expected - received == (expected - received).flat[0]).all():
            return True
        return is_close(expected, received, tolerance)

    is_padded = shard.num_rows < shard.rows
    if not len(own) or (len(own) > len(whole) and not is_padded):
        return False
    places = range(len(whole) - (shard.num_rows if is_padded else len(own)) + 1)  # a row has an entry at least
    return any(is_at(place) for place in places if not is_padded or place + len(own) >= len(whole))


def _size(expected: Any, received: Any) -> str:
    expected, received = to_array(expected), to_array(received)
    if expected.ndim != received.ndim:
        return f"shape {expected.shape} on one, {received.shape} on several"
    largest = (float(np.abs(array).max(initial=0.0)) for array in (expected, received))
    return "largest number {:.4g} on one, {:.4g} on several".format(*largest)
