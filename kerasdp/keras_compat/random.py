"""Patches what Keras draws with: random numbers, initial weights, seeds of random layers."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
from keras.src.backend import random as keras_random
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.random.seed_generator import draw_seed


def next_seed(seed: Any) -> Any:
    """Returns two words to draw with, and advances a `SeedGenerator`.

    Keras 3.15: `draw_seed`. `SeedGenerator.next()` is public, but the global generator, which stands for a seed that
    was not given, is not.

    Args:
        seed: a `keras.random.SeedGenerator`, an int, or None.
    """
    return draw_seed(seed)


def is_in_layer_call() -> bool:
    """Returns whether a layer or model is being called.

    Keras 3.15: the global attribute `current_call_ctx`, which `Layer.__call__` sets for its outermost call. No public
    way.
    """
    return get_global_attribute("current_call_ctx") is not None


# The attribute of a layer that `give_seed_generator` sets.
_GENERATOR = "seed_of_unseeded_draws"


def give_seed_generator(layer: keras.layers.Layer) -> None:
    """Gives a built layer a `keras.random.SeedGenerator`, whose state is from then on one of its variables.

    Keras 3.15: a built layer takes no more of them until its `_tracker` is unlocked; no public way.
    """
    layer._tracker.unlock()
    setattr(layer, _GENERATOR, keras.random.SeedGenerator())
    layer._tracker.lock()


def given_seed_generator(layer: keras.layers.Layer) -> keras.random.SeedGenerator | None:
    """Returns what `give_seed_generator` gave the layer."""
    return getattr(layer, _GENERATOR, None)


def wrap_draws(kinds: tuple[str, ...], wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps functions by which `keras.random` and all of Keras' layers draw, once and for the whole process.

    Keras 3.15: the functions of `keras.src.backend.random`, which are looked up there in each call. No public way.

    Args:
        kinds: names of functions of `keras.random`.
        wrap: gets a name and Keras' function, and gives the one to be called in its place.
    """
    for kind in kinds:
        original = getattr(keras_random, kind)
        if not hasattr(original, "is_kerasdp"):
            wrapped = wrap(kind, original)
            vars(wrapped)["is_kerasdp"] = True
            setattr(keras_random, kind, wrapped)


class WeightHooks(Protocol):
    """Decides what new weights and random layers begin with."""

    def replace_initializer(self, initializer: Any, layer: keras.layers.Layer) -> Callable[..., Any]:
        """Gets the initializer of a layer's new weight of floats; gives the one to use."""

    def draw(self, initializer: Any, shape: Any, dtype: str) -> Any:
        """Draws what one of Keras' random initializers is asked for; gives a tensor of floats."""

    def make_seed(self) -> int:
        """Gives the seed of a new `SeedGenerator` that was given none."""

    def make_default_seed(self) -> int:
        """Gives the seed that stands in for one that was not given, elsewhere: in an initializer, in `RandomCrop`."""


@contextlib.contextmanager
def creating_weights(hooks: WeightHooks) -> Iterator[None]:
    """Lets others decide what new weights and random layers begin with. Of nested contexts the innermost counts.

    Keras 3.15: exchanges `Layer.add_weight`, `SeedGenerator.__init__` and the `__call__` of the random initializers,
    all public, but for all objects there are; and `keras.src.backend.random.make_default_seed`, which takes a number
    from Python's `random`, so that it depends on all that the process did before. No public hook does that.
    """
    layer_class, seed_class = keras.layers.Layer, keras.random.SeedGenerator
    original, make_generator = _of_keras(layer_class.add_weight), _of_keras(seed_class.__init__)

    def add_weight(
        layer: Any, *args: Any, shape: Any = None, initializer: Any = None, dtype: Any = None, **kwargs: Any
    ) -> keras.Variable:
        # The three that Keras also takes by position.
        shape, initializer, dtype = (*args, *(shape, initializer, dtype)[len(args) :])
        floating = _is_floating(dtype or layer.variable_dtype)
        initializer = keras.initializers.get(initializer or ("glorot_uniform" if floating else "zeros"))
        if floating:
            initializer = hooks.replace_initializer(initializer, layer)
        return original(layer, shape=shape, initializer=initializer, dtype=dtype, **kwargs)

    def init(generator: Any, own_seed: int | None = None, *args: Any, **kwargs: Any) -> None:
        own_seed = kwargs.pop("seed", own_seed)
        make_generator(generator, hooks.make_seed() if own_seed is None else own_seed, *args, **kwargs)

    def drawing_for(call: Callable[..., Any]) -> Callable[..., Any]:
        def draw(initializer: Any, shape: Any, dtype: Any = None) -> Any:
            dtype = keras.backend.standardize_dtype(dtype)
            return hooks.draw(initializer, shape, dtype) if _is_floating(dtype) else call(initializer, shape, dtype)

        return draw

    def make_default_seed() -> int:
        return hooks.make_default_seed()

    kinds = keras.initializers
    drawing = (kinds.VarianceScaling, kinds.RandomNormal, kinds.TruncatedNormal, kinds.RandomUniform, kinds.Orthogonal)
    with contextlib.ExitStack() as exchanged:
        exchanged.enter_context(_exchanged(layer_class, "add_weight", add_weight))
        exchanged.enter_context(_exchanged(seed_class, "__init__", init))
        exchanged.enter_context(_exchanged(keras_random, "make_default_seed", make_default_seed))
        for kind in drawing:
            exchanged.enter_context(_exchanged(kind, "__call__", drawing_for(_of_keras(kind.__call__))))
        yield


@contextlib.contextmanager
def _exchanged(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    found = getattr(owner, name)
    vars(function)["of_keras"] = _of_keras(found)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, found)


def _of_keras(function: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(function, "of_keras", function)


def _is_floating(dtype: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(dtype)


def seed_of(initializer: Any) -> Any:
    """Returns the seed that the user gave an initializer, an int or a `SeedGenerator`; None if there is none.

    Keras 3.15: `RandomInitializer._init_seed`. The public `get_config()["seed"]` serializes, for which Keras imports
    TensorFlow where it is installed; `seed` is one drawn at random if none was given.
    """
    return None if has_drawn_seed(initializer) else getattr(initializer, "seed", None)


def has_drawn_seed(initializer: Any) -> bool:
    """Returns whether Keras has drawn an initializer's seed, since none was given.

    Keras 3.15: `RandomInitializer._init_seed`; see `seed_of`.
    """
    return getattr(initializer, "_init_seed", 0) is None
