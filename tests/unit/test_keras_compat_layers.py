"""Each private name of Keras that the kit uses of layers, random numbers and settings; see test_keras_compat.py."""

import inspect
import pathlib

import keras
import numpy as np
import pytest
from keras.src import api_export
from keras.src import backend as keras_backend
from keras.src.backend import random as keras_random
from keras.src.backend.common import dtypes
from keras.src.losses import loss as loss_module
from keras.src.utils import module_utils

from kerasdp.keras_compat.layers import (
    has_mask,
    has_seed_generators,
    mask_of,
    raw_value,
    set_mask,
    set_raw_value,
    with_mask,
)
from kerasdp.keras_compat.numerics import same_on_all_backends
from kerasdp.keras_compat.optimizers import learning_rate_schedule
from kerasdp.keras_compat.random import (
    give_seed_generator,
    given_seed_generator,
    has_drawn_seed,
    is_in_layer_call,
    next_seed,
    seed_of,
)
from kerasdp.keras_compat.settings import kept_by_clear_session
from kerasdp.keras_compat.training import DataAdapter, losses_of_whole_batch, set_monitor_direction

SOURCE = pathlib.Path(inspect.getfile(keras)).parent / "src"


def test_schedule():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    assert learning_rate_schedule(keras.optimizers.SGD(schedule)) is schedule
    assert learning_rate_schedule(keras.optimizers.SGD(0.1)) is None


def test_masks():
    outputs = keras.layers.Embedding(5, 2, mask_zero=True)(keras.Input((3,)))
    assert has_mask(outputs)
    assert not has_mask(keras.Input((3,)))


def test_masks_go_where_their_tensors_go():
    tensor, mask = keras.ops.ones((4, 2)), keras.ops.convert_to_tensor([True, False, True, True])
    assert mask_of(with_mask(lambda rows: rows[:3], tensor)) is None
    first = with_mask(lambda rows: rows[:3], set_mask(tensor, mask))
    assert keras.ops.convert_to_numpy(mask_of(first)).tolist() == [True, False, True]


def test_raw_values():
    variable = keras.Variable(np.ones(3, "float32"))
    assert raw_value(variable) is not None
    set_raw_value(variable, None)
    assert raw_value(variable) is None


def test_seeds_of_initializers_and_layers():
    assert seed_of(keras.initializers.GlorotUniform(seed=3)) == 3
    assert seed_of(keras.initializers.GlorotUniform()) is None
    assert has_drawn_seed(keras.initializers.GlorotUniform())
    assert not has_drawn_seed(keras.initializers.Zeros())
    assert has_seed_generators(keras.layers.Dropout(0.5))
    assert len(next_seed(keras.random.SeedGenerator(1))) == 2


@pytest.mark.parametrize("name", ["VarianceScaling", "RandomNormal", "TruncatedNormal", "RandomUniform", "Orthogonal"])
def test_initializers_draw_by_themselves(name):
    assert "__call__" in vars(getattr(keras.initializers, name))


@pytest.mark.parametrize(
    "kind", ["dropout", "uniform", "normal", "truncated_normal", "randint", "shuffle", "make_default_seed"]
)
def test_draws(kind):
    assert callable(getattr(keras_random, kind))


def test_a_built_layer_takes_a_seed_generator():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    assert given_seed_generator(layer) is None
    give_seed_generator(layer)
    generator = given_seed_generator(layer)
    assert any(variable is generator.state for variable in layer.variables)
    assert has_seed_generators(layer) and len(layer.weights) == 2


def test_calls_of_layers_are_seen():
    seen = []
    assert not is_in_layer_call()
    keras.layers.Lambda(lambda x: seen.append(is_in_layer_call()) or x)(np.zeros(2, "float32"))
    assert seen == [True]
    assert not is_in_layer_call()


@pytest.mark.parametrize("name", ["shape", "initializer", "dtype"])
def test_add_weight_takes(name):
    assert name in inspect.signature(keras.layers.Layer.add_weight).parameters


def test_monitors_decide():
    callback = keras.callbacks.EarlyStopping(monitor="loss")
    callback.set_model(keras.Sequential([keras.layers.Dense(1)]))
    callback.model.compile(loss="mse")
    assert callback.monitor_op is None
    set_monitor_direction(callback)
    assert callback.monitor_op is not None


@pytest.mark.parametrize("name", ["scale_loss_for_distribution", "unscale_loss_for_distribution"])
def test_losses_of_whole_batch(name):
    with losses_of_whole_batch():
        wrapped = getattr(loss_module, name)
        assert wrapped(2.0) == 2.0
    with losses_of_whole_batch():
        assert getattr(loss_module, name) is wrapped  # once, for good


@pytest.mark.parametrize(
    "name",
    ["categorical_crossentropy", "binary_crossentropy", "sparse_categorical_crossentropy", "dot_product_attention"],
)
def test_functions_that_differ_between_backends(name):
    original = getattr(keras_backend.nn, name)
    replacing = {"dot_product_attention": ("torch", "jax", "tensorflow")}
    replacing["sparse_categorical_crossentropy"] = ("torch", "tensorflow")
    with same_on_all_backends():
        is_replaced = keras.backend.backend() in replacing.get(name, ("tensorflow",))
        assert (getattr(keras_backend.nn, name) is not original) == is_replaced
    assert getattr(keras_backend.nn, name) is original


@pytest.mark.parametrize("name", ["get_numpy_iterator", "get_jax_iterator", "get_torch_dataloader", "get_tf_dataset"])
def test_data_adapters_have(name):
    assert hasattr(DataAdapter, name)


def test_clear_session_keeps_what_a_run_has_chosen():
    devices = keras.distribution.DataParallel(devices=["cpu:0"])
    try:
        with kept_by_clear_session():
            keras.config.set_dtype_policy("mixed_bfloat16")
            keras.distribution.set_distribution(devices)
            keras.utils.clear_session()
            assert keras.config.dtype_policy().name == "mixed_bfloat16"
            assert keras.distribution.distribution() is devices
        keras.utils.clear_session()
        assert keras.config.dtype_policy().name == "float32"
        assert keras.distribution.distribution() is None
    finally:
        keras.distribution.set_distribution(None)
        keras.config.set_dtype_policy("float32")


def test_settings():
    assert "float64" in dtypes.BIT64_TO_BIT32_DTYPE
    assert hasattr(module_utils.tensorflow, "_available")
    assert api_export.REGISTERED_OBJS_TO_NAMES[keras.layers.Dropout] == "keras.layers.Dropout"


@pytest.mark.parametrize("name", ["core", "numpy", "optimizer"])
def test_modules_for_tensorflow_call_it_tf(name):
    assert "import tensorflow as tf\n" in (SOURCE / f"backend/tensorflow/{name}.py").read_text()


@pytest.mark.parametrize("kind", [keras.layers.BatchNormalization, keras.layers.SpatialDropout2D])
def test_protected_names_of_layers_that_are_derived_from(kind):
    layer = kind(0.5) if kind is keras.layers.SpatialDropout2D else kind()
    layer.build((None, 4, 4, 3))
    name = "_get_noise_shape" if kind is keras.layers.SpatialDropout2D else "_reduction_axes"
    assert hasattr(layer, name)
