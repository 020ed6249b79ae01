"""Reads what layers and variables of Keras hold."""

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
    """Returns whether the gradient of a variable is its next value, as Keras (3.15) has it for float8.

    Scales are the same on each replica. Of the largest numbers seen, the largest of all replicas' holds, as with Keras'
    own `gradient_accumulation_steps`.
    """
    return getattr(variable, "overwrite_with_gradient", False)


def all_layers(layer: keras.layers.Layer, *, include_self: bool = True) -> list[keras.layers.Layer]:
    """Returns a layer or model and all layers within it, at any depth, in Keras' order.

    Keras 3.15: `Layer._flatten_layers`. The public `model.layers` stops at the first depth, and a layer has none.
    """
    return list(layer._flatten_layers(include_self=include_self))


def has_seed_generators(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer itself, without those within it, holds a `keras.random.SeedGenerator`.

    Keras 3.15: `Layer._seed_generators`; no public way.
    """
    return bool(layer._seed_generators)


def seed_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of a model's random layers.

    With them at what they were at the step's begin, a micro-batch draws what its rows draw in the whole batch. Keras
    3.15: `Layer._seed_generators`; no public way.
    """
    return [generator.state for layer in all_layers(model) for generator in layer._seed_generators]


def is_named(layer: keras.layers.Layer, patterns: Iterable[str]) -> bool:
    """Returns whether a pattern, as 'block*', matches the name or path of a layer."""
    names = (layer.name, layer.path or "")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def frozen_weights(model: keras.Model) -> list[keras.Variable]:
    """Returns the weights of a model that were made to train, and do not: statistics and seeds are none of them.

    Keras 3.15: `Layer._trainable_variables` keeps what `add_weight(trainable=True)` made, whatever is set afterwards.
    """
    found = {id(one): one for layer in all_layers(model) for one in layer._trainable_variables if not one.trainable}
    return list(found.values())


@contextlib.contextmanager
def adapters_in_float64() -> Iterator[None]:
    """Returns the context in which adapters (LoRA) of a layer in float64 are float64, too; Keras 3.15 has float32."""

    def add(add_weight: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("name")).startswith("lora_") and layer.variable_dtype == "float64":
            kwargs["dtype"] = "float64"
        return add_weight(layer, *args, **kwargs)

    with wrapped(keras.Layer, add_weight=add):  # of what it is by then
        yield


def saved_merged(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a model with adapters is saved as one without, to whose kernels they are added.

    Keras 3.15 writes that kernel, too, but beside a `lora_rank`: the layer comes back with adapters of zeros, which no
    training moves. The optimizer is left out: it knows the adapters alone.
    """

    def plain(layer: keras.layers.Layer) -> Callable[[], dict[str, Any]]:
        return lambda: type(layer).get_config(layer) | {"lora_rank": None, "lora_alpha": None}

    adapted = [layer for layer in all_layers(model) if getattr(layer, "lora_enabled", False)]
    changes: list[tuple[Any, dict[str, Any]]] = [(layer, {"get_config": plain(layer)}) for layer in adapted]
    if adapted:
        changes.append((model, {"optimizer": None, "compiled": False}))
    return replaced_in_each(changes)


def living_variables() -> list[keras.Variable]:
    """Returns all variables that there are in this process, a model's or not.

    Asks Python's garbage collector: Keras (3.15) keeps no list.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), keras.Variable)]


def added_losses(layer: keras.layers.Layer) -> list[Any]:
    """Returns what a layer itself has given to `add_loss` in its last call.

    Keras 3.15: `Layer._get_own_losses`. The public `layer.losses` also has those of layers within it, so that it could
    not be said which layer it was.
    """
    return layer._get_own_losses()


def forget_added_losses(model: keras.Model) -> None:
    """Lets a model and its layers forget the losses that an earlier step added.

    Keras 3.15: `Layer._clear_losses`, which `stateless_call` of jax does not call for the model itself. In a scope a
    layer knows its losses by their `id`: another loss of the next program may have the same one, and would count twice.
    """
    model._clear_losses()


def hook_add_loss(take: Callable[[Callable[..., None], keras.layers.Layer, Any], None]) -> None:
    """Lets a function take what layers give to `add_loss`.

    Keras 3.15 collects the losses of layers in lists of theirs, and has no hook. The public method is wrapped once, for
    good.

    Args:
        take: gets Keras' method, the layer and the loss.
    """
    wrap_for_good(keras.layers.Layer, "add_loss", take)


def hook_calls(make: Callable[..., Any]) -> None:
    """Lets a function make the calls of all layers and models.

    Keras 3.15: `Layer.__call__` leaves its call to the public `Operation.__call__`, once the arguments are converted,
    and looks for an activity regularizer next. There is no hook, as torch's forward hooks. The method is wrapped once,
    for good.

    Args:
        make: gets Keras' method, the layer (or another operation), and the arguments.
    """
    wrap_for_good(keras.Operation, "__call__", make)


def become(layer: keras.layers.Layer, kind: type) -> None:
    """Makes a layer one of a class that derives from its own, for good: weights, name and place in graphs stay.

    Keras 3.15: graphs, and models that hold a layer, know it by itself, so that another one cannot take its place.
    Unneeded once Keras computes alike on all backends, or lets a layer be replaced in a built model.
    """
    layer.__class__ = kind


def weight_penalties(model: keras.Model) -> list[Any]:
    """Returns what the regularizers of a model's trainable weights make of them, scalar tensors.

    As `Layer._get_regularization_losses` of Keras 3.15, of public parts.
    """
    regularized = [weight for weight in model.trainable_variables if weight.regularizer is not None]
    return [weight.regularizer(weight.value) for weight in regularized]


def mask_of(tensor: Any) -> Any:
    """Returns the mask that a layer has left at its output, or None.

    Keras 3.15: `masking.get_keras_mask`, an attribute of tensors, or beside those of jax; no public way.
    """
    return masking.get_keras_mask(tensor)


def has_mask(tensor: Any) -> bool:
    """Returns whether a layer has left a mask at its output."""
    return mask_of(tensor) is not None


def set_mask(tensor: Any, mask: Any) -> Any:
    """Leaves a mask at a tensor, for the losses and metrics of Keras; returns the tensor.

    Keras 3.15: `masking.set_keras_mask`; no public way.
    """
    masking.set_keras_mask(tensor, mask)
    return tensor


def with_mask(function: Callable[[Any], Any], tensor: Any) -> Any:
    """Returns `function(tensor)`; a mask that a layer has left at the tensor goes through the function as well."""
    mask = mask_of(tensor)
    return function(tensor) if mask is None else set_mask(function(tensor), function(mask))


def raw_value(variable: keras.Variable) -> Any:
    """Returns what a variable holds: the backend's own variable or array, whatever scope is active.

    Keras 3.15: `Variable._value`. The public `value` looks into scopes, and casts.
    """
    return variable._value


def raw_values(variables: Iterable[keras.Variable]) -> list[Any]:
    """Returns `raw_value` of each: in each step, so without a call of Python's for each."""
    return [variable._value for variable in variables]


def set_raw_values(variables: Iterable[keras.Variable], values: Iterable[Any]) -> None:
    """Gives each what it holds, on whatever device: `assign` keeps the device."""
    for variable, value in zip(variables, values):
        variable._value = value


def current_value(variable: keras.Variable) -> Any:
    """Returns what a variable holds in the scope that is active, or by itself, in its own type.

    Keras 3.15: `get_stateless_scope`. The public `value` casts within layers.
    """
    scope = get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return raw_value(variable) if value is None else value


def is_in_scope() -> bool:
    """Returns whether a `keras.StatelessScope` is active. Keras 3.15: `get_stateless_scope`."""
    return get_stateless_scope() is not None


class InnerScope(keras.StatelessScope):
    """A stateless scope in which variables have the values of the scope around it, but for those that are given.

    Keras 3.15: of nested scopes the inner one knows nothing of the outer; `get_stateless_scope` has no public name.
    `layer.losses` has what layers add only with `collect_losses`, and penalties of weights want each weight's value.
    """

    def __init__(self, state_mapping: Iterable[tuple[keras.Variable, Any]] = ()):
        """See `keras.StatelessScope`."""
        super().__init__(state_mapping, collect_losses=True)
        self._around = get_stateless_scope()
        self._assigned: dict[int, keras.Variable] = {}

    @property
    def assigned(self) -> list[keras.Variable]:
        """Returns the variables that were assigned here."""
        return list(self._assigned.values())

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Takes what a variable is assigned."""
        self._assigned[id(update[0])] = update[0]
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the value here, else that in the scope around, else the variable's own."""
        value = super().get_current_value(variable)
        if value is None and self._around is not None:
            value = self._around.get_current_value(variable)
        return raw_value(variable) if value is None else value

    def assigned_values(self) -> list[Any]:
        """Returns what variables were assigned, in the order of `write_back`."""
        return [self.get_current_value(variable) for variable in self.assigned]

    def write_back(self, values: list[Any] | None = None) -> None:
        """Assigns, in the scope around or for good, what was assigned here; `values`: in its place."""
        for variable, value in zip(self.assigned, self.assigned_values() if values is None else values):
            variable.assign(value)


class ScopeOfParts(keras.StatelessScope):
    """A stateless scope of variables that may hold less than their shape says, until they are read.

    Keras 3.15: a `StatelessScope` refuses values of another shape.
    """

    def __init__(self, values: Iterable[tuple[keras.Variable, Any]], read: Callable[[keras.Variable, Any], Any]):
        """`read` makes of a variable, and what it holds, its value."""
        super().__init__(collect_losses=True)
        self.state_mapping = {id(variable): value for variable, value in values}
        self._read = read

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the value of a variable; None if it is not known here."""
        value = super().get_current_value(variable)
        return None if value is None else self._read(variable, value)


class HeldInParts(keras.Variable):
    """A variable of which each device holds a part: it can be read where a scope knows its value, and not elsewhere.

    A variable becomes one, and itself again, by its class, since layers and optimizers know the object.
    """

    @property
    def value(self) -> Any:
        """Returns the value in the active scope.

        Raises:
            UserError: outside of a step, where there is only a part of it.
        """
        scope = get_stateless_scope()
        if scope is None or scope.get_current_value(self) is None:
            raise UserError(
                f"{self.path} is held in parts by the devices between two steps (--shard): read or change it before "
                "fit, after it, or in on_epoch_end"
            )
        return super().value


def held_in_parts(variable: keras.Variable, is_part: bool) -> None:
    """Lets a variable be read within scopes alone (`HeldInParts`), or as before."""
    variable.__class__ = HeldInParts if is_part else keras.Variable


def autocast(variable: keras.Variable, value: Any) -> Any:
    """Returns a value of a variable in the type that the layer which is called computes in.

    Keras 3.15: `Variable._maybe_autocast`; the public `value` does it once it has the whole.
    """
    return variable._maybe_autocast(value)


def with_shapes(
    variables: Iterable[tuple[keras.Variable, tuple[int, ...]]],
) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which variables have other shapes: those of the parts that they hold.

    Keras 3.15: `Variable._shape`, to which the shape of what is assigned is compared.
    """
    return replaced_in_each((variable, {"_shape": tuple(shape)}) for variable, shape in variables)


class ReadingScope(InnerScope):
    """An `InnerScope` that knows which values variables had when they were first read here."""

    def __init__(self, state_mapping: Iterable[tuple[keras.Variable, Any]] = ()):
        """See `keras.StatelessScope`."""
        super().__init__(state_mapping)
        self.read: dict[int, tuple[keras.Variable, Any]] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the value as `InnerScope` does."""
        value = super().get_current_value(variable)
        # A whole that was gathered of parts is gathered again, by the scope around.
        is_part = tuple(getattr(raw_value(variable), "shape", variable.shape)) != tuple(variable.shape)
        if id(variable) not in self._assigned and not is_part:
            self.read.setdefault(id(variable), (variable, value))
        return value


def state_of_calls() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a function that gives the context in which Keras is where it is now, in any thread, as often as asked.

    Keras 3.15: `GLOBAL_STATE_TRACKER` holds, for each thread, whether layers are called in training, the types to which
    variables are cast, the scope of their values, and names. No public way.
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
    """Lets `call(make, layer, *args, **kwargs)` make the calls of a layer, as rematerialization does.

    `make` is what does it otherwise. Past Keras (3.15), which would track the attribute of a built layer.
    """
    object.__setattr__(layer, _CALL, call)


def call_of(layer: Any) -> Callable[..., Any] | None:
    """Returns what `set_call` was given for a layer."""
    return vars(layer).get(_CALL)


def is_of_keras(kind: type) -> bool:
    """Returns whether a class is Keras', not a user-defined one.

    Keras 3.15: all of its classes are defined in `keras.src`. The public modules do not list those that a backend adds.
    """
    return getattr(kind, "__module__", "").startswith("keras.src.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a layer holds itself, without what the layers within it hold.

    Args:
        in_order: layers of a functional or Sequential model, in the order of its graph.
        other_layers: that it knows of by its attributes alone.
        variables: each with the object that an attribute holds: itself, or the generator whose state it is.
        metrics: that it knows of by its attributes.
        attributes: by the `id` of an object, the attribute that holds it, with the place in lists and dictionaries.
        optimizers: that its attributes hold, each with the attribute, as above.
    """

    in_order: list[keras.layers.Layer]
    other_layers: list[keras.layers.Layer]
    variables: list[tuple[keras.Variable, Any]]
    metrics: list[keras.metrics.Metric]
    attributes: dict[int, str]
    optimizers: list[tuple[str, keras.optimizers.Optimizer]]


def parts_of(layer: keras.layers.Layer) -> Parts:
    """Returns what a layer holds itself.

    Keras 3.15: `Layer._layers`, `_trainable_variables`, `_non_trainable_variables`, `_seed_generators`, `_metrics`:
    what attributes hold, in the order in which they were set. That order may depend on the backend: on torch, models of
    KerasHub 0.32 set attributes past Keras before their graph is made. `Functional._operations`, whose order is that of
    the graph. No public way to see a layer's own ones.
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
    # On torch a module keeps the modules within it apart from its other attributes.
    values = {**vars(layer), **vars(layer).get("_modules", {})}
    for name in sorted(values.keys() - _bookkeeping(), key=lambda name: (name.startswith("_"), name)):
        if not name.startswith("_self_"):  # TensorFlow's bookkeeping
            yield from _within(name, values[name], ())


def _within(path: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yields a value, or what lists and dictionaries hold at any depth; not sets, whose order is that of memory."""
    if not isinstance(value, (list, tuple, dict)):
        yield path, value
    elif id(value) not in above:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _within(f"{path}.{name}", inner, (*above, id(value)))


@functools.cache
def _bookkeeping() -> frozenset[str]:
    """Returns the attributes that every layer has, and those in which models keep their graph."""
    of_models = ("_functional", "_modules", "_operations", "_torch_params", "nnx_operations")
    return frozenset({*dir(keras.layers.Layer()), *of_models})
