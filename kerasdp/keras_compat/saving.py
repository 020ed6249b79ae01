"""Makes Keras save the kit's classes, and its own backends', under public names."""

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
    """Class decorator: models are saved with the Keras layer that the class derives from.

    Weights and config are those of Keras' layer, so such a file loads where there is no kerasdp; `portable` turns the
    layer back into ours. Keras 3.15: looks a class up in `api_export.REGISTERED_OBJS_TO_NAMES` before it writes the
    name of its module. The public `register_keras_serializable` would add a package's name, which others do not know.
    """
    name = f"keras.layers.{layer_class.__name__}"
    api_export.REGISTERED_OBJS_TO_NAMES[layer_class] = name
    return layer_class


def safe_deserialization() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which Keras makes nothing of a file that is code: no lambda, no pickle.

    Keras 3.15: `safe_mode=True` of its functions yields to `keras.config.enable_unsafe_deserialization()`, which a
    script may have called for a file of its own. `serialization_lib.SafeModeScope` outranks both; no public way.
    """
    scope: contextlib.AbstractContextManager[None] = serialization_lib.SafeModeScope(True)
    return scope


@contextlib.contextmanager
def classes_saved() -> Iterator[dict[str, Any]]:
    """Yields the classes and functions, but Keras', that Keras finds in what it saves meanwhile, by their names there.

    Keras 3.15: finds none of them again, also in a module that can be imported, unless it is registered, or given as
    `custom_objects`. `object_registration.get_registered_name` is asked for the name of each; no public way.

    Raises:
        UserError: where two have one name.
    """
    found: dict[str, Any] = {}

    def record(name_of: Callable[[Any], str], kind: Any) -> str:
        name = name_of(kind)
        if not is_of_keras(kind) and kind.__module__ != "builtins" and found.setdefault(name, kind) is not kind:
            raise UserError(f"two classes or functions have the name {name}")
        return name

    with wrapped(object_registration, get_registered_name=record):
        yield found


def arguments_in_configs() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a model without a `get_config` of its own has in its config how it was made.

    Keras 3.15: `Model.__new__` leaves the arguments out, so that the config has the defaults of `__init__` in their
    place, and such a model comes back as another one. `Layer.__new__`, as for layers, keeps them; no public way.
    """

    def make(new: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        return (new if cls is keras.Model else keras.Layer.__new__)(cls, *args, **kwargs)

    return wrapped(keras.Model, __new__=make)


def save_optimizers_by_public_names() -> None:
    """Has Keras save optimizers under the names of the public classes from which they derive, while the process lasts.

    Keras 3.15: on torch, optimizers are of classes of its backend's, and it saves those names: such a file trains
    nowhere else. `api_export.get_name_from_symbol` is asked for the name of each class; no public way.
    """

    def name_of(original: Callable[[Any], str | None], kind: Any) -> str | None:
        bases = kind.__mro__ if getattr(kind, "__module__", "").startswith("keras.src.backend.") else (kind,)
        return next(filter(None, map(original, bases)), None)

    wrap_for_good(api_export, "get_name_from_symbol", name_of)


@contextlib.contextmanager
def compiled_as_any_backend_does(model: keras.Model) -> Iterator[None]:
    """Saves `jit_compile="auto"`.

    Keras 3.15: saves what "auto" means on the backend that saves. So a file from jax has the next backend compile,
    which takes torch half a minute, and one from torch keeps jax from it. Writes `model._compile_config.config`, of
    which the public `get_compile_config()` gives a copy alone.
    """
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    kept = {name: value for name, value in config.items() if name == "jit_compile" and value is not None}
    config.update(dict.fromkeys(kept, "auto"))
    try:
        yield
    finally:
        config.update(kept)
