"""Tells which losses and metrics of a batch are sums over its rows: each replica may compute them of its own rows.

Those of Keras are known. Others are declared with `per_sample`, or tried on a few rows, as is what layers add.
"""

import contextlib
import enum
import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import keras
import numpy as np
from keras import ops

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import has_mask, is_of_keras, living_variables
from kerasdp.keras_compat.models import (
    compiled_loss,
    compiled_metrics,
    compiled_variables,
    is_metric_of_keras,
    loss_options,
    metric_function,
    output_losses,
    reducing_losses,
    update_compiled_metrics,
)
from kerasdp.keras_compat.patches import step_with
from kerasdp.portability.replica_context import FIRST, ReplicaContext, RowAxes


class Reduction(enum.Enum):
    """How a loss (`keras.losses.Loss`) comes from the rows of a batch, before Keras' `reduction` of what it gives."""

    BY_ROWS = "a value, or values, for each row, which depend on that row alone"
    MEAN = "one number, which is the mean of the numbers of single rows"
    COUPLES = "depends on rows taken together"
    UNKNOWN = "a loss that failed when it was tried with random outputs, or whose class overrides __call__, not call"


# Keras' functions (3.15) that give a loss for each row, and nothing about rows taken together (as `dice`).
BY_ROWS = {
    getattr(keras.losses, name)
    for name in (
        "binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy",
        "categorical_focal_crossentropy", "categorical_hinge", "cosine_similarity", "hinge", "huber", "kl_divergence",
        "log_cosh", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error",
        "mean_squared_logarithmic_error", "poisson", "sparse_categorical_crossentropy", "squared_hinge",
    )
}  # fmt: skip


Definition = TypeVar("Definition")
_DECLARED = "is_per_sample"

# What trials have found out about other losses.
_found_losses: "weakref.WeakKeyDictionary[keras.losses.Loss, Reduction]" = weakref.WeakKeyDictionary()


def per_sample(definition: Definition) -> Definition:
    """Says of a loss or a metric that a sample's part of it depends on that sample alone; a decorator.

    Then several devices compute it each of their own samples, instead of gathering the outputs of the whole batch.

    Args:
        definition: a loss function that returns a value (or values) for each sample, shape `(samples, ...)`; a subclass
            of `keras.losses.Loss` whose `call` does; or a subclass of `keras.metrics.Metric` whose variables are sums
            over the samples.

    Returns:
        The same.
    """
    setattr(definition, _DECLARED, True)
    return definition


def _is_declared(*definitions: Any) -> bool:
    """Returns whether one of these was given to `per_sample`."""
    return any(getattr(definition, _DECLARED, False) for definition in definitions)


def reduction_of(loss: keras.losses.Loss) -> Reduction:
    """Returns how a loss comes from the rows of a batch: the one place that knows."""
    function, options = getattr(loss, "fn", None), loss_options(loss)
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return Reduction.UNKNOWN
    if _is_declared(function, type(loss)):
        return Reduction.BY_ROWS
    if is_of_keras(type(loss)):
        # They divide by what they find in the batch, whatever their `reduction` says (Keras 3.15).
        coupled = function in (keras.losses.dice, keras.losses.tversky) and options.get("axis") is None
        if coupled or function is keras.losses.circle:
            return Reduction.COUPLES
        if function in BY_ROWS and options.get("axis", -1) == -1:
            return Reduction.BY_ROWS
    return _found_losses.get(loss, Reduction.UNKNOWN)


def is_loss_of_keras(loss: keras.losses.Loss) -> bool:
    """Returns whether class and function of a loss are Keras' own."""
    return is_of_keras(type(loss)) and is_of_keras(getattr(loss, "fn", type(loss)))


def divides_by_what_is_left(loss: keras.losses.Loss) -> bool:
    """Returns whether a loss masks some of its values, and takes the mean of the others (Keras 3.15)."""
    return loss_options(loss).get("ignore_class") is not None


def is_sum_over_rows(model: keras.Model, *, is_weighted: bool) -> bool:
    """Returns whether the loss of a batch is a sum over its rows, but for what it is divided by.

    Args:
        model: compiled, and its losses built.
        is_weighted: whether the samples have weights.
    """
    return type(model).compute_loss is keras.Model.compute_loss and not _coupling_losses(model, is_weighted=is_weighted)


def _coupling_losses(model: keras.Model, *, is_weighted: bool) -> list[tuple[keras.losses.Loss, Reduction]]:
    """Returns the losses of a model that need the whole batch, with the reason; arguments: as `is_sum_over_rows`."""
    found = []
    for loss in output_losses(model):
        reduction = reduction_of(loss)
        is_sum = (
            loss.reduction not in (None, "none")
            if reduction is Reduction.BY_ROWS
            # Weighted, its mean is multiplied by that of the weights.
            else (reduction is Reduction.MEAN and not is_weighted and loss.reduction not in (None, "none", "sum"))
        )
        if not is_sum:
            found.append((loss, reduction))
    return found


def require_values(loss: keras.losses.Loss, values: Any, num_rows: int) -> None:
    """Raises `UserError` if a loss that was said to be `per_sample` gives no value for each row."""
    if reduction_of(loss) is Reduction.BY_ROWS and (not len(values.shape) or values.shape[0] != num_rows):
        raise UserError(
            f"the loss {loss.name}: expected a value for each of the {num_rows} samples, since it is declared "
            f"per_sample. Received: shape {tuple(values.shape)}"
        )


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
        _found_losses.update(thread.submit(_try_unknown_losses, model, targets, symbols, unknown).result())


def _try_unknown_losses(
    model: keras.Model, targets: Any, symbols: Any, losses: list[keras.losses.Loss]
) -> dict[keras.losses.Loss, Reduction]:
    answers: dict[keras.losses.Loss, list[Reduction]] = {loss: [] for loss in losses}
    numbers, compiled = np.random.RandomState(0), cast(Any, compiled_loss(model))
    calls: dict[keras.losses.Loss, list[tuple[Any, Any]]] = {}

    def note(loss: keras.losses.Loss, y_true: Any, y_pred: Any, _: Any) -> Any:
        given = keras.tree.map_structure(lambda leaf: ops.convert_to_tensor(leaf, dtype=loss.dtype), (y_true, y_pred))
        calls.setdefault(loss, []).append(given)
        return ops.zeros(())

    # Distinct rows, each row twice (for losses that compare rows of one class), one row repeated.
    for rows in (np.arange(NUM_ROWS), np.arange(NUM_ROWS) // 2, np.zeros(NUM_ROWS, int)):
        own = keras.tree.map_structure(lambda leaf, rows=rows: None if leaf is None else leaf[rows], targets)
        calls.clear()
        try:
            with reducing_losses(note), keras.StatelessScope():  # the losses of several outputs are metrics, too
                compiled(own, random_outputs(symbols, numbers))
            for loss in losses:
                answers[loss] += [_reduction_in_trial(loss, *given) for given in calls.get(loss, ())]
        except Exception:  # user-defined, on outputs that it may not expect
            return {}
    return {loss: _combined(own) for loss, own in answers.items() if own}


def _combined(answers: list[Reduction]) -> Reduction:
    if len(set(answers)) == 1:
        return answers[0]
    return Reduction.UNKNOWN if Reduction.COUPLES not in answers and Reduction.UNKNOWN in answers else Reduction.COUPLES


def random_outputs(symbols: Any, numbers: np.random.RandomState) -> Any:
    """Returns `NUM_ROWS` rows of such outputs: between 0 and 1, which suits probabilities and all else."""

    def random(tensor: Any) -> Any:
        values = numbers.uniform(0.05, 0.95, (NUM_ROWS, *tensor.shape[1:]))
        return ops.convert_to_tensor(values.astype("float32"), dtype=tensor.dtype)

    return keras.tree.map_structure(random, symbols)


def _reduction_in_trial(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> Reduction:
    """Compares a loss of all rows with those of some and of single ones."""

    def values(begin: int, end: int) -> Any:
        y_t, y_p = keras.tree.map_structure(lambda leaf: leaf[begin:end], (y_true, y_pred))
        with keras.StatelessScope():
            return ops.convert_to_numpy(type(loss).call(loss, y_t, y_p)).astype("float64")

    whole, half = values(0, NUM_ROWS), values(0, NUM_ROWS // 2)
    singles = [values(row, row + 1) for row in range(NUM_ROWS)]
    if not np.isfinite(whole).all():
        return Reduction.UNKNOWN
    if not all(np.isfinite(each).all() for each in (half, *singles)):
        return Reduction.COUPLES  # a ratio of sums, of which some rows have none: 0 / 0
    if whole.ndim == 0 and half.ndim == 0 and all(each.ndim == 0 for each in singles):
        is_mean = _are_equal(whole, np.mean(singles)) and _are_equal(half, np.mean(singles[: NUM_ROWS // 2]))
        return Reduction.MEAN if is_mean else Reduction.COUPLES
    if whole.ndim == 0 or len(whole) != NUM_ROWS or any(each.shape != (1, *whole.shape[1:]) for each in singles):
        return Reduction.COUPLES
    is_by_rows = _are_equal(whole, np.concatenate(singles)) and _are_equal(whole[: NUM_ROWS // 2], half)
    return Reduction.BY_ROWS if is_by_rows else Reduction.COUPLES


def _are_equal(received: Any, expected: Any) -> bool:
    return np.shape(received) == np.shape(expected) and bool(np.allclose(received, expected, rtol=1e-5, atol=1e-6))


def shares_of(model: keras.Model, counts: list[int], *, is_weighted: bool, instead: str) -> list[float]:
    """Returns the weight of each micro-batch's loss in the loss of the global batch.

    Args:
        model: compiled, and its losses built.
        counts: rows of each micro-batch.
        is_weighted: whether the samples have weights.
        instead: what to do about a loss that cannot be computed for each of them alone.

    Raises:
        UserError: if the loss of the global batch is not a sum over the micro-batches.
    """
    # Those that Keras has made of all that `compile` takes, in each of its outputs.
    losses = output_losses(model)
    for loss in losses:
        reduction = reduction_of(loss)
        is_one_number = is_weighted or loss.reduction == "sum"  # which of a mean would not add up
        if reduction is Reduction.UNKNOWN or (reduction is Reduction.MEAN and is_one_number):
            raise UserError(
                f"the loss {loss.name} of {model.name}: expected a value for each sample, of which Keras takes the "
                f"mean. Received: {reduction.value}; {instead}"
            )
        if reduction is Reduction.COUPLES or divides_by_what_is_left(loss):
            raise UserError(
                f"the loss {loss.name} of {model.name} needs the whole batch at once; {instead}, or, where it "
                "divides by a sum over the batch, as sum(loss * mask) / sum(mask), let it return a value for each "
                "sample"
            )
    reductions = {loss.reduction for loss in losses}
    if reductions == {"sum"}:
        return [1.0] * len(counts)
    means = {"sum_over_batch_size", "mean"} | (set() if is_weighted else {"mean_with_sample_weight"})
    if not reductions <= means:
        raise UserError(
            f"the losses of {model.name} are reduced by {', '.join(map(str, sorted(map(str, reductions))))}, which "
            f"needs the whole batch at once; {instead}"
        )
    return [count / sum(counts) for count in counts]


def state_of_losses(model: keras.Model, targets: Any, symbols: Any) -> list[keras.Variable]:
    """Returns the variables to which user-defined losses of `compile` assign; they are no model's.

    Args:
        model: as in `try_losses`; so are `targets` and `symbols`.
    """

    def assigned() -> set[int]:
        with contextlib.suppress(Exception), keras.StatelessScope() as scope:  # on outputs that they may not expect
            cast(Any, compiled_loss(model))(targets, random_outputs(symbols, np.random.RandomState(0)))
            return set(scope.state_mapping)
        return set()

    with ThreadPoolExecutor(1) as thread:  # as above
        found = thread.submit(assigned).result() - set(map(id, compiled_variables(model)[0]))
    variables = [variable for variable in living_variables() if id(variable) in found] if found else []
    return [variable for variable in variables if variable.name != "seed_generator_state"]  # they draw portably


# What trials have found out about other metrics: whether their variables are sums over the rows.
_found_metrics: "weakref.WeakKeyDictionary[keras.metrics.Metric, bool]" = weakref.WeakKeyDictionary()


def adds_up(metric: keras.metrics.Metric) -> bool:
    """Returns whether updates with some rows of a batch, and with the others, change the variables as one with all."""
    function, options = metric_function(metric)
    if _is_declared(function, type(metric)):
        return not any(map(_is_no_number, metric.variables))
    if is_of_keras(type(metric)) and function is None:
        return bool(metric.variables)
    is_known = function in BY_ROWS or (inspect.isfunction(function) and is_metric_of_keras(function))
    if is_of_keras(type(metric)) and is_known:
        return options.get("axis", -1) == -1
    return _found_metrics.get(metric, False)


def are_sums_over_rows(model: keras.Model) -> bool:
    """Returns whether the metrics of a compiled model, once they are built, add up over the rows of a batch."""
    return type(model).compute_metrics is keras.Model.compute_metrics and not coupling_metrics(model)


def coupling_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics of a compiled model that are not known to add up."""
    return [metric for _, metric in compiled_metrics(model) if not adds_up(metric)]


def try_metrics(model: keras.Model, targets: Any, outputs: Any, sample_weight: Any) -> None:
    """Tries the metrics of a compiled model that are not known, and keeps what it finds for `adds_up`.

    They are updated with all of these rows, with some, and with the others. What fails does not add up.

    Args:
        model: its metrics built.
        targets: arrays with as many rows as `outputs`.
        outputs: as the model gives them.
        sample_weight: likewise, or None.
    """
    unknown = coupling_metrics(model)
    if not unknown:
        return
    with ThreadPoolExecutor(1) as thread:  # where no graph is being traced, and no scope is entered
        sums = thread.submit(_sums_in_trial, model, (targets, outputs, sample_weight)).result()
    for metric in unknown:
        _found_metrics[metric] = bool(metric.variables) and all(
            sums.get(id(variable), False) for variable in metric.variables
        )


# Values of variables before they are updated in a trial: int8 holds them, too.
_LARGE = 97


def _sums_in_trial(model: keras.Model, data: Any) -> dict[int, bool]:
    """Returns, by the `id` of each variable, whether what it gets is a sum over the rows."""
    num_rows = len(keras.tree.flatten(data)[0])
    cut = num_rows // 2 - 1  # uneven
    variables = compiled_variables(model)[1]
    start = [np.zeros(variable.shape) for variable in variables]

    def after(values: list[Any], rows: slice) -> list[Any]:
        own = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], data)
        begun = [(variable, ops.convert_to_tensor(value, variable.dtype)) for variable, value in zip(variables, values)]
        with keras.StatelessScope(begun) as scope:
            update_compiled_metrics(model, *own)
        return [ops.convert_to_numpy(scope.get_current_value(variable)) for variable in variables]

    try:
        whole, first = after(start, slice(0, num_rows)), after(start, slice(0, cut))
        second = after(start, slice(cut, num_rows))
        # From large numbers on: a product or a minimum stays 0 where it begins at 0, as sums of nothing do.
        in_turn = after([value + _LARGE for value in first], slice(cut, num_rows))
    except Exception:  # user-defined, on outputs that it may not expect
        return {}
    return {
        id(variable): bool(
            not _is_no_number(variable)
            and np.isfinite(parts).all()
            and _are_equal_sums(parts[0], parts[1] + parts[2])
            and _are_equal_sums(parts[0] + _LARGE, parts[3])
        )
        for variable, *parts in zip(variables, whole, first, second, in_turn)
    }


def _is_no_number(variable: keras.Variable) -> bool:
    """Returns whether a variable holds truths: TensorFlow adds none up, and one of all rows is no sum."""
    return variable.dtype == "bool"


def _are_equal_sums(received: Any, expected: Any) -> bool:
    largest = max(np.abs(expected).max(initial=0.0), 1.0)  # AUC's are differences of such numbers
    return bool(np.allclose(received, expected, rtol=0.0, atol=1e-5 * largest))


def reasons_to_gather(model: keras.Model, *, is_weighted: bool) -> list[str]:
    """Returns what of a compiled model needs the outputs of the whole batch, with the reason; nothing, it may be.

    `is_weighted`: whether the samples have weights.
    """
    reasons = [
        f"the loss {loss.name} ({reduction.value})"
        for loss, reduction in _coupling_losses(model, is_weighted=is_weighted)
    ]
    for name in ("compute_loss", "compute_metrics"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            reasons = [*(reasons if name == "compute_metrics" else ()), f"{name} of {type(model).__name__}"]
    return reasons + [f"the metric {metric.name} (not known to add up)" for metric in coupling_metrics(model)]


# Rows of the calls that tell what is a mean, and by how much its halves must differ to tell anything.
_TRIAL_ROWS, _LEAST_DIFFERENCE = 32, 0.01
# For float16 and bfloat16 ten of the last bits. Too strict costs a recomputation; too loose costs accuracy.
_TOLERANCES = {"float32": 1e-5, "float64": 1e-10, "float16": 0.005, "bfloat16": 0.04}


def is_mean_over_rows(layer: keras.layers.Layer, arguments: Any, axes: RowAxes) -> bool:
    """Returns whether what a layer adds surely is a mean over the rows: it is tried, with random weights and inputs.

    Args:
        layer: built, and made `portable`.
        arguments: of a call, for their shapes and sizes.
        axes: where the rows are in them.
    """
    known = iter(axes.of(("arguments", id(layer))))
    places = [next(known) if ops.is_tensor(leaf) else None for leaf in keras.tree.flatten(arguments)]
    if any(place not in (None, FIRST) for place in places) or any(map(has_mask, keras.tree.flatten(arguments))):
        return False
    with contextlib.suppress(Exception):  # user-defined, on numbers that it may not expect
        return all(_is_mean_in_trial(layer, arguments, places, np.random.RandomState(seed)) for seed in range(3))
    return False


def _is_mean_in_trial(layer: keras.layers.Layer, arguments: Any, axes: list[Any], random: Any) -> bool:
    def numbers_like(tensor: Any, shape: tuple[int, ...]) -> Any:
        array = ops.convert_to_numpy(ops.stop_gradient(ops.cast(tensor, "float32"))).astype("float64")
        return random.normal(0.0, float(np.sqrt(np.mean(np.square(array)))) or 0.1, shape)

    def rows_like(leaf: Any) -> Any:
        """Returns other rows than those of the sample, which may all be full where others are padded, say."""
        shape, name = (_TRIAL_ROWS, *leaf.shape[1:]), keras.backend.standardize_dtype(leaf.dtype)
        if "float" in name:
            numbers = numbers_like(leaf, shape)
            numbers[_TRIAL_ROWS // 2 :] *= 2  # for halves that differ
            for length in range(1, len(shape) + 1):  # rows, tokens and numbers that are zero
                sizes = shape[:length] + (1,) * (len(shape) - length)
                numbers = numbers * (random.uniform(size=sizes) >= 0.15)
            return ops.convert_to_tensor(numbers, dtype=leaf.dtype)
        largest = 1 if name == "bool" else max(int(ops.convert_to_numpy(leaf).max()), 1)
        return ops.convert_to_tensor(random.randint(0, largest + 1, shape), dtype=leaf.dtype)

    leaves = [leaf if axis is None else rows_like(leaf) for leaf, axis in zip(keras.tree.flatten(arguments), axes)]
    values = [
        (weight, ops.convert_to_tensor(numbers_like(weight.value, weight.shape), dtype=weight.dtype))
        for weight in layer.trainable_variables
    ] + [(variable, ops.copy(variable.value)) for variable in layer.non_trainable_variables]

    def losses(first: int, end: int) -> list[Any]:
        own = [leaf if axis is None else leaf[first:end] for leaf, axis in zip(leaves, axes)]
        args, kwargs = keras.tree.pack_sequence_as(arguments, own)
        size = end - first
        found: list[Any] = []

        def take(_: ReplicaContext, adding: keras.layers.Layer, loss: Any, add: Any) -> None:
            if adding is layer:
                found.extend(keras.tree.flatten(loss))

        context = ReplicaContext(
            num_replicas=1, num_rows=size, rows=size, first_row=first, total_rows=_TRIAL_ROWS, is_trial=True,
            adds=take, is_whole=True, calling=[layer],
        )  # fmt: skip
        with step_with(replica=context, record=None), keras.StatelessScope(values):
            keras.Operation.__call__(layer, *args, **kwargs)
        return found

    half = _TRIAL_ROWS // 2
    parts = losses(0, _TRIAL_ROWS), losses(0, half), losses(half, _TRIAL_ROWS)
    is_alike = len(parts[0]) == len(parts[1]) == len(parts[2]) > 0
    return is_alike and all(map(_is_mean_of, *parts))


def _is_mean_of(whole: Any, first: Any, second: Any) -> bool:
    name = keras.backend.standardize_dtype(whole.dtype)
    tolerance, wide = _TOLERANCES.get(name, 0.0), keras.backend.result_type(name, "float32")
    # TensorFlow (2.21) makes no array of one number in bfloat16.
    parts = [ops.convert_to_numpy(ops.cast(ops.stop_gradient(each), wide)) for each in (whole, first, second)]
    numbers = [float(np.sum(part)) for part in parts]
    size = max(map(abs, numbers))
    is_telling = np.isfinite(numbers).all() and abs(numbers[1] - numbers[2]) > _LEAST_DIFFERENCE * size
    return bool(is_telling and abs(numbers[0] - (numbers[1] + numbers[2]) / 2) <= tolerance * size)
