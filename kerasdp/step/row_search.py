"""Finds where the rows of a batch are in the tensors that layers work on, by calling the model on a few of them.

Axis 0 need not be the batch: layers fold windows, time or tokens into it, or work on a table that happens to have as
many rows as a replica. No shape tells. So the model is called twice before the first step, on a few rows and on half of
them: where axis 0 is twice as long in the first call it holds the rows. Whether that is right, and which layers mix the
rows, the check of the first step tells (`kerasdp.step.check`).
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
from kerasdp.keras_compat.layers import all_layers, current_value, seed_variables
from kerasdp.processes import error_text
from kerasdp.processes.error_text import explained
from kerasdp.run_state import ModelCache
from kerasdp.same.layer_calls import row_orders_in
from kerasdp.same.random import portable_draws
from kerasdp.same.replica_context import ReplicaContext, RowLayout, RowOrder, use

# Rows of the two calls. The shard is the second half, so that its first row is not the batch's.
NUM_ROWS, SHARD = 4, slice(2, 4)
# Lines of the user that the message of a failed trial names.
_NUM_PLACES = 4
# Numbers that are compared at once.
_PART = 2**20
# What differs by more than this of the largest number, differs by more than round-off. Faults are far larger.
_TOLERANCES = {"float64": 1e-6, "float16": 0.02, "bfloat16": 0.1}

# By what was called, with the layers that the model had.
_found: ModelCache[dict[str, tuple[list[keras.layers.Layer], RowLayout]]] = ModelCache()


def row_layout_of(model: keras.Model, step: str = "call") -> RowLayout:
    """Returns what `find_row_layout` found in a model; nothing, if that was not called.

    `step`: the model's `call`, as Keras' own steps use it, or a user-defined step: `train_step`, say.
    """
    _, layout = (_found.get(model) or {}).get(step, ([], RowLayout()))
    return layout


def is_known(model: keras.Model, step: str = "call") -> bool:
    """Returns whether rows were looked for in the model as it is; `step`: see `row_layout_of`."""
    layers, _ = (_found.get(model) or {}).get(step, ([], None))
    return list(map(id, layers)) == list(map(id, all_layers(model)))


def context_of(
    model: keras.Model, step: str, rank: int, replicas: tuple[ReplicaRows, ...], *, gather: Callable[[Any], Any],
    gather_rows: Callable[[Any], Any], total_rows: int | None = None,
) -> ReplicaContext:  # fmt: skip
    """Returns the context of one replica's shard of a global batch, or of a micro-batch.

    Args:
        model: that is run.
        step: see `row_layout_of`.
        rank: of the replica.
        replicas: see `kerasdp.data.sampling.Split.replicas`.
        gather: see `ReplicaContext`; so is `gather_rows`.
        total_rows: of the global batch; None: `replicas` have all of its rows.
    """
    own, is_several = replicas[rank], len(replicas) > 1
    return ReplicaContext(
        num_replicas=len(replicas),
        num_rows=own.num_rows,
        rows=own.size,
        first_row=own.first,
        total_rows=total_rows or sum(each.num_rows for each in replicas),
        replicas=replicas,
        row_layout=row_layout_of(model, step),
        gather=gather if is_several else None,
        gather_rows=gather_rows if is_several else None,
        # The moving statistics of a micro-batch move before the next one.
        moving=[] if total_rows is None else None,
        is_micro_batch=total_rows is not None,
        is_custom_step=step != "call",
    )


class RowSearch(RowLayout):
    """Compares the tensors of two calls, on all of `NUM_ROWS` rows and on some of them; notes what layers do.

    Attributes:
        is_whole: whether this is the first call.
        found: what both calls tell.
    """

    def __init__(self, will_be_checked: bool = False):
        """`will_be_checked`: whether a wrong answer will be found, so that an uncertain one will do."""
        super().__init__()
        self.is_whole, self.found, self._will_be_checked = True, RowLayout(), will_be_checked
        self.adding, self.assigning = self.found.adding, self.found.assigning
        # Shapes in the first call, with the tensors in which rows are folded with others.
        self._whole: dict[Any, list[tuple[tuple[int, ...], Any]]] = {}
        self._assigned: dict[int, Any] = {}

    def find(self, key: Any, number: int, shape: tuple[int, ...], tensor: Any, name: str) -> RowOrder | None:
        """See `RowLayout`. What is not known is refused where it is needed."""
        if self.is_whole:
            is_folded = tensor is not None and tuple(tensor.shape[:1]) == shape[:1] and shape[:1] > (NUM_ROWS,)
            self._whole.setdefault(key, []).append((shape, tensor if is_folded else None))
            return RowOrder.FIRST
        whole = self._whole.get(key, [])
        found: RowOrder | str | None = (
            f"is not called equally often for {NUM_ROWS} and for {_rows_in(SHARD)} samples, so each device would do "
            "something else: train on one device"
        )
        if number < len(whole):
            found = self._order(key, *whole[number], shape, tensor)
        self.found.add(key, found)
        return RowOrder.FIRST if isinstance(found, str) else found

    def _order(
        self, key: Any, whole_shape: tuple[int, ...], whole: Any, shape: tuple[int, ...], tensor: Any
    ) -> RowOrder | str | None:
        """Returns where the rows are in a tensor, by its shape, of all rows and of the shard; folded ones by values."""
        num_rows = _rows_in(SHARD)
        if whole_shape == shape:
            return None
        is_alike = len(whole_shape) == len(shape) and whole_shape[1:] == shape[1:]
        is_split = is_alike and whole_shape[0] * num_rows == shape[0] * NUM_ROWS
        # What layers give may have a number for each two samples (a covariance): a replica has its own with all.
        is_of_pairs = key[0] == "outputs" and (whole_shape[:2], shape[:2]) == ((NUM_ROWS,) * 2, (num_rows,) * 2)
        if (is_split or is_of_pairs) and shape[0] == num_rows:
            return RowOrder.FIRST
        if is_split and shape[0] % num_rows == 0:
            if tensor is None and self._will_be_checked:
                return RowOrder.LAST  # as in `concatenate([real, made])`
            for order in RowOrder if whole is not None else ():
                indices = order.indices(shape[0], num_rows, SHARD.start, NUM_ROWS)
                if is_close(to_array(whole)[indices], to_array(tensor), tolerance_of(tensor)):
                    return order
        return (
            f"works on a tensor of shape {whole_shape} for {NUM_ROWS} samples, {shape} for {num_rows}: expected the "
            "samples on axis 0, alone or folded with others; what has them elsewhere, or mixes the samples of a batch, "
            "would train something else on several devices, each with its own samples; put them there, take the "
            "samples of all devices by kerasdp.all_rows, or train on one device or with --backend=jax"
        )

    def watch_call(
        self, call: Callable[..., Any], layer: keras.layers.Layer, context: ReplicaContext, args: Any, kwargs: Any
    ) -> Any:
        """Calls a layer; notes where the rows are in what it gets and gives, and to which variables it assigns."""
        row_orders_in("arguments", layer, context, (args, kwargs))
        seeds = {id(variable) for variable in seed_variables(layer)}
        variables = [variable for variable in layer.variables if id(variable) not in seeds]
        before = list(map(current_value, variables))
        outputs = call(*args, **kwargs)
        for variable, old in zip(variables, before):
            new = current_value(variable)
            if self.is_whole and new is not old and new is not self._assigned.get(id(variable)):
                self._assigned[id(variable)] = new
                _, own = self.assigning.setdefault(id(layer), (layer, []))
                own += [variable] if all(known is not variable for known in own) else []
        row_orders_in("outputs", layer, context, outputs)
        return outputs


def _rows_in(rows: slice) -> int:
    return rows.stop - rows.start


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
    largest = float(np.abs(expected).max(initial=0.0, where=np.isfinite(expected)))
    expected, received = expected.reshape(-1), received.reshape(-1)
    # In parts: in float64, the outputs of a large vocabulary would need more memory than a step of training.
    parts = [slice(first, first + _PART) for first in range(0, expected.size, _PART)]
    return all(
        np.isclose(
            received[part].astype("float64"), expected[part].astype("float64"), rtol=0.0, atol=tolerance * largest,
            equal_nan=True,
        ).all()
        for part in parts
    )  # fmt: skip


def find_row_layout(model: keras.Model, inputs: Any) -> None:
    """Finds where the rows are in all that a model computes in training; `row_layout_of` gives it. No variable changes.

    Args:
        model: built and made `portable`.
        inputs: `NUM_ROWS` samples, as `model` takes them, in NumPy.
    """
    outputs = None

    def call(search: RowLayout, rows: slice) -> None:
        nonlocal outputs
        with trial(model, search, rows) as context, explaining_trial(model.name, _rows_in(rows)):
            outputs = call_in_training(model, rows_of(inputs, rows))
            context.whole_outputs(outputs)

    search_rows(model, "call", call)
    layout = row_layout_of(model)
    layout.outputs = keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype), outputs)


def search_rows(
    model: keras.Model, step: str, call: Callable[[RowLayout, slice], None], will_be_checked: bool = False
) -> None:
    """Finds where the rows are, by two calls.

    Args:
        model: built and made `portable`.
        step: see `row_layout_of`.
        call: computes some of `NUM_ROWS` rows, and asks where the rows are.
        will_be_checked: see `RowSearch`.
    """
    search = RowSearch(will_be_checked)
    call(search, slice(0, NUM_ROWS))
    search.is_whole = False
    call(search, SHARD)
    _found.put(model, (_found.get(model) or {}) | {step: (all_layers(model), search.found)})


@contextlib.contextmanager
def trial(model: keras.Model, layout: RowLayout, rows: slice, is_micro_batch: bool = False) -> Iterator[ReplicaContext]:
    """Returns the context of a call on some of `NUM_ROWS` rows: no variable changes, and nothing is exchanged."""
    context = trial_context(layout, rows, is_micro_batch=is_micro_batch)
    # No draws but those that layers make portable.
    with use(context), portable_draws("a layer"), keras.StatelessScope(fixed_values(model)):
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


def trial_context(layout: RowLayout, rows: slice, **fields: Any) -> ReplicaContext:
    """Returns the context in which some of `NUM_ROWS` rows ask `layout` where the rows are, with these fields."""
    num_rows = _rows_in(rows)
    return ReplicaContext(
        num_replicas=NUM_ROWS // num_rows,
        num_rows=num_rows,
        rows=num_rows,
        first_row=rows.start,
        total_rows=NUM_ROWS,
        row_layout=layout,
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
