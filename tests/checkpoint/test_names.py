"""A variable is known by its place in the model, in whatever order Keras lists it."""

import json

import keras
import numpy as np
import pytest
from keras import layers

from kerasdp.checkpoint import names, state
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import all_layers
from kerasdp.keras_compat.settings import without_tensorflow
from kerasdp.same.portable import portable
from tests.checkpoint.test_state import gather

GROUPS = ("model", "optimizer", "loss_scale")
X = np.random.RandomState(0).randn(16, 4).astype("float32")


class Block(layers.Layer):
    """With two layers that are alike but for the attributes that hold them, and lists of such."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = layers.Dense(4, "tanh"), layers.Dense(4, "tanh")
        self.pairs = {"a": [layers.Dense(4), layers.Dense(4)], "b": [layers.Dense(4)]}
        self.dropout = layers.Dropout(0.2)
        self.mean = keras.metrics.Mean(name="mean")

    def build(self, shape):
        self.scale, self.shift = self.add_weight(shape=(4,)), self.add_weight(shape=(4,))
        for layer in (self.first, self.second, *self.pairs["a"], *self.pairs["b"]):
            layer.build(shape)

    def call(self, x):
        x = self.second(self.first(self.dropout(x))) * (1 + self.scale) + self.shift
        return x + self.pairs["b"][0](self.pairs["a"][0](x) - self.pairs["a"][1](x))


def graph():
    """Functional, with a nested model, a block, and layers that are alike."""
    inputs = keras.Input((4,))
    x = layers.Dense(4, "tanh")(inputs)
    x = layers.Dense(4, "tanh")(x)
    tower = keras.Sequential([layers.Dense(4, name="same"), layers.Dense(4)], name="tower")
    x = layers.Add()([tower(x), keras.Sequential([layers.Dense(4, name="same")], name="tower_too")(x)])
    return keras.Model(inputs, layers.Dense(1)(Block()(x)))


class Attributes(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.other = Block(), Block()
        self.end = layers.Dense(1)

    def call(self, x):
        return self.end(self.other(self.one(x)))


def architecture(model):
    with without_tensorflow():
        return state._architecture(model)


def made(make, optimizer, *, other_order):
    # As on a process that has built other models before.
    layers.Dense(1)
    model = make()
    model(X[:1])
    portable(model)  # Keras' own dropout on torch does not draw by the seed that the layer holds
    if other_order:
        for layer in all_layers(model):
            if not isinstance(layer, keras.Sequential):
                layer._layers.reverse()
            layer._trainable_variables.sort(key=lambda variable: variable.path, reverse=True)
    model.compile(optimizer, "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


OPTIMIZERS = {
    "sgd-schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.01, 9), momentum=0.9),
    "adamw-accumulated": lambda: keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2),
    "adam-ema": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "loss-scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


@pytest.mark.short("graph-adam-ema", "Attributes-adam-ema")
@pytest.mark.parametrize(("make", "optimizer"), [*((graph, name) for name in OPTIMIZERS), (Attributes, "adam-ema")])
def test_another_order_trains_on_as_this_one(make, optimizer):
    """Weights and what the optimizer keeps for each: of many layers alike, none gets another's."""
    source = made(make, OPTIMIZERS[optimizer](), other_order=False)
    target = made(make, OPTIMIZERS[optimizer](), other_order=True)
    source.train_on_batch(X, X[:, :1])  # `fit` would end with the averages in place of the weights
    shapes = [[variable.shape for variable in model.variables] for model in (source, target)]
    assert shapes[0] != shapes[1]
    state.restore(target, gather(source), GROUPS)
    # The model's places, followed by hand.
    pair = [model.layers[-2] if make is graph else model.other for model in (source, target)]
    for get in (lambda block: block.first.kernel, lambda block: block.pairs["a"][1].kernel, lambda block: block.shift):
        np.testing.assert_array_equal(*(keras.ops.convert_to_numpy(get(block)) for block in pair))
    losses = [
        [float(model.train_on_batch(X, X[:, :1], return_dict=True)["loss"]) for _ in range(3)]
        for model in (source, target)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    assert losses[0][0] != losses[0][2]


def test_names_say_where():
    found = {name for name, _ in names.named(made(graph, "sgd", other_order=False), "model")}
    assert {"model/dense.0/kernel", "model/dense.1/kernel", "model/tower/same/bias"} <= found
    assert {"model/block/dense.first/kernel", "model/block/dense.pairs.a.1/kernel"} <= found
    assert {"model/block/variable.shift", "model/block/dropout.dropout/seed_generator_state"} <= found


@pytest.mark.parametrize("make", [graph, Attributes])
def test_another_order_is_the_same_architecture(make):
    digests = [architecture(made(make, "sgd", other_order=order)) for order in (False, True)]
    assert digests[0] == digests[1]
    other = made(make, "sgd", other_order=False)
    block = other.layers[-2] if make is graph else other.other
    block.second.activation = keras.activations.relu
    assert architecture(other) != digests[0]


def test_metrics_of_layers():
    source, target = (made(Attributes, "sgd", other_order=order) for order in (False, True))
    source.one.mean.update_state([1.0, 3.0])
    state.restore(target, gather(source), ("metrics",))
    assert (float(target.one.mean.result()), float(target.other.mean.result())) == (2.0, 0.0)


def test_what_cannot_be_told_apart_is_refused():
    class Unordered(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = {layers.Dense(4), layers.Dense(4)}

        def call(self, x):
            return sum(part(x) for part in self.parts)

    source, target = (made(Unordered, "sgd", other_order=False) for _ in range(2))
    with pytest.raises(UserError, match=r"unordered.* both have several variables called model/dense/kernel"):
        state.restore(target, gather(source), GROUPS)


def test_the_best_weights_that_a_callback_keeps():
    source, target = (made(graph, "sgd", other_order=order) for order in (False, True))
    callback = keras.callbacks.EarlyStopping("loss")
    begin = [state.plain_attributes(callback)]
    callback.best_weights, callback.best = source.get_weights(), 0.5
    arrays = {}
    states = json.loads(json.dumps(state.callback_states([callback], begin, arrays, source)))
    restored = keras.callbacks.EarlyStopping("loss")
    state.restore_callbacks([restored], states, arrays, target)
    target.set_weights(restored.best_weights)
    np.testing.assert_array_equal(source.predict(X, verbose=0), target.predict(X, verbose=0))
