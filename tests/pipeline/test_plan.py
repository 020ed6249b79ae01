"""How batch and model are cut: no row is lost, and the shares of a loss add up to it."""

import keras
import numpy as np
import pytest
from keras import layers

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.scale.pipeline import MicroBatches, make_plan, with_rows


def net(loss="mse"):
    inputs = x = keras.Input((3,), name="x")
    for number in range(4):
        x = layers.Dense(4, name=f"layer{number}")(x)
    model = keras.Model(inputs, x)
    model.compile("sgd", loss)
    return model


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
def test_a_plan_computes_what_the_model_computes(inputs, outputs, given):
    """Whatever structure goes in and comes out; as Keras does, it takes of a dictionary what it knows."""
    tensors = keras.tree.map_structure(lambda name: keras.Input((3,), name=name), inputs)
    first, *_ = every = keras.tree.flatten(tensors)
    x = layers.Dense(4)(layers.Concatenate()([*every, layers.Dense(2)(first)]))
    made = plan(
        model := keras.Model(tensors, keras.tree.map_structure(lambda name: layers.Dense(2, name=name)(x), outputs))
    )
    values = made.inputs(given)
    for stage in made.stages:
        values = stage(values)
    received, expected = made.outputs(values), model(given)
    keras.tree.assert_same_structure(received, expected)
    for pair in zip(keras.tree.flatten(received), keras.tree.flatten(expected), strict=True):
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, pair))


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 61, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 61, 100])
def test_each_row_is_in_one_micro_batch(num_rows, size):
    cut = MicroBatches(num_rows=num_rows, size=size)
    parts = [np.arange(num_rows)[cut.rows(number)] for number in range(len(cut))]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(num_rows))
    sizes = [cut.num_rows_of(number) for number in range(len(cut))]
    assert sizes == [len(part) for part in parts]
    assert set(sizes[:-1]) <= {size} and 0 < sizes[-1] <= size


def test_a_loss_that_needs_the_whole_batch():
    """One case: `step/test_sums_over_rows.py` tests each kind of loss."""
    model = net("dice")
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 4)))
    words = "the loss dice of.*; use --strategy=data, or --split_size=10, with which the stages"
    with pytest.raises(UserError, match=words):
        MicroBatches(num_rows=10, size=4).shares(model, is_weighted=False)
    assert MicroBatches(num_rows=10, size=10).shares(model, is_weighted=False) == [1.0]


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
