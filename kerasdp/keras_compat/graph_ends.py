"""Reads what a model says of its outputs: their shapes, and the activation behind each."""

from typing import Any

import keras
from keras.src import backend
from keras.src.models.functional import Functional

from kerasdp.keras_compat.models import as_functional, outputs_structure


def calls_own_graph(model: keras.Model) -> bool:
    """Returns whether a model's inputs go into its graph as they are: no subclass with a `call` of its own.

    Keras 3.15: `keras.src.models.functional.Functional`, which has no public name.
    """
    return type(model).call in (Functional.call, keras.Sequential.call)


def symbols_of(data: Any, num_rows: int) -> Any:
    """Returns `KerasTensor`s of a structure of arrays, with the rows of the global batch: a process may hold some."""

    def symbol(leaf: Any) -> Any:
        return None if leaf is None else keras.KerasTensor((num_rows, *leaf.shape[1:]), str(leaf.dtype))

    return keras.tree.map_structure(symbol, data)


def output_symbols(model: keras.Model, inputs: Any) -> Any:
    """Returns `KerasTensor`s of a model's outputs, which is built if it is not; None if it takes no symbols.

    Keras 3.15: `keras.src.backend.compute_output_spec`, with which its own trainer builds a model. The public
    `keras.Model.compute_output_spec` wants a model that is built.

    Args:
        model: any.
        inputs: `KerasTensor`s, with as many rows as a batch has.
    """
    functional = as_functional(model) if calls_own_graph(model) else None
    if functional is None:
        try:
            symbols = backend.compute_output_spec(model, inputs, training=False)
        except Exception:  # a user-defined `call`: Keras says it better, or does without where it runs eagerly
            return None
        functional = as_functional(model) if calls_own_graph(model) else None
        if functional is None:
            return symbols
    return outputs_structure(functional)


def last_activation(symbol: Any) -> tuple[str, str | None]:
    """Returns the name of the layer that makes an output, and of its activation.

    `"linear"` stands for a layer with weights and without activation, None for what is not known: the output of a
    user-defined model, or of a layer that may do anything.

    Keras 3.15: `KerasTensor._keras_history`, `Operation._inbound_nodes`; no public way.
    """
    history = getattr(symbol, "_keras_history", None)
    if history is None:
        return "", None
    operation = history.operation
    nested = as_functional(operation) if isinstance(operation, keras.Model) and calls_own_graph(operation) else None
    if nested is not None:
        return last_activation(keras.tree.flatten(outputs_structure(nested))[history.tensor_index])
    name = getattr(getattr(operation, "activation", None), "__name__", None)
    if isinstance(operation, keras.layers.Softmax):
        name = "softmax"
    is_passing_on = isinstance(operation, (keras.layers.Reshape, keras.layers.Flatten))
    if is_passing_on or (isinstance(operation, keras.layers.Activation) and name == "linear"):
        return last_activation(operation._inbound_nodes[history.node_index].input_tensors[0])
    if name == "linear" and not getattr(operation, "weights", None):
        name = None
    return operation.name, name
