"""Patches what Keras draws with: random numbers, initial weights, seeds of random layers."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend import random as keras_random
from keras.src.random.seed_generator import draw_seed


def next_seed(seed: Any) -> Any:
    """Returns two words to draw with, and advances a `SeedGenerator`.

    Keras 3.15: `draw_seed`. `SeedGenerator.next()` is public, but the global generator, which stands for a seed that
    was not given, is not.

    Args:
        seed: a `keras.random.SeedGenerator`, an int, or None.
    """
    return draw_seed(seed)


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


@contextlib.contextmanager
def creating_weights(
    replace_initializer: Callable[[keras.initializers.Initializer], Callable[..., Any]],
    make_seed: Callable[[], int],
) -> Iterator[None]:
    """Lets others decide what new weights and random layers begin with.

    Keras 3.15: exchanges `Layer.add_weight` and `SeedGenerator.__init__`, both public, but for all layers there are. No
    public hook does that.

    Args:
        replace_initializer: gets the initializer of a new weight of floats, if it has a seed; gives the one to use.
        make_seed: gives the seed of a new `SeedGenerator` that was given none.
    """
    layer_class, seed_class = keras.layers.Layer, keras.random.SeedGenerator
    original, make_generator = layer_class.add_weight, seed_class.__init__

    def add_weight(
        layer: Any, *args: Any, shape: Any = None, initializer: Any = None, dtype: Any = None, **kwargs: Any
    ) -> keras.Variable:
        # The three that Keras also takes by position.
        shape, initializer, dtype = (*args, *(shape, initializer, dtype)[len(args) :])
        floating = "float" in keras.backend.standardize_dtype(dtype or layer.variable_dtype)
        initializer = keras.initializers.get(initializer or ("glorot_uniform" if floating else "zeros"))
        if floating and hasattr(initializer, "seed"):
            initializer = replace_initializer(initializer)
        return original(layer, shape=shape, initializer=initializer, dtype=dtype, **kwargs)

    def init(generator: Any, own_seed: int | None = None, *args: Any, **kwargs: Any) -> None:
        own_seed = kwargs.pop("seed", own_seed)
        make_generator(generator, make_seed() if own_seed is None else own_seed, *args, **kwargs)

    layer_class.add_weight, seed_class.__init__ = add_weight, init
    try:
        yield
    finally:
        layer_class.add_weight, seed_class.__init__ = original, make_generator
