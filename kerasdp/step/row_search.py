"""Finds where the rows of a batch are in the tensors of layers, by calling the model on a few rows.

Axis 0 is not always the batch. Layers fold windows, time or tokens into axis 0. Other tensors are tables that happen to
have as many rows as a replica. Shapes alone do not show the difference. So the model is called twice before the first
step: on a few rows and on half of them. If axis 0 is twice as long in the first call, axis 0 holds the rows. The check
of the first step (`kerasdp.step.check`) finds out whether this result is right, and which layers mix the rows.
"""

import contextlib
import math
import re
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

# Rows of the two calls. The shard is the second half, so that its first row is not the first row of the batch.
NUM_ROWS, SHARD = 4, slice(2, 4)
# Number of user lines in the message of a failed trial.
_NUM_PLACES = 4
# Of errors where a step reads the value of a tensor: torch 2.13, jax 0.10, TensorFlow 2.21.
_READS_A_VALUE = re.compile("DataDependent|Tracer|FakeTensor|tensor subclasses|symbolic|Concretization|GraphError")
# Number of values that are compared at once.
_PART = 2**20
# Largest rounding error, relative to the largest value. Real differences are far larger.
_TOLERANCES = {"float64": 1e-6, "float16": 0.02, "bfloat16": 0.1}

# Row layouts by the name of the step, each with the layers that the model had.
_found: ModelCache[dict[str, tuple[list[keras.layers.Layer], RowLayout]]] = ModelCache()


def row_layout_of(model: keras.Model, step: str = "call") -> RowLayout:
    """Returns the row layout that `find_row_layout` found for a model.

    If `find_row_layout` was not called, the layout is empty.

    Args:
        model: the model.
        step: `"call"` for the model's `call`, which Keras' steps use; or the name of a user-defined step, such as
            `"train_step"`.
    """
    _, layout = (_found.get(model) or {}).get(step, ([], RowLayout()))
    return layout


def is_known(model: keras.Model, step: str = "call") -> bool:
    """Returns whether the row layout of a model with its current layers is known. See `row_layout_of` for `step`."""
    layers, _ = (_found.get(model) or {}).get(step, ([], None))
    return list(map(id, layers)) == list(map(id, all_layers(model)))


def context_of(
    model: keras.Model, step: str, rank: int, replicas: tuple[ReplicaRows, ...], *, gather: Callable[[Any], Any],
    gather_rows: Callable[[Any], Any], total_rows: int | None = None,
) -> ReplicaContext:  # fmt: skip
    """Returns the context of one replica's shard of a global batch, or of a micro-batch.

    Args:
        model: the model that runs.
        step: see `row_layout_of`.
        rank: the index of the replica.
        replicas: see `kerasdp.data.sampling.Split.replicas`.
        gather: see `ReplicaContext`.
        gather_rows: see `ReplicaContext`.
        total_rows: the number of rows of the global batch, if `replicas` share a micro-batch; else None.
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
        # The moving statistics are updated after each micro-batch, before the next one.
        moving=[] if total_rows is None else None,
        is_micro_batch=total_rows is not None,
        is_custom_step=step != "call",
    )


class RowSearch(RowLayout):
    """Compares the tensors of two calls to find the rows: a call on `NUM_ROWS` rows, and a call on half of these rows.

    Also records the layers that add losses, and the layers that assign to variables.

    Attributes:
        is_whole: whether the current call is the first one, on all rows.
        found: the row layout that results from the comparison.
    """

    def __init__(self, will_be_checked: bool = False):
        """Starts a search for the rows.

        Args:
            will_be_checked: whether a later check would detect a wrong result. If so, the search may guess where
                the rows are.
        """
        super().__init__()
        self.is_whole, self.found, self._will_be_checked = True, RowLayout(), will_be_checked
        self.adding, self.assigning = self.found.adding, self.found.assigning
        # Shapes in the first call, with the tensors in which rows are folded with other axes.
        self._whole: dict[Any, list[tuple[tuple[int, ...], Any]]] = {}
        self._assigned: dict[int, Any] = {}

    def find(self, key: Any, number: int, shape: tuple[int, ...], tensor: Any, name: str) -> RowOrder | None:
        """Returns where the rows are in a tensor: see `RowLayout`.

        If the positions of the rows are unknown, the method records an error text, but raises no error. `found` raises
        the error when a step needs the positions.
        """
        if self.is_whole:
            is_folded = tensor is not None and tuple(tensor.shape[:1]) == shape[:1] and shape[:1] > (NUM_ROWS,)
            self._whole.setdefault(key, []).append((shape, tensor if is_folded else None))
            return RowOrder.FIRST
        whole = self._whole.get(key, [])
        found: RowOrder | str | None = (
            f"is not called the same number of times for {NUM_ROWS} samples as for {_rows_in(SHARD)} samples, so "
            "devices would compute different values; train on one device"
        )
        if number < len(whole):
            found = self._order(key, *whole[number], shape, tensor)
        self.found.add(key, found)
        return RowOrder.FIRST if isinstance(found, str) else found

    def _order(
        self, key: Any, whole_shape: tuple[int, ...], whole: Any, shape: tuple[int, ...], tensor: Any
    ) -> RowOrder | str | None:
        """Returns where the rows are in a tensor, from its shape for all rows and its shape for the shard.

        If rows are folded with other axes, values are also compared. If the positions are unknown, the result is the
        end of an error message.
        """
        num_rows = _rows_in(SHARD)
        if whole_shape == shape:
            return None
        is_alike = len(whole_shape) == len(shape) and whole_shape[1:] == shape[1:]
        is_split = is_alike and whole_shape[0] * num_rows == shape[0] * NUM_ROWS
        # Outputs may have a value for each pair of samples (a covariance): a replica has its samples with all samples.
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
            f"works on a tensor of shape {whole_shape} for {NUM_ROWS} samples, and of shape {shape} for {num_rows} "
            "samples: expected the samples on axis 0. If samples are on another axis, or if code mixes the samples of "
            "a batch, several devices would train differently than one device; move the samples to axis 0, gather the "
            "samples of all devices with kerasdp.all_rows, or train on one device or with --backend=jax"
        )

    def watch_call(
        self, call: Callable[..., Any], layer: keras.layers.Layer, context: ReplicaContext, args: Any, kwargs: Any
    ) -> Any:
        """Calls a layer, and records the variables to which the layer assigns.

        Also records where the rows are in the arguments and outputs of the layer.
        """
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
    """Converts a tensor to NumPy; bfloat16 becomes float32, because NumPy has no bfloat16."""
    is_bfloat16 = "bfloat16" in str(tensor.dtype)
    return ops.convert_to_numpy(ops.stop_gradient(ops.cast(tensor, "float32") if is_bfloat16 else tensor))


def tolerance_of(tensor: Any) -> float:
    """Returns how large rounding errors of a tensor may be, relative to its largest value."""
    return _TOLERANCES.get(keras.backend.standardize_dtype(tensor.dtype), 1e-3)


def is_close(expected: np.ndarray, received: np.ndarray, tolerance: float) -> bool:
    """Returns whether two arrays differ only by rounding error, relative to the largest value.

    Arrays of integers must be equal.
    """
    if expected.shape != received.shape:
        return False
    if expected.dtype.kind not in "fc":
        return tolerance == math.inf or bool((expected == received).all())
    largest = float(np.abs(expected).max(initial=0.0, where=np.isfinite(expected)))
    expected, received = expected.reshape(-1), received.reshape(-1)
    # In slices: in float64, the outputs of a large vocabulary would need more memory than a training step.
    parts = [slice(first, first + _PART) for first in range(0, expected.size, _PART)]
    return all(
        np.isclose(
            received[part].astype("float64"), expected[part].astype("float64"), rtol=0.0, atol=tolerance * largest,
            equal_nan=True,
        ).all()
        for part in parts
    )  # fmt: skip


def find_row_layout(model: keras.Model, inputs: Any) -> None:
    """Finds where the rows of a batch are in all tensors of a model in training.

    `row_layout_of` returns the result. No variable changes.

    Args:
        model: a built model, after a call of `portable`.
        inputs: `NUM_ROWS` samples as NumPy arrays, in the structure that `model` takes.
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
    """Finds where the rows of a batch are, by comparing two calls.

    Args:
        model: a built model, after a call of `portable`.
        step: see `row_layout_of`.
        call: a function that runs the step on a slice of `NUM_ROWS` rows. During the step, layers ask the given
            `RowLayout` where the rows are in each tensor.
        will_be_checked: see `RowSearch`.
    """
    search = RowSearch(will_be_checked)
    call(search, slice(0, NUM_ROWS))
    search.is_whole = False
    call(search, SHARD)
    _found.put(model, (_found.get(model) or {}) | {step: (all_layers(model), search.found)})


@contextlib.contextmanager
def trial(model: keras.Model, layout: RowLayout, rows: slice, is_micro_batch: bool = False) -> Iterator[ReplicaContext]:
    """Makes a context for a call on some of `NUM_ROWS` rows, and yields its `ReplicaContext`.

    No variable changes, and replicas exchange no data.
    """
    context = trial_context(layout, rows, is_micro_batch=is_micro_batch)
    # Only layers may draw random numbers, which they make portable.
    with use(context), portable_draws("a layer"), keras.StatelessScope(fixed_values(model)):
        yield context


@contextlib.contextmanager
def explaining_trial(title: str, num_rows: int, is_split: bool = True) -> Iterator[None]:
    """Turns an exception of user-defined code in a trial into a `UserError` that names only the user's lines.

    Args:
        title: the name of the code that is tried.
        num_rows: the number of rows in the trial.
        is_split: whether the code could run on one device without a trial.
    """
    try:
        yield
    except RunError:  # its message says what is wrong
        raise
    except Exception as error:
        if explained(error) is not None:  # a device failed
            raise
        reason = " split over devices" if is_split else ""
        line = error_text.in_a_line(error, _NUM_PLACES)
        advice = (
            "make the code work for any number of samples and for several calls; pass data with a row for each sample "
            "as an argument of the step"
        )
        if _READS_A_VALUE.search(line):
            advice = "a step cannot read the value of a tensor; return the tensor, and read it outside of the step"
        raise UserError(
            f"{title} fails on {num_rows} samples{reason}, in a trial before the first step: {line}; {advice}"
            + ("; or train on one device or with --backend=jax" if is_split else "")
        ) from error


def trial_context(layout: RowLayout, rows: slice, **fields: Any) -> ReplicaContext:
    """Returns the context of a trial on some of `NUM_ROWS` rows.

    Args:
        layout: the `RowLayout` that says where the rows are in the tensors of layers.
        rows: the rows of the trial.
        **fields: other fields of `ReplicaContext`.
    """
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
    """Returns some rows of NumPy arrays as tensors. For None, the result is None."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else ops.convert_to_tensor(leaf[rows]), inputs)


def call_in_training(model: keras.Model, inputs: Any) -> Any:
    """Calls a model, with `training=True` if the model takes that argument."""
    arguments = {"training": True} if "training" in model.call_signature_parameters else {}
    return model(inputs, **arguments)


def fixed_values(model: keras.Model, noise: float = 0.0) -> list[tuple[keras.Variable, Any]]:
    """Returns all variables of a model with their values, without gradients, for a `keras.StatelessScope`.

    Args:
        model: the model.
        noise: the relative change of each floating-point value, up or down.
    """
    arrays = with_noise([to_array(variable.value) for variable in model.variables], noise)
    return [(variable, ops.convert_to_tensor(array)) for variable, array in zip(model.variables, arrays)]


def with_noise(arrays: Any, noise: float) -> Any:
    """Multiplies each float in a structure of arrays by `1 + noise` or `1 - noise`, at random.

    Integers do not change.
    """
    signs = np.random.RandomState(0)

    def change(array: Any) -> Any:
        if not noise or getattr(getattr(array, "dtype", None), "kind", "") != "f":
            return array
        return np.asarray(array * (1 + noise * signs.choice([-1.0, 1.0], array.shape)), array.dtype)

    return keras.tree.map_structure(change, arrays)
