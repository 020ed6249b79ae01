"""Recomputes layers in the backward pass instead of keeping their outputs in memory (rematerialization).

The recomputation uses the same state as the first call: arguments with their masks, values of variables, Keras'
training flag, and the rows of the replica. So it draws the same random values, and returns the same results. It assigns
no values to variables and adds no losses, because the first call has already done so.
"""

import importlib
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import (
    ReadingScope,
    all_layers,
    is_named,
    mask_of,
    raw_value,
    set_call,
    set_mask,
    state_of_calls,
)
from kerasdp.keras_compat.patches import current_step, step_as, step_with

Tensor = Any
Call = Callable[..., Any]
# Variables, each with a value.
Values = list[tuple[keras.Variable, Tensor]]


def call_for_remat(call: Call, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer so that the backward pass recomputes it.

    The layer is not recomputed if another recomputed layer calls it, or if an input is symbolic. It is also not
    recomputed in trial steps, and in steps that record the outputs of each layer.

    Args:
        call: function that runs the layer.
        layer: the layer.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    step = current_step()
    is_trial = step.replica is not None and step.replica.is_trial
    leaves = keras.tree.flatten((args, kwargs))
    is_symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in leaves)
    if step.adding is not None or step.record is not None or is_trial or is_symbolic:
        return call(*args, **kwargs)
    backend: Any = importlib.import_module(f"kerasdp.scale.{keras.backend.backend()}_remat")
    return backend.rematerialized(Block(call, layer, args, kwargs))


def rematerialize_in(model: keras.Model, what: str) -> None:
    """Makes the backward pass recompute the chosen layers of a model.

    Args:
        model: a built model.
        what: value of `Config.remat`, which names the layers.

    Raises:
        UserError: if `what` matches no layer.
    """
    for layer in chosen_layers(model, what):
        set_call(layer, call_for_remat)


def chosen_layers(model: keras.Model, what: str) -> list[keras.layers.Layer]:
    """Returns the layers of a model that `what` names. `what` is a value of `Config.remat`."""
    if what == "blocks":
        chosen = blocks_of(model)
        if not chosen:
            raise UserError(
                f"--remat=blocks: {model.name} has no layer that contains layers with weights; name layers by a "
                "pattern, such as --remat='dense*'"
            )
        return chosen
    patterns = [pattern.strip() for pattern in what.split(",")]
    layers = [
        layer for layer in all_layers(model, include_self=False) if not isinstance(layer, keras.layers.InputLayer)
    ]
    for pattern in patterns:
        if not any(is_named(layer, [pattern]) for layer in layers):
            raise UserError(
                f"--remat={what}: {model.name} has no layer with the name or path {pattern!r}; choose from "
                f"{', '.join(dict.fromkeys(layer.name for layer in layers[:8]))}, ..."
            )
    return [layer for layer in layers if is_named(layer, patterns)]


def blocks_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of a model, and of nested models, that contain layers with weights.

    A nested model is itself a block if none of its layers contains layers with weights.
    """
    found: dict[int, keras.layers.Layer] = {}
    for layer in model.layers:
        within = blocks_of(layer) if isinstance(layer, keras.Model) else []
        if not within and any(inner.weights for inner in all_layers(layer, include_self=False)):
            within = [layer]
        found |= {id(block): block for block in within}
    return list(found.values())


class Block:
    """Wraps a call of a layer as a function of tensors. The function also returns assigned values and added losses.

    Attributes:
        layer: the layer.
        tensors: the tensors among the arguments of the call, followed by their masks.
        begun: the variables that the call read, with their values before the call.
    """

    def __init__(self, call: Call, layer: keras.layers.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]):
        """Stores the call and the current state of the step. See `call_for_remat` for the arguments."""
        self._call, self.layer, self._arguments = call, layer, (args, kwargs)
        self._leaves = keras.tree.flatten(self._arguments)
        self._places = [place for place, leaf in enumerate(self._leaves) if ops.is_tensor(leaf)]
        given = [self._leaves[place] for place in self._places]
        self._masked = [place for place in self._places if mask_of(self._leaves[place]) is not None]
        self.tensors = [*given, *(mask_of(self._leaves[place]) for place in self._masked)]
        step = current_step()
        self._step = step._replace(replica=step.replica and step.replica.once_more(), adding=[])
        self._as_it_was = state_of_calls()
        self.begun: Values = []

    def run(self, tensors: list[Tensor], values: Values) -> list[Tensor]:
        """Calls the layer. Returns outputs, their masks, values assigned to variables, and added losses.

        Args:
            tensors: tensors to use instead of `self.tensors`.
            values: values to use for some variables. Other variables keep their values.
        """
        self._adding: list[tuple[Callable[[Any], None], Any]] = []
        with ReadingScope(values) as scope, step_with(adding=self._adding):
            self._outputs = self._made(tensors)
        self._scope = scope
        assigned = {id(variable) for variable in scope.assigned}
        # Copies, because an assignment may change a value in place.
        self.begun = [
            (variable, ops.copy(value) if id(variable) in assigned and value is raw_value(variable) else value)
            for variable, value in scope.read.values()
        ]
        self._out_leaves = keras.tree.flatten(self._outputs)
        self._has_mask = [mask_of(leaf) is not None for leaf in self._out_leaves if ops.is_tensor(leaf)]
        return _flat(self._outputs, scope, self._adding)

    def finish(self, tensors: list[Tensor]) -> Any:
        """Assigns values to variables and adds losses, as the layer would do. Returns the layer's outputs.

        `tensors` is the result of `run`.
        """
        found = iter(tensors)
        given = [next(found) for _ in self._has_mask]
        for leaf, has_mask in zip(given, self._has_mask):
            if has_mask:
                set_mask(leaf, next(found))
        self._scope.write_back([next(found) for _ in self._scope.assigned])
        for add, _ in self._adding:
            add(next(found))
        own = iter(given)
        leaves = [next(own) if ops.is_tensor(leaf) else leaf for leaf in self._out_leaves]
        return keras.tree.pack_sequence_as(self._outputs, leaves)

    def again(self, tensors: list[Tensor], values: Values) -> list[Tensor]:
        """Computes the result of `run` again, in any thread and without side effects.

        Args:
            tensors: tensors to use instead of `self.tensors`.
            values: values of the variables in `begun`.
        """
        replica, adding = self._step.replica, list[Any]()
        step = self._step._replace(replica=replica and replica.once_more(), adding=adding)
        with self._as_it_was(), step_as(step), ReadingScope(values) as scope:
            return _flat(self._made(tensors), scope, adding)

    def _made(self, tensors: list[Tensor]) -> Any:
        found, leaves = iter(tensors), list(self._leaves)
        for place in self._places:
            leaves[place] = next(found)
        for place in self._masked:
            set_mask(leaves[place], next(found))
        args, kwargs = keras.tree.pack_sequence_as(self._arguments, leaves)
        return self._call(*args, **kwargs)


def _flat(outputs: Any, scope: ReadingScope, adding: list[tuple[Any, Any]]) -> list[Tensor]:
    """Returns the tensors among the outputs, their masks, the values assigned in a scope, and the added losses."""
    given = [leaf for leaf in keras.tree.flatten(outputs) if ops.is_tensor(leaf)]
    masks = [mask for leaf in given if (mask := mask_of(leaf)) is not None]
    return [*given, *masks, *scope.assigned_values(), *(loss for _, loss in adding)]
