"""Patches the sources of randomness in Keras: random functions, initial weights, seeds of random layers."""

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
    """Returns two random integers that seed a draw, and advances a `SeedGenerator`.

    Uses the private `draw_seed` of Keras 3.15. `SeedGenerator.next()` is public, but the global generator is not. Keras
    uses the global generator for `seed=None`.

    On torch, Keras computes output shapes on the device "meta", where draws do not use the seed. On "meta", this
    function returns zeros, and does not advance the generator. An advanced generator would have a state without values.
    Keras would read that state if it fails on "meta" and tries again on the CPU in the same `StatelessScope`.

    Args:
        seed: a `keras.random.SeedGenerator`, an int, or None.
    """
    if get_global_attribute("torch_device") == "meta":
        return keras.ops.zeros((2,), "int32")
    return draw_seed(seed)


def is_in_layer_call() -> bool:
    """Returns whether a call of a layer or model is running.

    In Keras 3.15, the outermost `Layer.__call__` sets the global attribute `current_call_ctx`. No public API shows
    whether a call is running.
    """
    return get_global_attribute("current_call_ctx") is not None


def is_in_tensorflow_graph() -> bool:
    """Returns whether TensorFlow is tracing a function, such as a function of `tf.data.Dataset.map`.

    Without TensorFlow, the result is False. Uses the private `keras.src.utils.backend_utils.in_tf_graph` of Keras 3.15.
    Augmentation layers use `in_tf_graph` to select TensorFlow's functions.
    """
    return bool(in_tf_graph())


# The attribute of a layer that `give_seed_generator` sets.
_GENERATOR = "seed_of_unseeded_draws"


def give_seed_generator(layer: keras.layers.Layer) -> None:
    """Adds a `keras.random.SeedGenerator` to a built layer. The state of the generator becomes a variable of the layer.

    In Keras 3.15, a built layer accepts new variables only while its `_tracker` is unlocked. No public API unlocks the
    tracker.
    """
    layer._tracker.unlock()
    setattr(layer, _GENERATOR, keras.random.SeedGenerator())
    layer._tracker.lock()


def given_seed_generator(layer: keras.layers.Layer) -> keras.random.SeedGenerator | None:
    """Returns the generator that `give_seed_generator` added to a layer; None for other layers."""
    return getattr(layer, _GENERATOR, None)


# The attribute of a layer that `draw_portably` sets.
_DRAWS_PORTABLY = "_kerasdp_draws_portably"


def draw_portably(layer: keras.layers.Layer) -> None:
    """Marks a layer permanently, so that its random values are the same on all backends.

    The mark is set with `object.__setattr__`, because Keras (3.15) would track a new attribute of a built layer.
    `copy.deepcopy` copies the mark.
    """
    object.__setattr__(layer, _DRAWS_PORTABLY, True)


def draws_portably(layer: keras.layers.Layer) -> bool:
    """Returns whether `draw_portably` has marked a layer."""
    return _DRAWS_PORTABLY in vars(layer)


def wrap_draws(kinds: tuple[str, ...], draw: Callable[..., Any]) -> None:
    """Wraps the functions with which `keras.random` and Keras' layers draw random values, permanently.

    In Keras 3.15, each call looks up the function in `keras.src.backend.random`. No public API replaces these
    functions.

    Args:
        kinds: names of functions in `keras.random`.
        draw: the wrapper. Its arguments are the name, Keras' function, and the arguments of the call.
    """
    for kind in kinds:
        wrap_for_good(keras_random, kind, functools.partial(draw, kind))


def creating_weights(hooks: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `hooks` set the initial values of new weights and the seeds of random layers.

    If contexts are nested, the hooks of the innermost context are used. Keras 3.15 has no hook for initial values and
    seeds. So these public methods are replaced in their classes: `Layer.add_weight`, `SeedGenerator.__init__`, and
    `__call__` of the random initializers. The private `keras.src.backend.random.make_default_seed` is also replaced.
    The original function reads Python's `random`, so its result depends on earlier random draws of the process.

    Args:
        hooks: a `kerasdp.same.initial_weights.WeightNumbering`.
    """
    layer_class, seed_class = keras.layers.Layer, keras.random.SeedGenerator
    add, make_generator = original(layer_class.add_weight), original(seed_class.__init__)

    def add_weight(
        layer: Any, *args: Any, shape: Any = None, initializer: Any = None, dtype: Any = None, **kwargs: Any
    ) -> keras.Variable:
        # Keras also accepts these three by position.
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
        """Passes the layer's seed to the generator that Keras makes for `tf.data` on torch and jax."""
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
    """Returns the numbers of inputs and outputs of a kernel with this shape, as an initializer computes them.

    Uses the private `compute_fans` of Keras 3.15. No public API computes these numbers.
    """
    return compute_fans(shape, initializer.input_axes, initializer.output_axes)


def _is_floating(dtype: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(dtype)


def seed_of(initializer: Any) -> Any:
    """Returns the seed that the user passed to an initializer: an int or a `SeedGenerator`; None without a seed.

    Uses the private `RandomInitializer._init_seed` of Keras 3.15. The public `get_config()["seed"]` serializes the
    seed. To serialize, Keras imports TensorFlow if TensorFlow is installed. If the user passed no seed, the public
    `seed` is a random seed.
    """
    return None if has_drawn_seed(initializer) else getattr(initializer, "seed", None)


def has_drawn_seed(initializer: Any) -> bool:
    """Returns whether the seed of an initializer is random, because the user passed no seed.

    Uses the private `RandomInitializer._init_seed` of Keras 3.15: see `seed_of`.
    """
    return getattr(initializer, "_init_seed", 0) is None
