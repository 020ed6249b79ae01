"""How batch and model are cut."""

import keras
import numpy as np
import pytest
from keras import layers

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.keras_compat.optimizers import slots_of
from kerasdp.pipeline import make_plan
from tests.pipeline.models import net


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: keras.optimizers.SGD(0.1), set()),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), {"momentums"}),
        (lambda: keras.optimizers.Adam(), {"_momentums", "_velocities"}),
        (lambda: keras.optimizers.Adam(use_ema=True), {"_momentums", "_velocities", "_model_variables_moving_average"}),
        (lambda: keras.optimizers.Adafactor(), {"_r", "_c", "_v"}),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion()), {"_momentums"}),
        (lambda: keras.optimizers.Nadam(), {"_momentums", "_velocities"}),
        (lambda: keras.optimizers.Muon(), {"momentums", "adam_velocities"}),
    ],
    ids=["sgd", "momentum", "adam", "ema", "adafactor", "loss-scale", "nadam", "muon"],
)
def test_slots_of_each_weight(make, kinds):
    """By the place of their weight; all others of the optimizer's variables are single numbers, for all weights."""
    model = net(make())
    weights, optimizer = model.trainable_variables, model.optimizer
    optimizer.build(weights)
    slots = slots_of(optimizer, len(weights))
    assert {name for name, _ in slots} == kinds
    for (_, place), slot in slots.items():
        assert slot.shape in ((), weights[place].shape, weights[place].shape[:-1], weights[place].shape[1:])
    held = {id(slot) for slot in slots.values()}
    assert all(variable.shape == () for variable in optimizer.variables if id(variable) not in held)


def plan(model, num_devices=2, **choices):
    return make_plan(model, Config(strategy="pipeline", **choices), num_devices)


def test_a_plan():
    made = plan(net(), 4, cut_at="layer1", batch_size=61, split_size=5)
    assert [stage.layers for stage in made.stages] == [["layer0", "layer1"], ["layer2", "layer3"]]
    assert (made.num_pipelines, made.size) == (2, 10)
    assert len(made.micro_batches(61)) == 7
    assert str(made).endswith("micro-batches of 10 in 2 pipelines")
    assert str(plan(net(), split_size=5)).endswith("micro-batches of 5")


def test_where_it_is_cut():
    made = plan(net(), 3, cut_at="layer0, layer2")
    assert [stage.layers[-1] for stage in made.stages] == ["layer0", "layer2", "layer3"]
    assert plan(net(), batch_size=64).size == 16  # two a stage


class OwnTrainStep(keras.Model):
    def train_step(self, *args):
        return super().train_step(*args)


class OwnLoss(keras.Model):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(2)

    def call(self, x):
        return self.layer(x)


def of_kind(kind):
    inputs = keras.Input((3,))
    return kind(inputs, layers.Dense(2)(layers.Dense(2)(inputs)))


def masked():
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Dense(3, name="words")(layers.Rescaling(1.0)(inputs))
    return keras.Model(inputs, [x, layers.Embedding(5, 3, mask_zero=True)(inputs)])


def float8():
    model = of_kind(keras.Model)
    model.quantize("float8")
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (float8, "a pipeline: expected gradients that an optimizer may average. Received: dense"),
        (lambda: of_kind(OwnTrainStep), "never calls the train_step of OwnTrainStep; use --strategy=data"),
        (lambda: of_kind(OwnLoss), "never calls the compute_loss of OwnLoss; use --strategy=data"),
        (Subclassed, "functional, or Sequential with an Input. Received: Subclassed"),
        (masked, "carry a mask, which its micro-batches would lose"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(UserError, match=words):
        plan(make())


def test_stages_and_devices_that_do_not_go_together():
    with pytest.raises(UserError, match="--gpus: expected a multiple of the 2 stages"):
        plan(net(), 3, cut_at="layer1")


def of_inputs(structure):
    tensors = keras.tree.map_structure(lambda name: keras.Input((3,), name=name), structure)
    x = layers.Concatenate()(keras.tree.flatten(tensors)) if not isinstance(structure, str) else tensors
    return plan(keras.Model(tensors, layers.Dense(2)(layers.Dense(2)(x))))


@pytest.mark.parametrize(
    ("structure", "given", "expected"),
    [
        ("left", 1, [1]),
        ("left", {"left": 1}, [1]),
        ("left", {"left": 1, "other": 2}, [1]),  # as Keras does, it takes what it knows
        (["left", "right"], [1, 2], [1, 2]),
        (["left", "right"], (1, 2), [1, 2]),
        (["right", "left"], {"left": 1, "right": 2}, [2, 1]),
        ({"b": "left", "a": "right"}, {"b": 1, "a": 2}, [2, 1]),
        ({"b": "left", "a": "right"}, {"a": 2, "b": 1, "other": 3}, [2, 1]),
    ],
)
def test_inputs(structure, given, expected):
    """In the order of the first stage's inputs."""
    made = of_inputs(structure)
    assert made.inputs(given) == expected
    names = [tensor.name for tensor in made.model.inputs]
    assert [names[place] for place in range(len(expected))] == [{1: "left", 2: "right"}[number] for number in expected]


@pytest.mark.parametrize(
    ("structure", "given", "expected"),
    [
        ("only", [1], 1),
        (["only"], [1], 1),  # as Keras does
        (["kind", "size"], [1, 2], [1, 2]),
        ({"size": "size", "kind": "kind"}, [1, 2], {"kind": 1, "size": 2}),
    ],
)
def test_outputs(structure, given, expected):
    inputs = keras.Input((3,))
    x = layers.Dense(4)(inputs)
    outputs = keras.tree.map_structure(lambda name: layers.Dense(2, name=name)(x), structure)
    made = plan(keras.Model(inputs, outputs))
    assert made.outputs(given) == expected


def test_a_plan_computes_what_the_model_computes():
    """With dictionaries at both ends, whose order is not that in which they were made."""
    tensors = {"b": keras.Input((3,), name="left"), "a": keras.Input((3,), name="right")}
    x = layers.Dense(4)(layers.Concatenate()([tensors["b"], tensors["a"]]))
    outputs = {"size": layers.Dense(1, name="size")(x), "kind": layers.Dense(2, name="kind")(x)}
    made = plan(model := keras.Model(tensors, outputs))
    data = {name: keras.ops.convert_to_tensor(np.random.RandomState(0).rand(5, 3).astype("float32")) for name in "ab"}
    values = made.inputs(data)
    for stage in made.stages:
        values = stage(values)
    received, expected = made.outputs(values), model(data)
    assert received.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (received[name], value)))
