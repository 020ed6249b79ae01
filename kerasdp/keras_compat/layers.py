"""Reads and changes the private state of Keras layers and variables: values, masks, losses, sublayers."""

import contextlib
import copy
import dataclasses
import fnmatch
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras.src.backend.common import masking
from keras.src.backend.common.global_state import GLOBAL_STATE_TRACKER
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.models.functional import Functional

from kerasdp.errors import UserError
from kerasdp.keras_compat.patches import replaced_in_each, wrap_for_good, wrapped


def is_next_value(variable: Any) -> bool:
    """Returns whether the "gradient" of a variable is its next value, as for the float8 scales of Keras (3.15).

    The scales are the same on each replica. The new value is the largest one of all replicas, as for Keras'
    `gradient_accumulation_steps`.
    """
    return getattr(variable, "overwrite_with_gradient", False)


def all_layers(layer: keras.layers.Layer, *, include_self: bool = True) -> list[keras.layers.Layer]:
    """Returns a layer or model and all layers within it, at any depth, in the order of Keras.

    Uses the private `Layer._flatten_layers` of Keras 3.15. The public `model.layers` has only the first level, and a
    layer has no `layers`.
    """
    return list(layer._flatten_layers(include_self=include_self))


def has_seed_generators(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer itself holds a `keras.random.SeedGenerator`; its sublayers do not count.

    Reads the private `Layer._seed_generators` of Keras 3.15; there is no public API for it.
    """
    return bool(layer._seed_generators)


def seed_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that hold the random state of a model's layers.

    A step resets them for each micro-batch. So each row gets the same random values as in the whole batch.

    Uses the private `Layer._seed_generators` of Keras 3.15; there is no public API for it.
    """
    return [generator.state for layer in all_layers(model) for generator in layer._seed_generators]


def is_named(layer: keras.layers.Layer, patterns: Iterable[str]) -> bool:
    """Returns whether one of the patterns, such as 'block*', matches the name or the path of a layer."""
    names = (layer.name, layer.path or "")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def frozen_weights(model: keras.Model) -> list[keras.Variable]:
    """Returns the weights of a model that were created as trainable, and are frozen now.

    Batch norm statistics and seeds do not count: they were never trainable. In Keras 3.15, `Layer._trainable_variables`
    keeps the weights of `add_weight(trainable=True)`, even if `trainable` changes later.
    """
    found = {id(one): one for layer in all_layers(model) for one in layer._trainable_variables if not one.trainable}
    return list(found.values())


@contextlib.contextmanager
def adapters_in_float64() -> Iterator[None]:
    """Returns a context in which float64 layers get float64 adapters (LoRA); Keras 3.15 makes them float32."""

    def add(add_weight: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("name")).startswith("lora_") and layer.variable_dtype == "float64":
            kwargs["dtype"] = "float64"
        return add_weight(layer, *args, **kwargs)

    with wrapped(keras.Layer, add_weight=add):  # wraps the `add_weight` of this moment
        yield


def saved_merged(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a model with LoRA adapters is saved with the adapters merged into its kernels.

    Keras 3.15 saves merged kernels, too, but it also saves the `lora_rank`. So the loaded layer has adapters of zeros,
    which training does not change. The optimizer is not saved, because it has only the adapters.
    """

    def plain(layer: keras.layers.Layer) -> Callable[[], dict[str, Any]]:
        return lambda: type(layer).get_config(layer) | {"lora_rank": None, "lora_alpha": None}

    adapted = [layer for layer in all_layers(model) if getattr(layer, "lora_enabled", False)]
    changes: list[tuple[Any, dict[str, Any]]] = [(layer, {"get_config": plain(layer)}) for layer in adapted]
    if adapted:
        changes.append((model, {"optimizer": None, "compiled": False}))
    return replaced_in_each(changes)


def living_variables() -> list[keras.Variable]:
    """Returns all Keras variables of this process, inside and outside of models.

    They come from Python's garbage collector, because Keras (3.15) has no list of them.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), keras.Variable)]


def added_losses(layer: keras.layers.Layer) -> list[Any]:
    """Returns the losses that a layer itself passed to `add_loss` in its last call.

    Uses the private `Layer._get_own_losses` of Keras 3.15. The public `layer.losses` includes the losses of its
    sublayers, so it does not show which layer added a loss.
    """
    return layer._get_own_losses()


def forget_added_losses(model: keras.Model) -> None:
    """Clears the losses that a model and its layers added in an earlier step.

    Uses the private `Layer._clear_losses` of Keras 3.15. On jax, `stateless_call` does not call it for the model
    itself. In a scope, a layer stores its losses by `id`. A loss of the next program may get the same `id`, and would
    count twice.
    """
    model._clear_losses()


def hook_add_loss(take: Callable[[Callable[..., None], keras.layers.Layer, Any], None]) -> None:
    """Installs a function that gets each loss that a layer passes to `add_loss`.

    Keras 3.15 stores added losses in private lists and has no hook for them. So the public `add_loss` is wrapped once,
    permanently.

    Args:
        take: called with Keras' method, the layer and the loss.
    """
    wrap_for_good(keras.layers.Layer, "add_loss", take)


def hook_calls(make: Callable[..., Any]) -> None:
    """Installs a function that makes the calls of all layers and models.

    In Keras 3.15, `Layer.__call__` converts the arguments, then calls the public `Operation.__call__`, then applies the
    activity regularizer. Keras has no hook like PyTorch's forward hooks. So `Operation.__call__` is wrapped once,
    permanently.

    Args:
        make: called with Keras' method, the layer (or another operation) and the arguments.
    """
    wrap_for_good(keras.Operation, "__call__", make)


def become(layer: keras.layers.Layer, kind: type) -> None:
    """Turns a layer into an object of a subclass, permanently: it keeps its weights, its name and its place in graphs.

    In Keras 3.15, graphs and models hold the layer object itself, so no other object can replace it. This function is
    not needed once Keras computes the same on all backends, or can replace a layer of a built model.
    """
    layer.__class__ = kind


def weight_penalties(model: keras.Model) -> list[Any]:
    """Returns the penalties of the regularizers of a model's trainable weights, as scalar tensors.

    The same as `Layer._get_regularization_losses` of Keras 3.15, through the public API.
    """
    regularized = [weight for weight in model.trainable_variables if weight.regularizer is not None]
    return [weight.regularizer(weight.value) for weight in regularized]


def mask_of(tensor: Any) -> Any:
    """Returns the mask that a layer attached to its output; None without a mask.

    Uses the private `masking.get_keras_mask` of Keras 3.15. It reads an attribute of the tensor, or a separate table on
    jax. There is no public API for it.
    """
    return masking.get_keras_mask(tensor)


def has_mask(tensor: Any) -> bool:
    """Returns whether a layer attached a mask to a tensor."""
    return mask_of(tensor) is not None


def set_mask(tensor: Any, mask: Any) -> Any:
    """Attaches a mask to a tensor, for the losses and metrics of Keras, and returns the tensor.

    Uses the private `masking.set_keras_mask` of Keras 3.15; there is no public API for it.
    """
    masking.set_keras_mask(tensor, mask)
    return tensor


def with_mask(function: Callable[[Any], Any], tensor: Any) -> Any:
    """Returns `function(tensor)`; a mask that is attached to the tensor becomes `function(mask)`."""
    mask = mask_of(tensor)
    return function(tensor) if mask is None else set_mask(function(tensor), function(mask))


def raw_value(variable: keras.Variable) -> Any:
    """Returns the backend's variable or array in which a Keras variable stores its value, whatever scope is active.

    Uses the private `Variable._value` of Keras 3.15. The public `value` reads scopes, and casts.
    """
    return variable._value


def raw_values(variables: Iterable[keras.Variable]) -> list[Any]:
    """Returns the `raw_value` of each variable.

    Each step calls it. So it reads the attribute directly, without a function call for each variable.
    """
    return [variable._value for variable in variables]


def set_raw_values(variables: Iterable[keras.Variable], values: Iterable[Any]) -> None:
    """Sets the backend's array in which each variable stores its value.

    The new array may be on another device, while `assign` keeps the device.
    """
    for variable, value in zip(variables, values):
        variable._value = value


def current_value(variable: keras.Variable) -> Any:
    """Returns the value of a variable in the active scope, or its stored value, without a cast.

    Uses the private `get_stateless_scope` of Keras 3.15. The public `value` casts within layers.
    """
    scope = get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return raw_value(variable) if value is None else value


def is_in_scope() -> bool:
    """Returns whether a `keras.StatelessScope` is active.

    Uses the private `get_stateless_scope` of Keras 3.15.
    """
    return get_stateless_scope() is not None


class InnerScope(keras.StatelessScope):
    """A stateless scope that reads from the scope around it; variables in `state_mapping` get other values.

    In Keras 3.15, an inner scope does not read the outer one, and `get_stateless_scope` has no public name.
    `collect_losses` is on, because `layer.losses` has added losses only with it. Penalties of weights read the value of
    each weight.
    """

    def __init__(self, state_mapping: Iterable[tuple[keras.Variable, Any]] = ()):
        """See `keras.StatelessScope`."""
        super().__init__(state_mapping, collect_losses=True)
        self._around = get_stateless_scope()
        self._assigned: dict[int, keras.Variable] = {}

    @property
    def assigned(self) -> list[keras.Variable]:
        """Returns the variables that were assigned in this scope."""
        return list(self._assigned.values())

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Records the assignment of a value to a variable."""
        self._assigned[id(update[0])] = update[0]
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the value of a variable in this scope, else in the scope around it, else its stored value."""
        value = super().get_current_value(variable)
        if value is None and self._around is not None:
            value = self._around.get_current_value(variable)
        return raw_value(variable) if value is None else value

    def assigned_values(self) -> list[Any]:
        """Returns the values that were assigned in this scope, in the order of `write_back`."""
        return [self.get_current_value(variable) for variable in self.assigned]

    def write_back(self, values: list[Any] | None = None) -> None:
        """Assigns the values of this scope in the scope around it, or to the variables if there is none.

        `values`: other values to assign instead.
        """
        for variable, value in zip(self.assigned, self.assigned_values() if values is None else values):
            variable.assign(value)


class ScopeOfParts(keras.StatelessScope):
    """A stateless scope of sharded variables: a shard becomes the full value when it is read.

    In Keras 3.15, a `StatelessScope` raises for a value that does not have the shape of its variable.
    """

    def __init__(self, values: Iterable[tuple[keras.Variable, Any]], read: Callable[[keras.Variable, Any], Any]):
        """`read` gets a variable and its shard, and returns the full value."""
        super().__init__(collect_losses=True)
        self.state_mapping = {id(variable): value for variable, value in values}
        self._read = read

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the full value of a variable; None if the variable is not in this scope."""
        value = super().get_current_value(variable)
        return None if value is None else self._read(variable, value)


class HeldInParts(keras.Variable):
    """A variable that is sharded over the devices: only a scope that has its value can read it.

    A variable gets this class while it is sharded, and its former class afterwards. The object stays the same, because
    layers and optimizers refer to it.
    """

    @property
    def value(self) -> Any:
        """Returns the value in the active scope.

        Raises:
            UserError: outside of a step, where this device has only a shard of it.
        """
        scope = get_stateless_scope()
        if scope is None or scope.get_current_value(self) is None:
            raise UserError(
                f"{self.path} is sharded over the devices between two steps (--shard): read or change it before fit, "
                "after it, or in on_epoch_end"
            )
        return super().value


def held_in_parts(variable: keras.Variable, is_part: bool) -> None:
    """Marks a variable as sharded (`HeldInParts`), or as an ordinary variable if `is_part` is False."""
    variable.__class__ = HeldInParts if is_part else keras.Variable


def autocast(variable: keras.Variable, value: Any) -> Any:
    """Casts a value of a variable to the type in which the current layer computes.

    Uses the private `Variable._maybe_autocast` of Keras 3.15. The public `value` also does this, but needs the full
    value.
    """
    return variable._maybe_autocast(value)


def with_shapes(
    variables: Iterable[tuple[keras.Variable, tuple[int, ...]]],
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which variables have the shapes of their shards.

    In Keras 3.15, `assign` compares the shape of the new value with `Variable._shape`.
    """
    return replaced_in_each((variable, {"_shape": tuple(shape)}) for variable, shape in variables)


class ReadingScope(InnerScope):
    """An `InnerScope` that records the value of each variable at its first read."""

    def __init__(self, state_mapping: Iterable[tuple[keras.Variable, Any]] = ()):
        """See `keras.StatelessScope`."""
        super().__init__(state_mapping)
        self.read: dict[int, tuple[keras.Variable, Any]] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the value as `InnerScope` does, and records it."""
        value = super().get_current_value(variable)
        # The scope around gathers the full value of a shard again: it is not recorded.
        is_part = tuple(getattr(raw_value(variable), "shape", variable.shape)) != tuple(variable.shape)
        if id(variable) not in self._assigned and not is_part:
            self.read.setdefault(id(variable), (variable, value))
        return value


def state_of_calls() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Saves the state of Keras' layer calls; returns a function that makes contexts with this state.

    The contexts work in any thread, any number of times. In Keras 3.15, `GLOBAL_STATE_TRACKER` holds, for each thread,
    the training mode, the types to which variables are cast, the scope of their values, and names. There is no public
    API for it.
    """
    known = dict(vars(GLOBAL_STATE_TRACKER))
    calls = copy.copy(known.get("current_call_ctx"))

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        state = vars(GLOBAL_STATE_TRACKER)
        before = {name: state.get(name) for name in known}
        state |= known | {"current_call_ctx": copy.copy(calls)}
        try:
            yield
        finally:
            state |= before

    return restored


# The attribute of a layer that `set_call` sets.
_CALL = "_kerasdp_call"


def set_call(layer: keras.layers.Layer, call: Callable[..., Any]) -> None:
    """Makes `call(make, layer, *args, **kwargs)` run each call of a layer, as rematerialization needs.

    `make` runs the original call. The attribute is set without Keras (3.15), which would track it in a built layer.
    """
    object.__setattr__(layer, _CALL, call)


def call_of(layer: Any) -> Callable[..., Any] | None:
    """Returns the function that `set_call` set for a layer, or None."""
    return vars(layer).get(_CALL)


def is_of_keras(kind: type) -> bool:
    """Returns whether a class is defined by Keras, not by the user.

    In Keras 3.15, all classes are defined in `keras.src`. The public modules do not list the classes of the backends.
    """
    return getattr(kind, "__module__", "").startswith("keras.src.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Lists the variables, sublayers, metrics and optimizers that a layer itself holds; its sublayers are left out.

    Args:
        in_order: the layers of a functional or Sequential model, in the order of its graph.
        other_layers: the layers that only attributes hold.
        variables: pairs of a variable and the object in the attribute: the variable itself, or its seed generator.
        metrics: the metrics that attributes hold.
        attributes: by `id` of an object, the name of the attribute that holds it, with the index in lists and
            dictionaries.
        optimizers: pairs of the name of the attribute, as above, and the optimizer.
    """

    in_order: list[keras.layers.Layer]
    other_layers: list[keras.layers.Layer]
    variables: list[tuple[keras.Variable, Any]]
    metrics: list[keras.metrics.Metric]
    attributes: dict[int, str]
    optimizers: list[tuple[str, keras.optimizers.Optimizer]]


def parts_of(layer: keras.layers.Layer) -> Parts:
    """Returns the variables, sublayers, metrics and optimizers that a layer itself holds.

    In Keras 3.15, these private lists of a layer hold the objects in its attributes: `_layers`, `_trainable_variables`,
    `_non_trainable_variables`, `_seed_generators` and `_metrics`. Their order is the order in which the attributes were
    set. That order may depend on the backend: on torch, models of KerasHub 0.32 set attributes without Keras before
    they build their graph. So the layers of a functional model come from `Functional._operations`, in the order of its
    graph. No public API lists the objects of one layer alone.
    """
    in_order: list[Any] = []
    if isinstance(layer, Functional):
        in_order = [operation for operation in layer._operations if isinstance(operation, keras.layers.Layer)]
    elif isinstance(layer, keras.Sequential):
        in_order = layer.layers
    known = {id(one) for one in in_order}
    held = list(_held_by(layer))
    attributes: dict[int, str] = {}
    for path, value in held:
        attributes.setdefault(id(value), path)
    variables = [(one, one) for one in (*layer._trainable_variables, *layer._non_trainable_variables)]
    return Parts(
        in_order=in_order,
        other_layers=[one for one in layer._layers if id(one) not in known],
        variables=variables + [(generator.state, generator) for generator in layer._seed_generators],
        metrics=list(layer._metrics),
        attributes=attributes,
        optimizers=[(path, value) for path, value in held if isinstance(value, keras.optimizers.Optimizer)],
    )


def _held_by(layer: keras.layers.Layer) -> Iterator[tuple[str, Any]]:
    # On torch, a module stores its submodules separately from its other attributes.
    values = {**vars(layer), **vars(layer).get("_modules", {})}
    for name in sorted(values.keys() - _bookkeeping(), key=lambda name: (name.startswith("_"), name)):
        if not name.startswith("_self_"):  # TensorFlow's bookkeeping
            yield from _within(name, values[name], ())


def _within(path: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yields a value, or the items of lists and dictionaries at any depth.

    Sets are skipped, because they have no fixed order.
    """
    if not isinstance(value, (list, tuple, dict)):
        yield path, value
    elif id(value) not in above:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _within(f"{path}.{name}", inner, (*above, id(value)))


@functools.cache
def _bookkeeping() -> frozenset[str]:
    """Returns the names of the attributes that every layer has, and of those in which models store their graph."""
    of_models = ("_functional", "_modules", "_operations", "_torch_params", "nnx_operations")
    return frozenset({*dir(keras.layers.Layer()), *of_models})
