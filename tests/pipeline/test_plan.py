"""How a run's choices cut batch and model, and what a pipeline refuses."""

import keras
import numpy as np
import pytest
from keras import layers

from kerasdp.config import Config
from kerasdp.data.sampling import Split
from kerasdp.errors import UserError
from kerasdp.scale.pipeline import flat_inputs, functional, packed_outputs, stages_of


def net(loss="mse"):
    inputs = x = keras.Input((3,), name="x")
    for number in range(4):
        x = layers.Dense(4, name=f"layer{number}")(x)
    model = keras.Model(inputs, x)
    model.compile("sgd", loss)
    return model


def stages(model, num_devices=2, **choices):
    return stages_of(model, Config(strategy="pipeline", **choices), num_devices)


def test_stages():
    made = stages(net(), 2, cut_at="layer1")
    assert [stage.layers for stage in made] == [["layer0", "layer1"], ["layer2", "layer3"]]


@pytest.mark.parametrize(
    ("num_stages", "num_rows", "choices", "expected"),
    [
        (2, 64, {}, 16),  # two a stage
        (2, 61, {}, 16),  # 16, 16, 16, 13
        (4, 3, {}, 1),  # there are no more
        (2, 64, {"split_size": 7}, 7),
    ],
)
def test_size_of_a_micro_batch(num_stages, num_rows, choices, expected):
    """Whatever the run's own size of a batch is."""
    assert Config(strategy="pipeline", **choices).micro_batch_rows(num_rows, num_stages) == expected


@pytest.mark.parametrize(
    ("changes", "num_devices"), [({"cut_at": "a,b,c"}, 4), ({"cut_at": "a", "num_devices": 2}, 2), ({}, None)]
)
def test_as_many_devices_as_stages(changes, num_devices):
    """Whoever says how many stages has said how many devices."""
    settings = Config(strategy="pipeline", **changes).with_devices_for_stages()
    assert settings.num_devices == num_devices
    assert settings.with_devices_for_stages() == settings
    assert Config().with_devices_for_stages() == Config()


def test_batches_that_cannot_be_cut_as_asked():
    with pytest.raises(UserError, match="--split_size: expected at most 8, the size of a batch. Received: 16"):
        Config(strategy="pipeline", split_size=16).micro_batch_rows(8, 2)


class OwnTrainStep(keras.Model):
    def train_step(self, *args):
        return super().train_step(*args)


class OwnLoss(keras.Model):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def of_kind(kind):
    inputs = keras.Input((3,))
    return kind(inputs, layers.Dense(2)(layers.Dense(2)(inputs)))


def masked():
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Dense(3, name="words")(layers.Rescaling(1.0)(inputs))
    return keras.Model(inputs, [x, layers.Embedding(5, 3, mask_zero=True)(inputs)])


def penalized():
    return keras.Sequential([keras.Input((3,)), layers.Dense(2, activity_regularizer="l2"), layers.Dense(2)])


def float8():
    model = of_kind(keras.Model)
    model.quantize("float8")
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (float8, "a pipeline: expected no float8 variables, "),
        (lambda: of_kind(OwnTrainStep), "never calls train_step of OwnTrainStep; use --strategy=data"),
        (lambda: of_kind(OwnLoss), "never calls compute_loss of OwnLoss; use --strategy=data"),
        (penalized, "has an activity regularizer, which needs the whole batch; use --strategy=data"),
        (masked, "a pipeline would lose the mask of an output of "),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(UserError, match=words):
        stages(make())


LEFT, RIGHT = (keras.ops.convert_to_tensor(np.random.RandomState(seed).rand(5, 3), "float32") for seed in (0, 1))


@pytest.mark.parametrize(
    ("inputs", "outputs", "given"),
    [
        ("left", "only", LEFT),
        ("left", ["only"], {"left": LEFT}),
        (["left", "right"], ["kind", "size"], (LEFT, RIGHT)),
        (["right", "left"], {"size": "size", "kind": "kind"}, {"left": LEFT, "right": RIGHT}),
        ({"b": "left", "a": "right"}, {"size": "size", "kind": "kind"}, {"a": RIGHT, "b": LEFT, "other": LEFT}),
    ],
    ids=["one", "by name", "lists", "in another order", "dictionaries"],
)
def test_stages_compute_what_the_model_computes(inputs, outputs, given):
    """Whatever structure goes in and comes out; as Keras does, it takes of a dictionary what it knows."""
    tensors = keras.tree.map_structure(lambda name: keras.Input((3,), name=name), inputs)
    first, *_ = every = keras.tree.flatten(tensors)
    x = layers.Dense(4)(layers.Concatenate()([*every, layers.Dense(2)(first)]))
    model = keras.Model(tensors, keras.tree.map_structure(lambda name: layers.Dense(2, name=name)(x), outputs))
    values = flat_inputs(functional(model), given)
    for stage in stages(model):
        values = stage(values)
    received, expected = packed_outputs(functional(model), values), model(given)
    keras.tree.assert_same_structure(received, expected)
    for pair in zip(keras.tree.flatten(received), keras.tree.flatten(expected), strict=True):
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, pair))


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (7, 3), (61, 8), (61, 61), (64, 100)])
def test_each_row_is_in_one_micro_batch(num_rows, size):
    parts = [rows for (rows,) in Split(1, micro_batch_rows=size).micro_batches(num_rows)]
    assert [row for each in parts for row in range(each.first, each.first + each.num_rows)] == list(range(num_rows))
    assert {each.num_rows for each in parts[:-1]} <= {size} and 0 < parts[-1].num_rows <= size
