"""Computes gradients of a function written with Keras layers and `keras.ops`, the same way on every backend."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import keras

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import InnerScope, current_value
from kerasdp.keras_compat.optimizers import applying_in_scope

Tensor = Any


def value_and_grad(function: Callable[..., Any], variables: Any = None, has_aux: bool = False) -> Callable[..., Any]:
    """Returns a function that computes the value of `function` and its gradients, like `jax.value_and_grad`.

    The returned function works the same on each backend: in a `train_step`, in a function of `Runner.step`, and outside
    of a run. Calls may be nested, for gradients of gradients. Values that layers assign to variables (moving
    statistics, seeds) are kept. `keras.ops.stop_gradient` stops gradients.

    Args:
        function: a function with any arguments that returns a scalar. With a `LossScaleOptimizer`, the function must
            return `optimizer.scale_loss(loss)`. Then pass the gradients to the optimizer unchanged.
        variables: a Keras variable, or a structure (list, tuple, dict) of variables. None: gradients are taken with
            respect to the first argument, a tensor or a structure of tensors.
        has_aux: whether `function` returns `(scalar, aux)`, where `aux` is a structure of tensors.

    Returns:
        A function with the same arguments. It returns `(value, gradients)`, or `((value, aux), gradients)` with
        `has_aux`. `gradients` has the structure of `variables`, or of the first argument. Each gradient has the shape
        of its variable or tensor. If the value does not depend on a variable or tensor, its gradient is None.

    Raises:
        UserError: when the returned function is called, if there are no variables or tensors, or one of them has no
            floating-point dtype. Also if `function` does not return a scalar.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD()

        def loss(x, y):
            return keras.ops.mean(keras.losses.mean_squared_error(y, model(x)))

        x, y = np.random.rand(64, 8), np.random.rand(64, 1)
        value, gradients = kerasdp.value_and_grad(loss, model.trainable_variables)(x, y)
        optimizer.apply(gradients, model.trainable_variables)
        ```
    """
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function, updated=())
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        if variables is None and not args:
            raise UserError(f"value_and_grad of {name}: expected variables or an argument of {name}. Received: neither")
        own = args[0] if variables is None else variables
        leaves = _floats_in(own, name)
        values = [current_value(leaf) if isinstance(leaf, keras.Variable) else leaf for leaf in leaves]
        backend: Any = importlib.import_module(f"kerasdp.backends.{keras.backend.backend()}.gradients")

        def compute(values: list[Tensor]) -> tuple[Tensor, Any]:
            given = (keras.tree.pack_sequence_as(own, values), *args[1:]) if variables is None else args
            return _scalar_and_aux(function(*given, **kwargs), has_aux, name)

        value, aux, gradients = backend.differentiate(compute, values, leaves if variables is not None else [])
        return ((value, aux) if has_aux else value), keras.tree.pack_sequence_as(own, gradients)

    return differentiated


def in_scope(lists: Sequence[list[keras.Variable]], state: Sequence[list[Tensor]], step: Callable[[], Any]) -> Any:
    """Runs a step on given values of variables, on JAX; returns its result and the new values of the variables.

    Args:
        lists: lists of variables.
        state: the values of these variables, in the same order.
        step: the step, a function without arguments.

    Raises:
        UserError: if the step assigns to a variable that is not in `lists`, because JAX would lose the new value.
    """
    begun = [pair for variables, values in zip(lists, state) for pair in zip(variables, values)]
    known = {id(variable) for variables in lists for variable in variables}
    with InnerScope(begun) as scope, applying_in_scope():
        result = step()
    for variable in scope.assigned:
        if id(variable) not in known:
            raise UserError(
                f"the step assigns to {variable.path}, a variable that does not belong to the model, so jax would lose "
                "the value; make the variable an attribute of the model"
            )
    return result, tuple([scope.get_current_value(variable) for variable in variables] for variables in lists)


def _floats_in(structure: Any, name: str) -> list[Any]:
    """Returns the variables or tensors of a structure, after a check that all are floating-point.

    Raises:
        UserError: if there are no variables or tensors, or if the dtype of one is not floating-point.
    """
    leaves = keras.tree.flatten(structure)
    if not leaves:
        raise UserError(
            f"value_and_grad of {name}: expected variables or tensors for which to compute gradients. Received: none; "
            "build the model first"
        )
    leaves = [leaf if isinstance(leaf, keras.Variable) else keras.ops.convert_to_tensor(leaf) for leaf in leaves]
    for leaf in leaves:
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        if "float" not in dtype:
            what = f"{leaf.path}, of {dtype}" if isinstance(leaf, keras.Variable) else f"a tensor of {dtype}"
            raise UserError(f"value_and_grad of {name}: expected floating-point values. Received: {what}; leave it out")
    return leaves


def _scalar_and_aux(result: Any, has_aux: bool, name: str) -> tuple[Tensor, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise UserError(f"value_and_grad: expected {name} to return (scalar, aux); return both, or leave out has_aux")
    value, aux = result if has_aux else (result, None)
    value = keras.ops.convert_to_tensor(value)
    if len(value.shape) or "float" not in keras.backend.standardize_dtype(value.dtype):
        raise UserError(
            f"value_and_grad: expected {name} to return a floating-point scalar. Received: shape {tuple(value.shape)}, "
            f"{keras.backend.standardize_dtype(value.dtype)}; return a mean or a sum, such as keras.ops.mean(...)"
        )
    return value, aux
