"""Patches what Keras draws with: random numbers, initial weights, seeds of random layers."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend import random as keras_random
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.initializers.random_initializers import compute_fans
from keras.src.layers.preprocessing.data_layer import DataLayer
from keras.src.random.seed_generator import draw_seed
from keras.src.utils.backend_utils import in_tf_graph

from kerasdp.keras_compat.patches import in_place_of, original, replaced, replaced_in_each, standing_for, wrap_for_good


def next_seed(seed: Any) -> Any:
    """Returns two words to draw with, and advances a `SeedGenerator`.

    Keras 3.15: `draw_seed`. `SeedGenerator.next()` is public, but the global generator, which stands for a seed that
    was not given, is not. On torch Keras looks for shapes on the device "meta", where it draws without a seed
    itself; where that fails it tries again on the CPU, in the same `StatelessScope`, which would know the generator's
    next state as a tensor without numbers.

    Args:
        seed: a `keras.random.SeedGenerator`, an int, or None.
    """
    if get_global_attribute("torch_device") == "meta":
        return keras.ops.zeros((2,), "int32")
    return draw_seed(seed)


def is_in_layer_call() -> bool:
    """Returns whether a layer or model is being called.

    Keras 3.15: the global attribute `current_call_ctx`, which `Layer.__call__` sets for its outermost call. No public
    way.
    """
    return get_global_attribute("current_call_ctx") is not None


def is_in_tensorflow_graph() -> bool:
    """Returns whether TensorFlow traces a function, as one of `tf.data.Dataset.map`; without it: False.

    Keras 3.15: `keras.src.utils.backend_utils.in_tf_graph`, by which augmentations choose TensorFlow's functions there.
    """
    return bool(in_tf_graph())


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


# The attribute of a layer that `draw_portably` sets.
_DRAWS_PORTABLY = "_kerasdp_draws_portably"


def draw_portably(layer: keras.layers.Layer) -> None:
    """Marks a layer whose draws are to be portable, for good.

    Past Keras (3.15), which would track the attribute of a built layer. `copy.deepcopy` copies it, too.
    """
    object.__setattr__(layer, _DRAWS_PORTABLY, True)


def draws_portably(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer is marked by `draw_portably`."""
    return _DRAWS_PORTABLY in vars(layer)


def wrap_draws(kinds: tuple[str, ...], draw: Callable[..., Any]) -> None:
    """Wraps functions by which `keras.random` and all of Keras' layers draw, once and for the whole process.

    Keras 3.15: the functions of `keras.src.backend.random`, which are looked up there in each call. No public way.

    Args:
        kinds: names of functions of `keras.random`.
        draw: is called in their place, with the name, Keras' function and its arguments.
    """
    for kind in kinds:
        wrap_for_good(keras_random, kind, functools.partial(draw, kind))


def creating_weights(hooks: Any) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which others decide what new weights and random layers begin with; the innermost counts.

    Keras 3.15: exchanges `Layer.add_weight`, `SeedGenerator.__init__` and the `__call__` of the random initializers,
    all public, but for all objects there are; and `keras.src.backend.random.make_default_seed`, which takes a number
    from Python's `random`, so that it depends on all that the process did before. No public hook does that.

    `hooks`: a `kerasdp.same.initial_weights.WeightNumbering`.
    """
    layer_class, seed_class = keras.layers.Layer, keras.random.SeedGenerator
    add, make_generator = original(layer_class.add_weight), original(seed_class.__init__)

    def add_weight(
        layer: Any, *args: Any, shape: Any = None, initializer: Any = None, dtype: Any = None, **kwargs: Any
    ) -> keras.Variable:
        # The three that Keras also takes by position.
        shape, initializer, dtype = (*args, *(shape, initializer, dtype)[len(args) :])
        floating = _is_floating(dtype or layer.variable_dtype)
        initializer = keras.initializers.get(initializer or ("glorot_uniform" if floating else "zeros"))
        if floating:
            initializer = hooks.replace_initializer(initializer, layer)
        return add(layer, shape=shape, initializer=initializer, dtype=dtype, **kwargs)

    def init(generator: Any, seed: int | None = None, *args: Any, **kwargs: Any) -> None:
        make_generator(generator, hooks.make_seed() if seed is None else seed, *args, **kwargs)

    def draw(call: Callable[..., Any], initializer: Any, shape: Any, dtype: Any = None) -> Any:
        dtype = keras.backend.standardize_dtype(dtype)
        return hooks.draw(initializer, shape, dtype) if _is_floating(dtype) else call(initializer, shape, dtype)

    def generator_in_graph(get: Callable[..., Any], layer: Any, backend: Any = None) -> Any:
        """In `tf.data` Keras makes another generator, on torch and jax, of a seed that may not have been given."""
        if backend in (None, keras.backend.backend()) or not hasattr(layer, "generator"):
            return get(layer, backend)
        with replaced(layer, seed=int(keras.ops.convert_to_numpy(layer.generator.state)[0])):
            return get(layer, backend)

    kinds = keras.initializers
    drawing = (kinds.VarianceScaling, kinds.RandomNormal, kinds.TruncatedNormal, kinds.RandomUniform, kinds.Orthogonal)
    exchanged = [
        (layer_class, "add_weight", add_weight),
        (seed_class, "__init__", init),
        (keras_random, "make_default_seed", lambda: hooks.make_default_seed()),
        (DataLayer, "_get_seed_generator", in_place_of(original(DataLayer._get_seed_generator), generator_in_graph)),
        *((kind, "__call__", in_place_of(original(kind.__call__), draw)) for kind in drawing),
    ]
    return replaced_in_each((owner, {name: standing_for(getattr(owner, name), new)}) for owner, name, new in exchanged)


def fans_of(initializer: keras.initializers.VarianceScaling, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns how many inputs and outputs a kernel of that shape has, as an initializer counts them.

    Keras 3.15: `compute_fans`; no public way.
    """
    return compute_fans(shape, initializer.input_axes, initializer.output_axes)


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
