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

    All replicas use the maximum of their next values. With `gradient_accumulation_steps`, Keras also uses a maximum:
    over the micro-batches.
    """
    return getattr(variable, "overwrite_with_gradient", False)


def all_layers(layer: keras.layers.Layer, *, include_self: bool = True) -> list[keras.layers.Layer]:
    """Returns a layer or model together with all layers inside it, at any depth, in the order of Keras.

    Uses the private `Layer._flatten_layers` of Keras 3.15. The public `model.layers` has only the first level, and a
    layer that is not a model has no `layers`.
    """
    return list(layer._flatten_layers(include_self=include_self))


def has_seed_generators(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer holds a `keras.random.SeedGenerator`; generators of its sublayers are ignored.

    Reads the private `Layer._seed_generators` of Keras 3.15. No public API shows the generators of a layer.
    """
    return bool(layer._seed_generators)


def seed_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the state variables of all seed generators in a model's layers.

    A step resets these variables before each micro-batch. So each row gets the same random values as in a step without
    micro-batches.

    Uses the private `Layer._seed_generators` of Keras 3.15. No public API shows the generators of a layer.
    """
    return [generator.state for layer in all_layers(model) for generator in layer._seed_generators]


def is_named(layer: keras.layers.Layer, patterns: Iterable[str]) -> bool:
    """Returns whether the name or the path of a layer matches one of the patterns, such as 'block*'."""
    names = (layer.name, layer.path or "")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def frozen_weights(model: keras.Model) -> list[keras.Variable]:
    """Returns the weights of a model that were created as trainable and are not trainable now.

    Batch norm statistics and seeds are left out, because they were never trainable. In Keras 3.15,
    `Layer._trainable_variables` contains the weights of `add_weight(trainable=True)`, even if `trainable` changes
    later.
    """
    found = {id(one): one for layer in all_layers(model) for one in layer._trainable_variables if not one.trainable}
    return list(found.values())


@contextlib.contextmanager
def adapters_in_float64() -> Iterator[None]:
    """Returns a context in which float64 layers get float64 LoRA adapters.

    Keras 3.15 creates float32 adapters for float64 layers.
    """

    def add(add_weight: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("name")).startswith("lora_") and layer.variable_dtype == "float64":
            kwargs["dtype"] = "float64"
        return add_weight(layer, *args, **kwargs)

    with wrapped(keras.Layer, add_weight=add):  # wraps the `add_weight` of this moment
        yield


def saved_merged(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a model with LoRA adapters is saved with the adapters merged into its kernels.

    Keras 3.15 merges the adapters when it saves a layer, but it also saves `lora_rank`. So the loaded layer has
    adapters again. Their values are zeros, and training does not change them. In this context, Keras saves
    `lora_rank=None`. Keras does not save the optimizer, because the optimizer has variables only for the adapters.
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

    The variables come from Python's garbage collector, because Keras (3.15) has no list of all variables.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), keras.Variable)]


def added_losses(layer: keras.layers.Layer) -> list[Any]:
    """Returns the losses that a layer passed to `add_loss` in its last call; losses of its sublayers are left out.

    Uses the private `Layer._get_own_losses` of Keras 3.15. The public `layer.losses` includes the losses of sublayers,
    so it does not show which layer added a loss.
    """
    return layer._get_own_losses()


def forget_added_losses(model: keras.Model) -> None:
    """Clears the losses that a model and its layers added in an earlier step.

    Uses the private `Layer._clear_losses` of Keras 3.15. On jax, `stateless_call` does not call `_clear_losses` for the
    model itself. In a `StatelessScope`, a layer stores only the `id` of each loss. A loss of a later program may get
    the `id` of an old loss. Keras would then add this loss twice.
    """
    model._clear_losses()


def hook_add_loss(take: Callable[[Callable[..., None], keras.layers.Layer, Any], None]) -> None:
    """Installs a function that gets each loss that a layer passes to `add_loss`.

    Keras 3.15 stores added losses in private lists and has no hook for them. So this function wraps the public
    `add_loss` once, permanently.

    Args:
        take: the function. Its arguments are Keras' method, the layer and the loss.
    """
    wrap_for_good(keras.layers.Layer, "add_loss", take)


def hook_calls(make: Callable[..., Any]) -> None:
    """Installs a function that runs the calls of all layers and models.

    In Keras 3.15, `Layer.__call__` converts the arguments, then calls the public `Operation.__call__`, then applies the
    activity regularizer. Keras has no hook like PyTorch's forward hooks. So this function wraps `Operation.__call__`
    once, permanently.

    Args:
        make: the function. Its arguments are Keras' method, the layer (or another operation), and the arguments of the
            call.
    """
    wrap_for_good(keras.Operation, "__call__", make)


def become(layer: keras.layers.Layer, kind: type) -> None:
    """Changes the class of a layer to a subclass, permanently.

    The layer keeps its weights, its name and its place in graphs. In Keras 3.15, graphs and models hold the layer
    object itself, so no other object can replace it. This function can be removed once Keras computes the same on all
    backends, or can replace a layer of a built model.
    """
    layer.__class__ = kind


def weight_penalties(model: keras.Model) -> list[Any]:
    """Returns the penalties of the regularizers of a model's trainable weights, as scalar tensors.

    The private `Layer._get_regularization_losses` of Keras 3.15 returns the same values. This function uses only the
    public API.
    """
    regularized = [weight for weight in model.trainable_variables if weight.regularizer is not None]
    return [weight.regularizer(weight.value) for weight in regularized]


def mask_of(tensor: Any) -> Any:
    """Returns the mask that a layer attached to its output tensor; None if the tensor has no mask.

    Uses the private `masking.get_keras_mask` of Keras 3.15. `get_keras_mask` reads an attribute of the tensor; on jax,
    it reads a separate table. No public API returns the mask of a tensor.
    """
    return masking.get_keras_mask(tensor)


def has_mask(tensor: Any) -> bool:
    """Returns whether a layer attached a mask to a tensor."""
    return mask_of(tensor) is not None


def set_mask(tensor: Any, mask: Any) -> Any:
    """Attaches a mask to a tensor, so that the losses and metrics of Keras use the mask; returns the tensor.

    Uses the private `masking.set_keras_mask` of Keras 3.15. No public API sets the mask of a tensor.
    """
    masking.set_keras_mask(tensor, mask)
    return tensor


def with_mask(function: Callable[[Any], Any], tensor: Any) -> Any:
    """Returns `function(tensor)`. If `tensor` has a mask, the result gets the mask `function(mask)`."""
    mask = mask_of(tensor)
    return function(tensor) if mask is None else set_mask(function(tensor), function(mask))


def raw_value(variable: keras.Variable) -> Any:
    """Returns the backend's variable or array that stores the value of a Keras variable.

    Uses the private `Variable._value` of Keras 3.15. In a `keras.StatelessScope`, the public `value` returns the value
    in the scope. Within layers, it casts the value.
    """
    return variable._value


def raw_values(variables: Iterable[keras.Variable]) -> list[Any]:
    """Returns the `raw_value` of each variable.

    Each training step calls this function. For speed, it reads the private attribute directly, without a function call
    for each variable.
    """
    return [variable._value for variable in variables]


def set_raw_values(variables: Iterable[keras.Variable], values: Iterable[Any]) -> None:
    """Replaces the backend's array that stores the value of each variable.

    The new array may be on another device than the old one. `Variable.assign` would keep the old device.
    """
    for variable, value in zip(variables, values):
        variable._value = value


def current_value(variable: keras.Variable) -> Any:
    """Returns the value of a variable in the active `keras.StatelessScope`, without a cast.

    If no scope is active, or the scope has no value of the variable, the stored value is returned. Uses the private
    `get_stateless_scope` of Keras 3.15. The public `value` casts within layers.
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
    """A stateless scope that also reads values from the scope around it.

    Variables in `state_mapping` get the values given there. In Keras 3.15, an inner scope does not read the outer
    scope, and `get_stateless_scope` has no public name. This class sets `collect_losses`, because otherwise
    `layer.losses` would leave out added losses. Keras computes weight penalties from the values in the scope.
    """

    def __init__(self, state_mapping: Iterable[tuple[keras.Variable, Any]] = ()):
        """Creates the scope. See `keras.StatelessScope` for `state_mapping`."""
        super().__init__(state_mapping, collect_losses=True)
        self._around = get_stateless_scope()
        self._assigned: dict[int, keras.Variable] = {}

    @property
    def assigned(self) -> list[keras.Variable]:
        """Returns the variables to which a value was assigned in this scope."""
        return list(self._assigned.values())

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Records the assignment of a value to a variable."""
        self._assigned[id(update[0])] = update[0]
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns a variable's value: from this scope, else from the outer scope, else its stored value."""
        value = super().get_current_value(variable)
        if value is None and self._around is not None:
            value = self._around.get_current_value(variable)
        return raw_value(variable) if value is None else value

    def assigned_values(self) -> list[Any]:
        """Returns the current value of each variable in `assigned`, in the same order."""
        return [self.get_current_value(variable) for variable in self.assigned]

    def write_back(self, values: list[Any] | None = None) -> None:
        """Assigns the values of this scope to the variables, in the outer scope if there is one.

        Args:
            values: values to assign instead of `assigned_values()`, in the same order.
        """
        for variable, value in zip(self.assigned, self.assigned_values() if values is None else values):
            variable.assign(value)


class ScopeOfParts(keras.StatelessScope):
    """A stateless scope that holds shards of variables, and returns full values on reads.

    In Keras 3.15, a `StatelessScope` raises an error for a value whose shape differs from the shape of its variable.
    """

    def __init__(self, values: Iterable[tuple[keras.Variable, Any]], read: Callable[[keras.Variable, Any], Any]):
        """Creates the scope.

        Args:
            values: pairs of a variable and its shard.
            read: a function that gets a variable and its shard, and returns the full value.
        """
        super().__init__(collect_losses=True)
        self.state_mapping = {id(variable): value for variable, value in values}
        self._read = read

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the full value of a variable; None if this scope has no shard of the variable."""
        value = super().get_current_value(variable)
        return None if value is None else self._read(variable, value)


class HeldInParts(keras.Variable):
    """A variable that is sharded over the devices; it can be read only in a scope that has its value.

    A variable has this class while it is sharded, and the class `keras.Variable` afterwards. Only the class changes,
    not the object, because layers and optimizers refer to the object.
    """

    @property
    def value(self) -> Any:
        """Returns the value in the active scope.

        Raises:
            UserError: outside of a step, where this device has only a shard of the variable.
        """
        scope = get_stateless_scope()
        if scope is None or scope.get_current_value(self) is None:
            raise UserError(
                f"{self.path} cannot be read or changed between two steps, because it is sharded over the devices "
                "(--shard); read or change the variable before fit, after fit, or in on_epoch_end"
            )
        return super().value


def held_in_parts(variable: keras.Variable, is_part: bool) -> None:
    """Sets the class of a variable: `HeldInParts` for a sharded variable, else `keras.Variable`."""
    variable.__class__ = HeldInParts if is_part else keras.Variable


def autocast(variable: keras.Variable, value: Any) -> Any:
    """Casts a value of a variable to the dtype in which the current layer computes.

    Uses the private `Variable._maybe_autocast` of Keras 3.15. The public `value` also casts, but only if the variable
    holds its full value.
    """
    return variable._maybe_autocast(value)


def with_shapes(
    variables: Iterable[tuple[keras.Variable, tuple[int, ...]]],
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which sharded variables have the shapes of their shards.

    In Keras 3.15, `assign` compares the shape of the new value with `Variable._shape`.

    Args:
        variables: pairs of a variable and the shape of its shard.
    """
    return replaced_in_each((variable, {"_shape": tuple(shape)}) for variable, shape in variables)


class ReadingScope(InnerScope):
    """An `InnerScope` that records each variable that is read, with the value of the first read."""

    def __init__(self, state_mapping: Iterable[tuple[keras.Variable, Any]] = ()):
        """Creates the scope. See `keras.StatelessScope` for `state_mapping`."""
        super().__init__(state_mapping)
        self.read: dict[int, tuple[keras.Variable, Any]] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the same value as `InnerScope.get_current_value`, and records the value at the first read."""
        value = super().get_current_value(variable)
        # A shard is not recorded: the outer scope gathers its full value again.
        is_part = tuple(getattr(raw_value(variable), "shape", variable.shape)) != tuple(variable.shape)
        if id(variable) not in self._assigned and not is_part:
            self.read.setdefault(id(variable), (variable, value))
        return value


def state_of_calls() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Saves Keras' state of the running layer calls; returns a function whose contexts restore this state.

    The returned function can be called in any thread, and several times. In Keras 3.15, `GLOBAL_STATE_TRACKER` holds
    this state for each thread: the training mode, the dtypes to which variables are cast, the scope of their values,
    and names. No public API saves this state.
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
    """Makes a layer run `call(make, layer, *args, **kwargs)` instead of its original call; for rematerialization.

    `make` runs the original call. The attribute is set with `object.__setattr__`: Keras (3.15) would track the
    attribute of a built layer.
    """
    object.__setattr__(layer, _CALL, call)


def call_of(layer: Any) -> Callable[..., Any] | None:
    """Returns the function that `set_call` set for a layer; None for other layers."""
    return vars(layer).get(_CALL)


def is_of_keras(kind: type) -> bool:
    """Returns whether a class is part of Keras, and not user-defined.

    In Keras 3.15, all classes of Keras are in modules of `keras.src`. The public modules do not contain the classes of
    the backends.
    """
    return getattr(kind, "__module__", "").startswith("keras.src.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Lists the variables, sublayers, metrics and optimizers in the attributes of one layer.

    Objects that only a sublayer holds are left out.

    Args:
        in_order: the layers of a functional or Sequential model, in the order of its graph. Empty for other layers.
        other_layers: the sublayers that are not in `in_order`. Only attributes hold them.
        variables: pairs of a variable and the object in the attribute. The object is the variable itself, or the seed
            generator that holds the variable.
        metrics: the metrics in attributes.
        attributes: names of attributes, by `id` of the object in the attribute. For an object in a list or dictionary,
            the index or key follows the name.
        optimizers: pairs of a name as in `attributes`, and the optimizer.
    """

    in_order: list[keras.layers.Layer]
    other_layers: list[keras.layers.Layer]
    variables: list[tuple[keras.Variable, Any]]
    metrics: list[keras.metrics.Metric]
    attributes: dict[int, str]
    optimizers: list[tuple[str, keras.optimizers.Optimizer]]


def parts_of(layer: keras.layers.Layer) -> Parts:
    """Returns the variables, sublayers, metrics and optimizers in the attributes of one layer: see `Parts`.

    In Keras 3.15, a layer collects the objects in its attributes in private lists: `_layers`, `_trainable_variables`,
    `_non_trainable_variables`, `_seed_generators` and `_metrics`. The objects are in the order in which the attributes
    were set. That order may depend on the backend. On torch, models of KerasHub 0.32 set attributes before they build
    their graph, and bypass Keras to do so. So the layers of a functional model come from `Functional._operations`, in
    the order of its graph. No public API lists the objects of a single layer.
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
    """Yields pairs of a path and a value. For lists, tuples and dictionaries, yields their items at any depth.

    Items of sets are skipped, because sets have no fixed order.
    """
    if not isinstance(value, (list, tuple, dict)):
        yield path, value
    elif id(value) not in above:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _within(f"{path}.{name}", inner, (*above, id(value)))


@functools.cache
def _bookkeeping() -> frozenset[str]:
    """Returns the names of attributes that every layer has, and of attributes in which models store their graph."""
    of_models = ("_functional", "_modules", "_operations", "_torch_params", "nnx_operations")
    return frozenset({*dir(keras.layers.Layer()), *of_models})
