"""Finds where the rows of a batch are in the tensors that layers work on, by calling the model on a few of them.

Axis 0 need not be the batch: layers fold windows, time or tokens into it, put time first, or work on a table that
happens to have as many rows as a replica. No shape tells. So the model is called twice before the first step, on a few
rows and on half of them: an axis that is twice as long in the first call holds the rows.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from kerasdp.data.sampling import ReplicaRows
from kerasdp.errors import RunError, UserError
from kerasdp.keras_compat.layers import all_layers
from kerasdp.processes import error_text
from kerasdp.processes.error_text import explained
from kerasdp.run_state import ModelCache
from kerasdp.same.layer_calls import Found, hook_layers
from kerasdp.same.random import portable_draws
from kerasdp.same.replica_context import FIRST, ReplicaContext, RowAxes, RowAxis, use

# Rows of the two calls. The shard is the second half, so that its first row is not the batch's.
NUM_ROWS, SHARD = 4, slice(2, 4)
# Lines of the user that the message of a failed trial names.
_NUM_PLACES = 4
# Numbers that are compared at once.
_PART = 2**20
# What differs by more than this of the largest number, differs by more than round-off. Faults are far larger.
_TOLERANCES = {"float64": 1e-6, "float16": 0.02, "bfloat16": 0.1}

# By what was called, with the layers that the model had.
_found: ModelCache[dict[str, tuple[list[keras.layers.Layer], RowAxes]]] = ModelCache()


def row_axes_of(model: keras.Model, step: str = "call") -> RowAxes:
    """Returns what `find_row_axes` found in a model; nothing, if that was not called.

    `step`: the model's `call`, as Keras' own steps use it, or a user-defined step: `train_step`, say.
    """
    _, axes = (_found.get(model) or {}).get(step, ([], RowAxes()))
    return axes


def is_known(model: keras.Model, step: str = "call") -> bool:
    """Returns whether rows were looked for in the model as it is; `step`: see `row_axes_of`."""
    layers, _ = (_found.get(model) or {}).get(step, ([], None))
    return list(map(id, layers)) == list(map(id, all_layers(model)))


def context_of(
    model: keras.Model, step: str, rank: int, replicas: tuple[ReplicaRows, ...], *, gather: Callable[[Any], Any],
    gather_rows: Callable[[Any], Any], total_rows: int | None = None,
) -> ReplicaContext:  # fmt: skip
    """Returns the context of one replica's shard of a global batch, or of a micro-batch.

    Args:
        model: that is run.
        step: see `row_axes_of`.
        rank: of the replica.
        replicas: see `kerasdp.data.sampling.Split.replicas`.
        gather: see `ReplicaContext`; so is `gather_rows`.
        total_rows: of the global batch; None: `replicas` have all of its rows.
    """
    own, row_axes, is_several = replicas[rank], row_axes_of(model, step), len(replicas) > 1
    return ReplicaContext(
        num_replicas=len(replicas),
        num_rows=own.num_rows,
        rows=own.size,
        first_row=own.first,
        total_rows=total_rows or sum(each.num_rows for each in replicas),
        replicas=replicas,
        row_axes=row_axes,
        gather=gather if is_several else None,
        gather_rows=gather_rows if is_several else None,
        # The moving statistics of a micro-batch move before the next one.
        moving=[] if total_rows is None else None,
        is_micro_batch=total_rows is not None,
        is_own_step=step != "call",
    )


class Whole(RowAxes):
    """Remembers the tensors of the first call, on all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[Any, list[tuple[tuple[int, ...], Any]]] = {}

    def find(self, key: Any, number: int, shape: tuple[int, ...], tensor: Any, name: str) -> RowAxis | None:
        """Takes the first axis for that of the rows."""
        self.tensors.setdefault(key, []).append((shape, tensor))
        return FIRST


class _Shard(RowAxes):
    """Compares the tensors of the second call with those of the first."""

    def __init__(self, whole: Whole, found: RowAxes, will_be_checked: bool):
        super().__init__()
        self.whole, self.found, self.will_be_checked = whole, found, will_be_checked

    def find(self, key: Any, number: int, shape: tuple[int, ...], tensor: Any, name: str) -> RowAxis | None:
        tensors = self.whole.tensors.get(key, [])
        if number >= len(tensors):
            raise UserError(
                f"{name} is not called equally often for {NUM_ROWS} and for {SHARD.stop - SHARD.start} samples, so "
                "each device would do something else: train on one device"
            )
        whole_shape, whole = tensors[number]
        num_rows = SHARD.stop - SHARD.start
        if key[0] == "outputs" and (whole_shape[:2], shape[:2]) == ((NUM_ROWS,) * 2, (num_rows,) * 2):
            axis: RowAxis | None = (
                FIRST  # a number for each two samples (a covariance): a replica has its own with those of all
            )
        else:
            axis = _row_axis(whole_shape, whole, shape, tensor, name, self.will_be_checked)
        self.found.add(key, axis)
        return axis


def _row_axis(
    whole_shape: tuple[int, ...], whole: Any, shape: tuple[int, ...], own: Any, name: str, will_be_checked: bool
) -> RowAxis | None:
    """Returns where the rows are in a tensor, of all rows and of the shard.

    Where nothing tells how rows are folded with others, they are taken for tensors one after the other, as in
    `concatenate([real, made])`, if that will be checked.

    Raises:
        UserError: if that is not known.
    """
    num_rows = SHARD.stop - SHARD.start
    differing = [axis for axis, sizes in enumerate(zip(whole_shape, shape)) if sizes[0] != sizes[1]]
    axis = differing[0] if len(differing) == 1 else None
    if whole_shape == shape:
        if own is None or tuple(own.shape) != shape or is_close(to_array(whole), to_array(own), tolerance_of(own)):
            return None
    elif (
        len(whole_shape) == len(shape)
        and axis is not None
        and whole_shape[axis] * num_rows == shape[axis] * NUM_ROWS
        and shape[axis] % num_rows == 0
    ):
        if shape[axis] == num_rows:
            return RowAxis(axis)
        if own is None and will_be_checked:
            return RowAxis(axis, is_inner=True)
        if own is not None and own.shape[axis] == shape[axis]:
            whole, own, tolerance = to_array(whole), to_array(own), tolerance_of(own)
            for candidate in (RowAxis(axis), RowAxis(axis, is_inner=True)):
                indices = candidate.indices(shape[axis], num_rows, SHARD.start, NUM_ROWS)
                if is_close(np.take(whole, indices, axis=axis), own, tolerance):
                    return candidate
        raise UserError(
            f"{name} works on a tensor of shape {shape} for {num_rows} samples, in which it cannot be told which "
            "numbers are of which sample: train on one device or with --backend=jax"
        )
    raise UserError(
        f"{name} works on a tensor of shape {whole_shape} for {NUM_ROWS} samples, {shape} for {num_rows}, that mixes "
        "the samples of a batch: several devices, each with its own samples, would train something else; train on one "
        "device or with --backend=jax"
    )


def to_array(tensor: Any) -> np.ndarray:
    """Returns a tensor in NumPy, which has no bfloat16."""
    is_bfloat16 = "bfloat16" in str(tensor.dtype)
    return ops.convert_to_numpy(ops.stop_gradient(ops.cast(tensor, "float32") if is_bfloat16 else tensor))


def tolerance_of(tensor: Any) -> float:
    """Returns how much a tensor may differ by round-off, as a share of its largest number."""
    return _TOLERANCES.get(keras.backend.standardize_dtype(tensor.dtype), 1e-3)


def is_close(expected: np.ndarray, received: np.ndarray, tolerance: float) -> bool:
    """Returns whether two arrays differ by round-off alone, by the largest number; whole numbers not at all."""
    if expected.shape != received.shape:
        return False
    if expected.dtype.kind not in "fc":
        return tolerance == math.inf or bool((expected == received).all())
    # In parts: in float64, the outputs of a large vocabulary would need more memory than a step of training.
    parts = [slice(first, first + _PART) for first in range(0, expected.size, _PART)]
    expected, received = expected.reshape(-1), received.reshape(-1)
    largest = max((_largest(expected[part]) for part in parts), default=0.0)
    return all(
        np.isclose(
            received[part].astype("float64"), expected[part].astype("float64"), rtol=0.0, atol=tolerance * largest,
            equal_nan=True,
        ).all()
        for part in parts
    )  # fmt: skip


def _largest(numbers: np.ndarray) -> float:
    numbers = numbers.astype("float64")
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))


def find_row_axes(model: keras.Model, inputs: Any, mixing: keras.layers.Layer | None = None) -> None:
    """Finds where the rows are in all that a model computes in training; `row_axes_of` gives it. No variable changes.

    Args:
        model: built and made `portable`.
        inputs: `NUM_ROWS` samples, as `model` takes them, in NumPy.
        mixing: a layer that mixes the samples, and is to be called with all of them; besides those known before.

    Raises:
        UserError: if that cannot be known, since the model mixes the samples of a batch.
    """

    found, outputs = Found(), None
    known = row_axes_of(model).mixing | ({} if mixing is None else {id(mixing): mixing})

    def call(axes: RowAxes, rows: slice) -> None:
        nonlocal outputs
        with trial(model, axes, rows, found) as context:
            with explaining_trial(model.name, rows.stop - rows.start):
                outputs = call_in_training(model, rows_of(inputs, rows))
            context.whole_outputs(outputs)

    def call_again_if_some_need_all_rows(axes: RowAxes, rows: slice) -> None:
        call(axes, rows)
        if isinstance(axes, Whole):
            found.whole = {*found.adding, *found.keeping(), *known}
        if isinstance(axes, Whole) and found.whole:  # where are the rows in what they get?
            axes.tensors.clear()
            call(axes, rows)

    find_row_axes_of(model, "call", call_again_if_some_need_all_rows)
    axes = row_axes_of(model)
    axes.outputs = keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype), outputs)
    axes.adding, axes.keeping, axes.mixing = found.adding, found.keeping(), known
    axes.assigning = [(layer, list(variables.values())) for layer, variables in found.assigning.values()]


def find_row_axes_of(
    model: keras.Model, step: str, call: Callable[[RowAxes, slice], None], will_be_checked: bool = False
) -> None:
    """Finds where the rows are, by two calls. Raises as `find_row_axes`.

    Args:
        model: built and made `portable`.
        step: see `row_axes_of`.
        call: computes some of `NUM_ROWS` rows, and asks where the rows are.
        will_be_checked: whether a wrong answer will be found, so that an uncertain one will do.
    """
    found, whole = RowAxes(), Whole()
    call(whole, slice(0, NUM_ROWS))
    call(_Shard(whole, found, will_be_checked), SHARD)
    _found.put(model, (_found.get(model) or {}) | {step: (all_layers(model), found)})


@contextlib.contextmanager
def trial(model: keras.Model, axes: RowAxes, rows: slice, found: Found | None = None) -> Iterator[ReplicaContext]:
    """Returns the context of a call on some of `NUM_ROWS` rows: no variable changes, and nothing is exchanged.

    `found`: see `ReplicaContext`. None: these are the rows of a micro-batch.
    """
    context = trial_context(axes, rows, found=found, is_micro_batch=found is None)
    hook_layers()
    # No draws but those that layers make portable.
    with use(context), portable_draws("a layer"), keras.StatelessScope(fixed_values(model)) as scope:
        if found is not None:
            found.scope = scope
        yield context


@contextlib.contextmanager
def explaining_trial(title: str, num_rows: int, is_split: bool = True) -> Iterator[None]:
    """Raises a `UserError` for what user-defined code raises in a trial, with the user's lines alone.

    Args:
        title: of what is tried.
        num_rows: that it is tried on.
        is_split: whether one device would do without a trial.
    """
    try:
        yield
    except RunError:  # which says what is wrong
        raise
    except Exception as error:
        if explained(error) is not None:  # of a device
            raise
        reason = ", where each device has some of the batch" if is_split else ""
        raise UserError(
            f"{title} fails on {num_rows} samples{reason} (a trial before the first step): "
            f"{error_text.in_a_line(error, _NUM_PLACES)}; write it for any number of samples, and to be called several "
            "times: what has a row for each sample is an argument of a step"
            + ("; or train on one device or with --backend=jax" if is_split else "")
        ) from error


def trial_context(axes: RowAxes, rows: slice, **fields: Any) -> ReplicaContext:
    """Returns the context in which some of `NUM_ROWS` rows ask `axes` where the rows are, with these fields."""
    num_rows = rows.stop - rows.start
    return ReplicaContext(
        num_replicas=NUM_ROWS // num_rows,
        num_rows=num_rows,
        rows=num_rows,
        first_row=rows.start,
        total_rows=NUM_ROWS,
        row_axes=axes,
        is_trial=True,
        **fields,
    )


def rows_of(inputs: Any, rows: slice) -> Any:
    """Returns some rows of arrays, as tensors."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else ops.convert_to_tensor(leaf[rows]), inputs)


def call_in_training(model: keras.Model, inputs: Any) -> Any:
    """Calls a model, in training if it takes that."""
    arguments = {"training": True} if "training" in model.call_signature_parameters else {}
    return model(inputs, **arguments)


def fixed_values(model: keras.Model, noise: float = 0.0) -> list[tuple[keras.Variable, Any]]:
    """Returns all variables of a model with their values, without gradients, for a `keras.StatelessScope`.

    `noise`: by how much each weight is changed, up or down, as a share of it.
    """
    arrays = with_noise([to_array(variable.value) for variable in model.variables], noise)
    return [(variable, ops.convert_to_tensor(array)) for variable, array in zip(model.variables, arrays)]


def with_noise(arrays: Any, noise: float) -> Any:
    """Multiplies each float in a structure of arrays by `1 + noise` or `1 - noise`; integers stay."""
    signs = np.random.RandomState(0)

    def change(array: Any) -> Any:
        if not noise or getattr(getattr(array, "dtype", None), "kind", "") != "f":
            return array
        return np.asarray(array * (1 + noise * signs.choice([-1.0, 1.0], array.shape)), array.dtype)

    return keras.tree.map_structure(change, arrays)
