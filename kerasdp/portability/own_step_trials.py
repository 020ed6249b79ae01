"""Tries user-defined steps on a few rows, to see what they do; nothing changes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kerasdp.keras_compat.own_steps import plain_attributes_kept
from kerasdp.keras_compat.training import losses_of_whole_batch
from kerasdp.portability.added_losses import keep
from kerasdp.portability.own_steps import Found, Share, joined_steps, run
from kerasdp.portability.random import UNNAMED, portable_draws
from kerasdp.portability.replica_context import use
from kerasdp.portability.row_axes import RowAxes
from kerasdp.portability.row_search import Whole, find_row_axes_of, fixed_values, rows_of, trial_context


def find_rows_of_step(
    model: keras.Model,
    name: str,
    data: Any,
    in_replicas: Callable[[Callable[[], None]], None],
    build: Callable[[keras.optimizers.Optimizer, list[Any]], None],
    will_be_checked: bool = False,
) -> None:
    """Finds where the rows are in all that a user-defined step computes; `row_axes_of` gives it.

    The step is run on a few rows and on half of them; nothing changes.

    Args:
        model: built and made `portable`.
        name: of the step.
        data: `NUM_ROWS` samples: inputs, targets and sample weights, in NumPy.
        in_replicas: see `kerasdp.backends.base.Strategy`.
        build: see `Share`.
        will_be_checked: whether a wrong answer will be found, so that an uncertain one will do.

    Raises:
        UserError: if that cannot be known, since the step mixes the samples of a batch.
    """

    def call(axes: RowAxes, rows: slice) -> None:
        left = [axes]  # for the first replica of this process; the others see the same

        def trial() -> None:
            context = trial_context(left.pop() if left else Whole(), rows, keep)
            with use(context), portable_draws(UNNAMED):
                run(model, name, rows_of(data, rows), Share.of_trial(rows.stop - rows.start, build))

        with changing_nothing(model):
            in_replicas(trial)

    find_row_axes_of(model, name, call, will_be_checked)


@contextlib.contextmanager
def changing_nothing(model: keras.Model) -> Iterator[None]:
    """Returns the context of steps that are only looked at: afterwards the model is what it was.

    Weights, and plain attributes (a counter of steps, say); metrics are as at the begin of an epoch.
    """
    model.reset_metrics()
    values = fixed_values(model)
    try:
        with plain_attributes_kept(model), joined_steps(model):
            yield
    finally:
        model.reset_metrics()
        for variable, value in values:
            variable.assign(value)
            if getattr(variable.value, "grad", None) is not None:  # of torch: not every step begins by zeroing it
                variable.value.grad = None


def found_in_whole_step(
    model: keras.Model,
    data: tuple[Any, Any, Any],
    in_replicas: Callable[[Callable[[], None]], None],
    build: Callable[[keras.optimizers.Optimizer, list[Any]], None],
) -> list[Found]:
    """Runs a model's own `train_step` on a whole batch, without an update, within `changing_nothing`.

    Args:
        model: as in `find_rows_of_step`; so are `data`, of any number of rows, `in_replicas` and `build`.

    Returns:
        What it found, as in `Share`.
    """
    found: list[list[Found]] = []

    def trial() -> None:
        tensors = rows_of(data, slice(None))
        share = Share.of_trial(len(keras.tree.flatten(tensors)[0]), build)
        with portable_draws(UNNAMED), losses_of_whole_batch():
            run(model, "train_step", tensors, share)
        found.append(share.found)

    in_replicas(trial)
    return found[0]
