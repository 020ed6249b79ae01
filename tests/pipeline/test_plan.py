"""How batch and model are cut: no row is lost, and the shares of a loss add up to it."""

import keras
import numpy as np
import pytest
from keras import layers

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.keras_compat.optimizers import slots_of
from kerasdp.pipeline import MicroBatches, make_plan, with_rows


def net(optimizer="sgd"):
    inputs = x = keras.Input((3,), name="x")
    for number in range(4):
        x = layers.Dense(4, name=f"layer{number}")(x)
    model = keras.Model(inputs, x)
    model.compile(optimizer, "mse")
    return model


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
    made = plan(net(), 2, cut_at="layer1", batch_size=61, split_size=10)
    assert [stage.layers for stage in made.stages] == [["layer0", "layer1"], ["layer2", "layer3"]]
    assert made.size == 10
    assert len(made.micro_batches(61)) == 7
    assert str(made).endswith("micro-batches of 10")


@pytest.mark.parametrize(
    ("num_stages", "choices", "expected"),
    [
        (2, {}, 16),  # two a stage
        (4, {}, 8),
        (2, {"batch_size": 61}, 16),  # 16, 16, 16, 13
        (4, {"batch_size": 3}, 1),  # there are no more
        (2, {"split_size": 7}, 7),
    ],
)
def test_size_of_a_micro_batch(num_stages, choices, expected):
    assert plan(net(), num_stages, **choices).size == expected


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


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 61, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 61, 100])
def test_each_row_is_in_one_micro_batch(num_rows, size):
    cut = MicroBatches(num_rows=num_rows, size=size)
    parts = [np.arange(num_rows)[cut.rows(number)] for number in range(len(cut))]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(num_rows))
    sizes = [cut.num_rows_of(number) for number in range(len(cut))]
    assert sizes == [len(part) for part in parts]
    assert set(sizes[:-1]) <= {size} and 0 < sizes[-1] <= size


def with_loss(loss):
    model = net()
    model.compile("sgd", loss)
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 4)))
    return model


def two_outputs(**losses):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {name: layers.Dense(4, name=name)(inputs) for name in ("kind", "size")})
    model.compile("sgd", losses)
    model.train_on_batch(np.ones((4, 3)), {"kind": np.ones((4, 4)), "size": np.ones((4, 4))})
    return model


UNEVEN = MicroBatches(num_rows=10, size=4)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_the_shares_add_up_to_the_loss(reduction):
    """What they are for, with numbers."""
    rows = np.random.RandomState(0)
    targets, outputs = rows.rand(10, 4), rows.rand(10, 4)
    model = with_loss(keras.losses.MeanSquaredError(reduction=reduction))
    parts = [UNEVEN.rows(number) for number in range(3)]
    losses = [float(model.loss(targets[part], outputs[part])) for part in parts]
    shares = UNEVEN.shares(model, is_weighted=False)
    assert np.dot(shares, losses) == pytest.approx(float(model.loss(targets, outputs)))


def loss_of(reduction):
    return keras.losses.MeanSquaredError(reduction=reduction)


@pytest.mark.parametrize(
    ("make", "is_weighted", "words"),
    [
        (
            lambda: with_loss(loss_of("mean_with_sample_weight")),
            True,
            "reduced by mean_with_sample_weight, which needs",
        ),
        (lambda: two_outputs(kind="mse", size=loss_of("sum")), False, "reduced by sum, sum_over_batch_size"),
        (lambda: with_loss("dice"), False, "the loss dice of"),
        (lambda: with_loss(keras.losses.Tversky()), False, "the loss tversky of"),
    ],
)
def test_a_loss_that_needs_the_whole_batch(make, is_weighted, words):
    with pytest.raises(UserError, match=f"{words}.*; use --strategy=data, or --split_size=10, with which the stages"):
        UNEVEN.shares(make(), is_weighted=is_weighted)
    assert MicroBatches(num_rows=10, size=10).shares(make(), is_weighted=is_weighted) == [1.0]


def tuned(num_rows, **choices):
    """Returns the plan of a run with a `config.batch_size` of 64 after `fit` was given batches of `num_rows`."""
    config = Config(strategy="pipeline", batch_size=64, **choices)
    return with_rows(make_plan(net(), config, 2), config, num_rows)


@pytest.mark.parametrize(("num_rows", "size"), [(16, 4), (61, 16), (64, 16), (256, 64)])
def test_as_many_micro_batches_in_batches_of_any_size(num_rows, size):
    made = tuned(num_rows)
    assert (made.size, len(made.micro_batches(num_rows))) == (size, 4)


def test_batches_that_cannot_be_cut_as_asked():
    with pytest.raises(UserError, match="--split_size: expected at most 8, a batch's samples. Received: 16"):
        tuned(8, split_size=16)
