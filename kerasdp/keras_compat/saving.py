"""Changes how Keras saves and loads classes, configs and optimizers."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src import api_export
from keras.src.saving import object_registration, serialization_lib

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import is_of_keras
from kerasdp.keras_compat.patches import wrap_for_good, wrapped


def saved_as_keras(layer_class: type) -> type:
    """Class decorator that makes Keras save a layer as the layer of Keras with the same name.

    Weights and config are the same as for Keras' layer. So the file loads without kerasdp, and `portable` restores
    kerasdp's layer. Keras 3.15 looks up a class in `api_export.REGISTERED_OBJS_TO_NAMES` before it writes the name of
    the class's module. The public `register_keras_serializable` adds the name of a package, so the file would not load
    without that package.
    """
    name = f"keras.layers.{layer_class.__name__}"
    api_export.REGISTERED_OBJS_TO_NAMES[layer_class] = name
    return layer_class


def safe_deserialization() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which Keras never loads code (lambdas, pickles) from a file.

    After `keras.config.enable_unsafe_deserialization()`, functions of Keras 3.15 ignore the argument `safe_mode=True`.
    A script may have called `enable_unsafe_deserialization` to load another file. The private
    `serialization_lib.SafeModeScope` overrides that call. No public API overrides it.
    """
    scope: contextlib.AbstractContextManager[None] = serialization_lib.SafeModeScope(True)
    return scope


@contextlib.contextmanager
def classes_saved() -> Iterator[dict[str, Any]]:
    """Yields a dictionary of the user-defined classes and functions that Keras saves, by their saved names.

    Keras 3.15 loads a user-defined class only if it is registered or passed as `custom_objects`, even if its module can
    be imported. Keras calls `object_registration.get_registered_name` for each saved name. No public API lists the
    saved classes.

    Raises:
        UserError: if two classes or functions have the same name.
    """
    found: dict[str, Any] = {}

    def record(name_of: Callable[[Any], str], kind: Any) -> str:
        name = name_of(kind)
        if not is_of_keras(kind) and kind.__module__ != "builtins" and found.setdefault(name, kind) is not kind:
            raise UserError(f"two classes or functions have the name {name}; rename one of them")
        return name

    with wrapped(object_registration, get_registered_name=record):
        yield found


def arguments_in_configs() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which new models without `get_config` have their constructor arguments in their config.

    In Keras 3.15, `Model.__new__` does not record the arguments. So the config has the defaults of `__init__`, and the
    loaded model differs from the saved model. `Layer.__new__` records the arguments. No public option changes this.
    """

    def make(new: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        return (new if cls is keras.Model else keras.Layer.__new__)(cls, *args, **kwargs)

    return wrapped(keras.Model, __new__=make)


def save_optimizers_by_public_names() -> None:
    """Makes Keras save optimizers under the names of their public base classes, permanently.

    In Keras 3.15 on torch, optimizers are classes of the backend, and Keras saves their private names. A model from a
    file with these names cannot train on other backends. Keras calls `api_export.get_name_from_symbol` for each class
    name. No public option changes the name.
    """

    def name_of(original: Callable[[Any], str | None], kind: Any) -> str | None:
        bases = kind.__mro__ if getattr(kind, "__module__", "").startswith("keras.src.backend.") else (kind,)
        return next(filter(None, map(original, bases)), None)

    wrap_for_good(api_export, "get_name_from_symbol", name_of)


@contextlib.contextmanager
def compiled_as_any_backend_does(model: keras.Model) -> Iterator[None]:
    """Returns a context in which Keras saves a compiled model with `jit_compile="auto"`.

    Keras 3.15 saves the value to which the current backend resolved "auto". With a file from jax, torch would compile
    the model, which takes half a minute. With a file from torch, jax would not compile the model. The context changes
    `model._compile_config.config`, because the public `get_compile_config()` returns a copy.
    """
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    kept = {name: value for name, value in config.items() if name == "jit_compile" and value is not None}
    config.update(dict.fromkeys(kept, "auto"))
    try:
        yield
    finally:
        config.update(kept)
