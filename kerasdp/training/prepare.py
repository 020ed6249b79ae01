"""Builds a model, checks that the run can train it, and makes it portable between backends, before its first step."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from kerasdp.checkpoint.names import names_in
from kerasdp.config import Config
from kerasdp.contract import Strategy
from kerasdp.data.batch import Batch, Reader
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import all_layers, living_variables
from kerasdp.keras_compat.models import (
    as_keras_gives,
    build_compiled,
    has_call,
    made_by_compile,
    output_losses,
    own_steps,
    plain_attributes_kept,
    portable_steps,
    symbols_of,
)
from kerasdp.reporting import report
from kerasdp.run_state import ModelCache
from kerasdp.same.portable import portable
from kerasdp.sharding import bytes_of_row
from kerasdp.step.custom_steps import find_parts, find_rows_of_step, leave_unchanged, refuse_next_values, title_of
from kerasdp.step.global_batch import (
    is_loss_of_keras,
    reasons_to_gather_for_loss,
    reasons_to_gather_for_metrics,
    state_of_losses,
)
from kerasdp.step.replica import all_variables, require_known_weights
from kerasdp.step.row_search import NUM_ROWS, explaining_trial, find_row_layout, is_known, row_layout_of
from kerasdp.training.data_checks import check_data, warn_of_other_seed, warn_of_unscaled_images

# For each model: the result of `compile` for which the warning about gathered outputs was printed.
_said_of: ModelCache[tuple[Any, Any]] = ModelCache()


class MadeBefore:
    """Finds variables that were made before the run started.

    Those variables are on only one device, and their values do not depend on the seed of the run.
    """

    def __init__(self) -> None:
        self._found: dict[int, Any] = {id(variable): weakref.ref(variable) for variable in living_variables()}

    def refuse(self, model: keras.Model) -> None:
        """Raises `UserError` if the model, its optimizer or a metric uses a variable made before the run."""
        for variable in all_variables(model):
            found = self._found.get(id(variable))
            if found is not None and variable is found():
                raise UserError(
                    f"{variable.path} of {model.name} was made before kerasdp.launch: make (or load) the model, the "
                    "optimizer and the metrics in the function that launch calls"
                )


def prepare(
    model: keras.Model,
    reader: Reader,
    batch: Batch,
    config: Config,
    strategy: Strategy,
    scope: Callable[[], AbstractContextManager[None]],
    step: str,
) -> None:
    """Builds a model, checks its data, and makes its layers compute the same values on all backends.

    Args:
        model: the user's model.
        reader: reader of the data, which is also checked.
        batch: first batch of the reader, for its shapes.
        config: configuration of the run.
        strategy: strategy of the run.
        scope: function that returns the context in which variables are made.
        step: the model's step that will run: `train_step`, `test_step` or `predict_step`.

    Raises:
        UserError: if the model cannot be used in this run, or the data does not fit the model.
    """
    with_targets = step != "predict_step"  # whether loss and metrics are computed
    if with_targets and not model.compiled:
        raise UserError(f"{model.name} is not compiled: call model.compile(...) first")
    with scope():
        symbols = symbols_of((batch.inputs, batch.targets, batch.sample_weight), len(batch.indices))
        _build(model, symbols, with_targets)
        if with_targets:
            check_data(model, reader, batch)
    if step == "train_step":
        _refuse_to_train(model, config)
        if strategy.processes.rank == 0:
            warn_of_unscaled_images(model, batch)
            warn_of_other_seed(config.seed)
    require_known_weights(model)
    with scope():  # layers may get a seed generator, which is a variable on each device
        portable(model, config.batch_norm)
    find_rows(model, reader, config, strategy, step)
    if with_targets:
        _refuse_state_of_losses(model, reader, symbols[0], config, strategy)
    if with_targets and step not in own_steps(model):
        _say_what_is_gathered(model, batch, strategy)
    if step == "train_step" and step in own_steps(model):
        with scope():
            _build_optimizers(model, reader, config, strategy)


def _refuse_to_train(model: keras.Model, config: Config) -> None:
    """Raises `UserError` for a model that the run cannot train correctly."""
    if isinstance(model.optimizer, keras.optimizers.MultiOptimizer):
        raise UserError(
            f"{model.name}: expected one optimizer. Received: MultiOptimizer, which has no learning rate; pass one of "
            "its optimizers to compile, or use several in a custom loop (kerasdp.value_and_grad, runner.step)"
        )
    if config.accumulate > 1:
        refuse_next_values(model, "--accumulate", "remove --accumulate")
        for name in ("train_step", "compute_loss"):
            if getattr(type(model), name) is not getattr(keras.Model, name):
                raise UserError(
                    f"--accumulate: the {name} of {type(model).__name__} is user-defined and may need the whole batch "
                    "at once; remove --accumulate"
                )
        for reason in reasons_to_gather_for_metrics(model):
            raise UserError(
                f"--accumulate: {reason} may need the whole batch at once; remove --accumulate. If the variables of "
                "the metric are sums over the samples, declare the metric with kerasdp.per_sample instead"
            )


def find_rows(model: keras.Model, reader: Reader, config: Config, strategy: Strategy, step: str) -> None:
    """Finds where the rows of the batch are in the tensors of a step.

    Does nothing if layers run on neither shards nor micro-batches.

    Raises:
        UserError: for a layer that assigns to a variable, if there are micro-batches.
    """
    is_own = step in own_steps(model)
    if not (strategy.split.runs_on_shards or (config.has_micro_batches and not is_own)):
        return
    if is_own:
        if step == "train_step":
            name = getattr(model, "title", f"the train_step of {type(model).__name__}")
            refuse_next_values(model, f"{name} on several devices", "use --backend=jax, one device, or no custom step")
        if not is_known(model, step):
            data = reader.sample(NUM_ROWS) if step != "predict_step" else (reader.sample(NUM_ROWS)[0], None, None)
            will_be_checked = step == "train_step" and config.check != "off"
            find_rows_of_step(model, step, data, strategy, will_be_checked)
    elif not is_known(model):
        find_row_layout(model, reader.sample(NUM_ROWS)[0])
        layout = row_layout_of(model)
        for layer, variables in layout.assigning.values() if config.has_micro_batches else ():
            raise UserError(
                f"layer {layer.name} assigns to {variables[0].path} in its call, but would see only one micro-batch "
                "at a time; use --strategy=data, without --accumulate"
            )
        called = {layer.name: "assigns to a variable" for layer, _ in layout.assigning.values() if layout.keeps(layer)}
        called |= {layer.name: "adds a loss" for layer in layout.adding.values()}
        if called and strategy.split.runs_on_shards and strategy.processes.rank == 0:
            name, reason = next(iter(called.items()))
            others = f" (and {len(called) - 1} more)" if len(called) > 1 else ""
            report.warn(
                f"layer {name}{others} of {model.name} {reason} in its call, so each device runs the layer on the "
                "whole batch, which takes more time; to save time, move the operation into a small separate layer"
            )


def _say_what_is_gathered(model: keras.Model, batch: Batch, strategy: Strategy) -> None:
    """Warns about the cost of gathering outputs.

    Outputs are gathered if a loss or a metric may not be a sum over the samples.
    """
    symbols, compiled = row_layout_of(model).outputs, made_by_compile(model)
    if symbols is None or _said_of.get(model) == compiled or not strategy.split.runs_on_shards:
        return
    _said_of.put(model, compiled)
    reasons = reasons_to_gather_for_loss(model) + reasons_to_gather_for_metrics(model)
    if reasons and strategy.processes.rank == 0:
        num_bytes = len(batch.indices) * bytes_of_row(keras.tree.flatten(symbols))
        report.warn(
            f"each device gathers the outputs of the whole batch ({num_bytes / 1e6:,.2f} MB), for "
            f"{' and '.join(reasons)}; if a loss or metric is a sum over the samples, mark it with kerasdp.per_sample"
        )


def _build_optimizers(model: keras.Model, reader: Reader, config: Config, strategy: Strategy) -> None:
    """Builds the optimizers of a user-defined step before the step is compiled.

    Runs a trial of the step to find out which weights each optimizer updates.

    Raises:
        UserError: if the run writes checkpoints and the first step leaves an optimizer unused. That optimizer stays
            unbuilt, and a checkpoint cannot contain it.
    """
    optimizers = names_in(model).optimizers
    if all(optimizer.built for _, optimizer in optimizers):
        return
    if config.backend != "jax" or "train_step" in portable_steps(model):  # a function of states builds none
        with plain_attributes_kept(model) if config.backend == "jax" else leave_unchanged(model):
            sample = as_keras_gives(reader.sample(NUM_ROWS))
            with explaining_trial(title_of(model, "train_step"), NUM_ROWS, is_split=False):
                parts = find_parts(model.train_step, sample, strategy.each_replica)
        for optimizer, weights in parts.optimizers:
            if not optimizer.built:
                optimizer.build(weights)
    for name, optimizer in optimizers if config.keeps_checkpoints else ():
        if not optimizer.built:
            raise UserError(
                f"{name} of {model.name} is an optimizer that the first step does not use. Checkpoints cannot save an "
                "unbuilt optimizer; call optimizer.build(weights) before training, or add --checkpoint_every=never"
            )


def _refuse_state_of_losses(
    model: keras.Model, reader: Reader, inputs: Any, config: Config, strategy: Strategy
) -> None:
    """Raises `UserError` for a loss that updates a variable, if the run would lose the variable's value.

    Keras does not track variables of losses.
    """
    if all(map(is_loss_of_keras, output_losses(model))) or not has_call(model):
        return
    is_alone = strategy.split.num_replicas == strategy.processes.num_processes == 1
    if config.backend != "jax" and is_alone and not config.keeps_checkpoints:
        return
    outputs = row_layout_of(model).outputs
    outputs = model.compute_output_spec(inputs) if outputs is None else outputs
    for variable in state_of_losses(model, reader.sample(NUM_ROWS)[1], outputs):
        raise UserError(
            f"a loss of {model.name} assigns to {variable.path}. Checkpoints do not save this variable, and several "
            "devices or --backend=jax do not update it; move the variable to a layer that calls add_loss, or train on "
            "one device with --backend=torch or --backend=tensorflow, and --checkpoint_every=never"
        )


def _build(model: keras.Model, symbols: Any, with_targets: bool) -> None:
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise UserError(
                f"layer {layer.name} has stateful=True. Keras loses the state after each batch with --backend=jax, "
                "and computes no gradients through the state with --backend=torch. No checkpoint contains the state; "
                "remove stateful=True"
            )
    if not has_call(model):  # no `call`: its layers are built already, and only its custom steps use them
        if with_targets and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return
    if model.compiled and with_targets:  # loss and metrics, too
        build_compiled(model, symbols)
    elif not all(layer.built for layer in all_layers(model)):
        # Not `build`, which may leave the layers within a subclassed model as they are.
        model(symbols[0])
