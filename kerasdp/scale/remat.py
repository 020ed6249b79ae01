"""Computes layers once more in the backward pass, instead of keeping what they compute: rematerialization, exactly.

The recomputation sees what the call saw: arguments with their masks, the values that variables had, whether Keras is in
training, which rows a replica has. So it draws the same random numbers. What it assigns to variables, and adds to the
loss, is dropped: the call did that.
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
    """Makes the call of a layer, to be computed once more in the backward pass.

    Not within such a call, nor in trials, nor where each layer's outputs are recorded.

    Args:
        call: what Keras does.
        layer: that is called.
        args: of the call; so are `kwargs`.
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
    """Lets layers of a model be computed once more in the backward pass.

    Args:
        model: built.
        what: see `Config.remat`.

    Raises:
        UserError: if there are none.
    """
    for layer in chosen_layers(model, what):
        set_call(layer, call_for_remat)


def chosen_layers(model: keras.Model, what: str) -> list[keras.layers.Layer]:
    """Returns the layers of a model that `Config.remat` names."""
    if what == "blocks":
        chosen = blocks_of(model)
        if not chosen:
            raise UserError(
                f"--remat=blocks: {model.name} has no layer that holds others with weights; name layers by a pattern, "
                "as --remat='dense*'"
            )
        return chosen
    patterns = [pattern.strip() for pattern in what.split(",")]
    layers = [
        layer for layer in all_layers(model, include_self=False) if not isinstance(layer, keras.layers.InputLayer)
    ]
    for pattern in patterns:
        if not any(is_named(layer, [pattern]) for layer in layers):
            raise UserError(
                f"--remat={what}: {model.name} has no layer of that name or path: {pattern!r}. It has "
                f"{', '.join(dict.fromkeys(layer.name for layer in layers[:8]))}, ..."
            )
    return [layer for layer in layers if is_named(layer, patterns)]


def blocks_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of a model, and of models within it, that hold layers with weights.

    A model within it that has no such layers is one itself.
    """
    found: dict[int, keras.layers.Layer] = {}
    for layer in model.layers:
        within = blocks_of(layer) if isinstance(layer, keras.Model) else []
        if not within and any(inner.weights for inner in all_layers(layer, include_self=False)):
            within = [layer]
        found |= {id(block): block for block in within}
    return list(found.values())


class Block:
    """The call of a layer, as a function of tensors; what else it does comes out of it.

    Attributes:
        layer: that is called.
        tensors: among its arguments, with their masks after them.
        begun: the variables that the call has read, with their values of before.
    """

    def __init__(self, call: Call, layer: keras.layers.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]):
        """See `call_for_remat`."""
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
        """Makes the call; returns its outputs, their masks, what it assigns to variables, and what it adds to the loss.

        Args:
            tensors: in the place of `tensors`.
            values: of variables; others have their own.
        """
        self._adding: list[tuple[Callable[[Any], None], Any]] = []
        with ReadingScope(values) as scope, step_with(adding=self._adding):
            self._outputs = self._made(tensors)
        self._scope = scope
        assigned = {id(variable) for variable in scope.assigned}
        # What is assigned may be written in place.
        self.begun = [
            (variable, ops.copy(value) if id(variable) in assigned and value is raw_value(variable) else value)
            for variable, value in scope.read.values()
        ]
        self._out_leaves = keras.tree.flatten(self._outputs)
        self._has_mask = [mask_of(leaf) is not None for leaf in self._out_leaves if ops.is_tensor(leaf)]
        return _flat(self._outputs, scope, self._adding)

    def finish(self, tensors: list[Tensor]) -> Any:
        """Writes to variables, and adds to the loss, what `run` has returned; returns the layer's outputs."""
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
        """Computes once more what `run` has returned, in whatever thread; changes nothing.

        Args:
            tensors: in the place of `tensors`.
            values: of the variables of `begun`.
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
    """Returns the tensors among outputs, their masks, what was assigned in a scope, and what is added to the loss."""
    given = [leaf for leaf in keras.tree.flatten(outputs) if ops.is_tensor(leaf)]
    masks = [mask for leaf in given if (mask := mask_of(leaf)) is not None]
    return [*given, *masks, *scope.assigned_values(), *(loss for _, loss in adding)]
