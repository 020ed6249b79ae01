"""Keeps what is made for a model for as long as the model lives."""

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")
_ATTRIBUTE = "_kerasdp_caches"


class ModelCache(Generic[T]):
    """One value per model, for step functions and pipeline engines, which are expensive to make.

    These refer to their model. A `WeakKeyDictionary` with models as its keys would therefore keep every model for as
    long as the run: such values can only be held by the model itself. So each model holds one dictionary for all
    caches, by cache and weak in them: no cache can see another's values, and they end with whichever ends first.
    """

    def get(self, model: object) -> T | None:
        """Returns the model's value; None if it has none."""
        return getattr(model, _ATTRIBUTE, {}).get(self)

    def put(self, model: object, value: T) -> None:
        """Sets the model's value."""
        if not hasattr(model, _ATTRIBUTE):
            object.__setattr__(model, _ATTRIBUTE, weakref.WeakKeyDictionary())  # past Keras' tracking of attributes
        getattr(model, _ATTRIBUTE)[self] = value


_MADE_OF_CHOICES: ModelCache[bool] = ModelCache()


def made_of_choices(made: T) -> T:
    """Returns a model, an optimizer or a loss, and remembers that it is what the choices of the run ask for."""
    _MADE_OF_CHOICES.put(made, True)
    return made


def is_made_of_choices(made: object) -> bool:
    """Returns whether `made_of_choices` got this object."""
    return bool(_MADE_OF_CHOICES.get(made))
