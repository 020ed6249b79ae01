"""Checks before the first update that a model computes the same values for a split batch as for the whole batch."""

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

# Rounding error of a pass, relative to the weights.
_NOISE = 1e-6
_LAST = 10**9
# Number of trials of a user-defined step, and number of samples from which their batches are drawn.
_NUM_TRIALS, _NUM_SAMPLED = 3, 64
# Relative rounding error of a sum for each dtype: four of its last bits.
_LOST = {"float64": 2.0**-50, "float32": 2.0**-21, "float16": 2.0**-8, "bfloat16": 2.0**-5}
_were_asked_for_draws: ModelCache[bool] = ModelCache()
_WITH_KERAS = "use keras.random with a keras.random.SeedGenerator that the layer holds"


def check_first_step(
    model: keras.Model, config: Config, strategy: Strategy, reader: Reader, *, with_loss: bool = True
) -> None:
    """Compares a training forward pass on one device with the same pass split over all devices, on a few samples.

    The check also runs before the first evaluation or prediction of an untrained model. No variable changes.

    The batch has `4 * num_replicas - 1` samples, so it contains padding. If one replica holds all rows of each
    micro-batch, the check compares a micro-batch with the whole batch. JAX without `accumulate` computes the whole
    batch as one program, so there is nothing to compare.

    If a layer mixes samples, the check makes each device call this layer with the rows of all devices. The check raises
    an error if this is not possible.

    Args:
        model: a built, compiled and portable model. `kerasdp.step.row_search` has already examined it.
        config: the configuration of the run. With `check="off"`, nothing is compared.
        strategy: the strategy of the run.
        reader: the reader of the training data.
        with_loss: whether to compare the loss, too. False for a prediction.

    Raises:
        UserError: if the outputs of layers, the outputs of the model or the loss differ by more than rounding error.
            The message names the first layer whose outputs differ.
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
                f"{mixing} of {model.name} mixes the samples of a batch, so each device computes this layer for the "
                "whole batch, and training takes longer; no change is needed"
            )
    if text:
        whole = "without --accumulate" if config.accumulate > 1 else (
            "on one device, or with --backend=jax and --strategy=data, which computes the whole batch as one program"
        )  # fmt: skip
        raise UserError(
            f"{model.name} computes different values for a split batch than for the whole batch, first in {name} "
            f"({text}, for {num_rows} samples). Code at or before this point mixes the samples of a batch (a mean over "
            "axis 0, a product of samples). Or this code draws different random numbers for a shard than for the whole "
            f"batch; train {whole}, or ignore the difference with --check=off"
        )
    row_layout_of(model).checked |= {"outputs", "loss"} if with_loss else {"outputs"}


def _first_of_all(model: keras.Model, strategy: Strategy, reader: Reader, with_loss: bool) -> tuple[str, str, int]:
    """Returns the first difference between a pass on the whole batch and a pass on a shard, on any rank.

    Returns:
        The name of the layer or result that differs, a text about its values, and the number of rows of the whole
        batch. If nothing differs, the name and the text are empty. All ranks get the same result.

    Raises:
        UserError: if two passes of the model on the whole batch compute different values.
    """
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
            f"{drawn[1]} of {model.name} computes different values each time for the same samples. Random numbers "
            f"that are not from keras.random would differ between devices; {_WITH_KERAS}, train on one device, or "
            "ignore the difference with --check=off"
        )
    return name, text, whole.rows


def _warn_of_other_draws(model: keras.Model, strategy: Strategy, reader: Reader) -> None:
    """Warns about user-defined layers that draw random numbers without `keras.random`.

    Random numbers from other sources differ between backends.
    """
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
        # A model that fails on a few samples may work on a batch.
        strategy.each_replica(lambda: call_in_training(model, rows_of(inputs, slice(None))))
    for (_, restore), state in zip(generators, kept):
        restore(state)
    for name in culprits:
        report.warn(
            f"layer {name} of {model.name} draws random numbers that are not from keras.random, so training "
            f"differs between backends. On jax and tensorflow, all steps use the same numbers; {_WITH_KERAS}"
        )


def _is_user_defined(layer: keras.layers.Layer) -> bool:
    kind = type(layer)
    is_known = is_of_keras(kind) or kind.__module__ == BatchNormalization.__module__
    return not is_known or isinstance(layer, keras.layers.Lambda)


def _calls_with_all_rows(model: keras.Model, name: str) -> bool:
    """Makes each device call a layer with the rows of all devices. Returns False if this is not possible."""
    layer, layout = dict(layers_within(model)).get(name.removeprefix("layer ")), row_layout_of(model)
    if layer is None or not layout.can_call_with_all_rows(layer):
        return False
    layout.mixing[id(layer)] = layer
    return True


def _check_custom_step(model: keras.Model, strategy: Strategy, reader: Reader) -> None:
    """Compares a user-defined `train_step` on a split batch with the same step on the whole batch.

    The check compares the values that optimizers and metrics get, and the values of variables after the step.

    A step is wrong if it divides by a value of its shard (a number of tokens, a sum of weights). One trial does not
    detect this error if all shards happen to have the same value. So the check runs several trials, with different rows
    and different random numbers.

    Raises:
        UserError: if the results differ by more than rounding error.
    """
    samples = reader.sample(max(_NUM_SAMPLED, 4 * strategy.split.num_replicas - 1))
    for number, rows in enumerate(_rows_of_trials(samples, 4 * strategy.split.num_replicas - 1)):
        _compare_custom_step(model, strategy, take_rows(samples, rows), number)


def _rows_of_trials(samples: Any, num_rows: int) -> list[np.ndarray]:
    """Returns the indices of the samples in the batch of each trial.

    The first trial has the first samples. In the second trial, the first half of the replicas gets the most unusual
    samples, and the second half gets the least unusual samples. All further trials have random samples.

    A sample is unusual if its mean, or its share of zeros, negative values or maximum values, differs from most
    samples. Padding, ignored labels and masks consist of zeros, negative values or maximum values.
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
                far = ((counts - counts.mean()) / counts.std()) ** 3  # rare values get the highest score
                score = score + far * (1.0 if far.mean() >= 0 else -1.0)
    unusual = np.argsort(-np.broadcast_to(score, size), kind="stable")
    half, others = -(-num_rows // 2), np.random.RandomState(0)
    trials = [np.arange(num_rows), np.concatenate([unusual[:half], unusual[half - num_rows :]])]
    return trials + [others.permutation(size)[:num_rows] for _ in range(_NUM_TRIALS - len(trials))]


def _compare_custom_step(model: keras.Model, strategy: Strategy, data: Any, number: int) -> None:
    """Runs one trial of `_check_custom_step` on the given samples.

    Args:
        model: the model with the user-defined step.
        strategy: the strategy of the run.
        data: the samples of this trial.
        number: the number of the trial. Each trial draws different random numbers.
    """
    batch = strategy.shard_batch(batch_of(data, dataclasses.replace(strategy.split, micro_batch_rows=None)))

    def begun(noise: float = 0.0) -> list[np.ndarray]:
        """Assigns the start values of the trial to the variables, and returns these values."""
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
            f"{title} computes a different {drawn[0]} each time for the same batch. With random numbers that are not "
            "from keras.random, all devices would draw the same values for different rows; use keras.random with a "
            "keras.random.SeedGenerator that the model holds, or train on one device"
        )
    if differing:
        function = getattr(model, "function", type(model).train_step)
        raise UserError(
            f"{title} computes different values for a split batch than for the whole batch, first in the "
            f"{differing[0]}{_line_of(function)}. A loss must be a mean over independent samples. If the step computes "
            "a value from several samples (a number of tokens, a sum of weights), compute it from kerasdp.all_rows. "
            "Otherwise train on one device or with --backend=jax, or ignore the difference with --check=off"
        )


def _line_of(function: Any) -> str:
    """Returns the file and the first line of a function as text; an empty string if the function has no source file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f", {code.co_filename}:{code.co_firstlineno}"


def _by_name(model: keras.Model, in_step: list[tuple[str, Any]], before: list[np.ndarray]) -> dict[str, Any]:
    """Returns by name the values that a step recorded, and the change of each variable.

    Args:
        model: the model that ran the step.
        in_step: the recorded values, with their names.
        before: the values of the variables before the step.
    """
    found = {
        f"{name} (number {number + 1})": to_array(tensor)
        for number, (name, tensor) in enumerate(in_step)
        if tensor is not None
    }
    for variable, array in zip(model.variables, before):
        after = to_array(variable.value)
        if not (after == array).all():
            change = after.astype("float64") - array
            # The appended value makes `is_close` accept the rounding error of a small change to a large value.
            lost = np.abs(after.astype("float64")).max() * _LOST.get(variable.dtype, 0.0) / tolerance_of(variable)
            found[f"value of {variable.path}"] = np.append(change, lost).astype(after.dtype)
    return {name: keras.ops.convert_to_tensor(array) for name, array in found.items()}  # copies of the current values


def _is_alike(whole: dict[str, Any], split: dict[str, Any], name: str, noisy: dict[str, Any] | None = None) -> bool:
    if name not in whole or name not in split:
        return False
    tolerance = _tolerance(whole[name], noisy and noisy.get(name))
    return is_close(to_array(whole[name]), to_array(split[name]), tolerance)


def _passes_in_turn(model: keras.Model, inputs: Any) -> tuple[ShardPass, list[ShardPass]]:
    """Runs the layers on a whole batch and then on one micro-batch, in this process; returns both passes.

    Batch norm uses its moving statistics in both passes. With the statistics of the batch, a micro-batch would differ
    from the whole batch. That difference is not an error.
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
    """Makes batch norms use the statistics of the global batch within this context.

    Separate statistics on each replica are an option of the run. The differences that they cause are not an error.
    """
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
    """Runs a training forward pass on one device.

    Args:
        model: the model to run.
        data: inputs, targets and sample weights.
        with_loss: whether to compute the loss.
        noise: the relative change of each weight and each input value, up or down. The inputs must change, too: if all
            inputs are equal, a batch norm outputs only rounding errors.
    """
    inputs, targets, sample_weight = rows_of((with_noise(data[0], noise), *data[1:]), slice(None))
    # One scope for outputs and loss: it holds the activity penalties.
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
    """Returns the index and the name of the first tensor that differs between two passes, and a text about its values.

    If no tensor differs, the index is `_LAST`, and the name and the text are empty.

    Args:
        whole: the pass on the whole batch.
        shard: the pass on a replica's shard.
        noisy: a pass on the whole batch with rounding errors added to the weights. Deep nets with batch norm amplify
            these errors. A difference of `shard` that is not larger than the difference of `noisy` is not an error.
    """
    of_shard, of_noisy = _named(shard), {} if noisy is None else _named(noisy)
    for place, (key, (name, expected)) in enumerate(_named(whole).items()):
        if isinstance(key, int) and any(expected is each for each in whole.layers.values()):
            continue  # compared above; the outputs of a large vocabulary are gigabytes
        if key not in of_shard:
            return place, name, "not called for the split batch"
        received, tolerance = of_shard[key][1], _tolerance(expected, of_noisy.get(key, (name, None))[1])
        # The outputs may be of all rows, and then have the shape of the whole outputs.
        if not _is_shard(expected, received, whole.rows, shard, tolerance):
            return place, name, _size(expected, received)
    return _LAST, "", ""


def _named(one: ShardPass) -> dict[Any, tuple[str, Any]]:
    """Returns the tensors of a pass in order, each with its name for messages. The keys of outputs are integers."""
    return (
        {key: (f"layer {layer_name(key)}", tensor) for key, tensor in one.layers.items()}
        | {number: ("the outputs", tensor) for number, tensor in enumerate(one.outputs) if tensor is not None}
        | ({} if one.loss is None else {"loss": ("the loss", one.loss)})
    )


def _tolerance(expected: Any, noisy: Any) -> float:
    """Returns the largest allowed difference of a tensor, relative to its largest value.

    If rounding errors change a value of an integer tensor (the expert of a token, the entry of a codebook), any
    difference is allowed.

    Args:
        expected: the tensor, computed for the whole batch.
        noisy: the same tensor, computed with rounding errors added to the weights; None without such a pass.
    """
    if noisy is None:
        return tolerance_of(expected)
    own, other = to_array(expected), to_array(noisy)
    if own.dtype.kind not in "fc" and (own != other).any():
        return math.inf
    own, other = own.astype("float64"), other.astype("float64")
    return max(tolerance_of(expected), 10 * float(np.abs(own - other).max(initial=0) / np.abs(own).max(initial=1e-30)))


def _is_shard(whole_tensor: Any, own_tensor: Any, total_rows: int, shard: ShardPass, tolerance: float) -> bool:
    """Returns whether a tensor holds a shard's rows of the whole tensor, on any axis and in any `RowOrder`."""
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
    """Returns whether `own` is one contiguous section of `whole`, if rows have different numbers of entries on axis 0.

    Axis 0 holds the entries of the first row, then the entries of the next row. Padding follows the last row. If the
    values are indices of nodes or rows, the indices in `own` may count from the first entry of the section.
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
    places = range(len(whole) - (shard.num_rows if is_padded else len(own)) + 1)  # a row has at least one entry
    return any(is_at(place) for place in places if not is_padded or place + len(own) >= len(whole))


def _size(expected: Any, received: Any) -> str:
    expected, received = to_array(expected), to_array(received)
    if expected.ndim != received.ndim:
        return f"shape {expected.shape} for the whole batch, {received.shape} for the split batch"
    largest = (float(np.abs(array).max(initial=0.0)) for array in (expected, received))
    return "largest value {:.4g} for the whole batch, {:.4g} for the split batch".format(*largest)
