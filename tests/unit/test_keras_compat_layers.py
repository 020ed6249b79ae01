"""What the kit reads by private names of layers, random numbers and settings; see test_keras_compat.py."""

import keras
import numpy as np

from kerasdp.keras_compat.layers import (
    has_mask,
    has_seed_generators,
    mask_of,
    raw_value,
    set_mask,
    with_mask,
)
from kerasdp.keras_compat.optimizers import learning_rate_schedule
from kerasdp.keras_compat.random import (
    has_drawn_seed,
    is_in_layer_call,
    next_seed,
    seed_of,
)
from kerasdp.keras_compat.settings import kept_by_clear_session


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


def test_seeds_of_initializers_and_layers():
    assert seed_of(keras.initializers.GlorotUniform(seed=3)) == 3
    assert seed_of(keras.initializers.GlorotUniform()) is None
    assert has_drawn_seed(keras.initializers.GlorotUniform())
    assert not has_drawn_seed(keras.initializers.Zeros())
    assert has_seed_generators(keras.layers.Dropout(0.5))
    assert len(next_seed(keras.random.SeedGenerator(1))) == 2


def test_calls_of_layers_are_seen():
    seen = []
    assert not is_in_layer_call()
    keras.layers.Lambda(lambda x: seen.append(is_in_layer_call()) or x)(np.zeros(2, "float32"))
    assert seen == [True]
    assert not is_in_layer_call()


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
