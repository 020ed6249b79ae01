"""The state of a training, taken and given back."""

import json

import keras
import numpy as np
import pytest

from kerasdp.checkpoint import state as training_state
from kerasdp.config import Config
from kerasdp.data.feed import SampleReader
from kerasdp.data.sampling import Order
from kerasdp.data.sources import ArraySource
from kerasdp.errors import UserError


def build(units=4, optimizer=None, activation="relu", loss="mse"):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(units, activation), keras.layers.BatchNormalization(),
         keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )  # fmt: skip
    model.compile(optimizer or "adam", loss, metrics=["mae"])
    return model


def trained(**choices):
    model = build(**choices)
    x = np.random.RandomState(0).randn(32, 3).astype("float32")
    model.fit(x, x[:, :1], epochs=1, batch_size=8, verbose=0)
    return model


def values(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.01, use_ema=True),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9), momentum=0.9, nesterov=True),
        lambda: keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion(0.001)),
        lambda: keras.optimizers.Muon(0.01),
    ],
    ids=["adam-ema", "sgd-schedule", "adamw-accumulated", "loss-scale", "muon"],
)
def test_everything_comes_back(make):
    """Into a model whose layers' automatic names have other numbers; seeds of dropout and slots included."""
    source, target = trained(optimizer=make()), build(optimizer=make())
    target.optimizer.build(target.trainable_variables)
    assert [layer.name for layer in source.layers] != [layer.name for layer in target.layers]
    arrays = training_state.gather(source)
    training_state.restore(target, arrays, ("model", "optimizer", "loss_scale"))
    assert len(arrays) > len(source.weights)
    for expected, received in zip(values(source), values(target), strict=True):
        np.testing.assert_array_equal(received, expected)


def test_a_copy_does_not_change_with_the_model():
    model = trained()
    arrays = training_state.gather(model)
    kept = {name: array.copy() for name, array in arrays.items()}
    x = np.ones((8, 3), "float32")
    model.fit(x, x[:, :1], verbose=0)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, kept[name])


def test_metrics_go_on():
    model = trained()
    arrays = training_state.gather(model)
    before = {name: float(value) for name, value in model.get_metrics_result().items()}
    model.reset_metrics()
    training_state.restore(model, arrays, ("metrics",))
    assert {name: float(value) for name, value in model.get_metrics_result().items()} == before


def test_loss_scaling_comes_and_goes():
    """A run in float16 resumes in float32, and the other way round."""
    plain, scaled = trained(), trained(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    groups = ("model", "optimizer", "loss_scale")
    training_state.restore(plain, training_state.gather(scaled), groups)
    training_state.restore(scaled, training_state.gather(plain), groups)


@pytest.mark.parametrize("other", [{"units": 5}, {"optimizer": "sgd"}])
def test_other_variables_are_refused(other):
    with pytest.raises(UserError, match="the checkpoint is of another (model|optimizer)"):
        training_state.restore(trained(**other), training_state.gather(trained()), ("model", "optimizer"))


def identity(model=None, *, config=None, batch_size=8, shift=0.0):
    x = np.arange(60, dtype="float32").reshape(20, 3) + shift
    source = ArraySource(x, x[:, :1], None)
    order = Order(num_samples=20, batch_size=batch_size, seed=0)
    return training_state.identity(config or Config(), model or build(), SampleReader(source, order, 1, (0, 1)))


def test_the_same_run_is_the_same():
    saved = json.loads(json.dumps(identity()))
    training_state.check_identity(saved, identity())
    training_state.check_identity(saved, identity(config=Config(backend="jax", num_devices=4, epochs=99)))


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (lambda: identity(config=Config(seed=1)), "--seed"),
        (lambda: identity(config=Config(batch_norm="replica")), "--batch_norm"),
        (lambda: identity(batch_size=9), "global batch"),
        (lambda: identity(shift=1.0), "first batch of the data"),
        (lambda: identity(build(activation="gelu")), "model"),
        (lambda: identity(build(loss="mae")), "loss"),
        (lambda: identity(build(optimizer=keras.optimizers.Adam(beta_1=0.8))), "optimizer"),
        (lambda: identity(build(optimizer=keras.optimizers.Adam(0.1))), "learning rate"),
    ],
)
def test_another_run_is_named(other, name):
    with pytest.raises(UserError, match=f"differs from the one in the workdir in {name}: expected"):
        training_state.check_identity(identity(), other())


class Counting(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.limit, self.count, self.seen, self.arrays, self.function = 3, 0, {}, [], print


def test_callbacks_keep_what_changed():
    first, second = Counting(), Counting()
    begin = [training_state.plain_attributes(callback) for callback in (first, second)]
    second.count, second.seen, second.arrays = 5, {"best": np.float32(0.5)}, [np.arange(3.0)]
    arrays = {}
    states = json.loads(json.dumps(training_state.callback_states([first, second], begin, arrays, build())))
    assert states.keys() == {"Counting/1"}
    restored = [Counting(), Counting()]
    restored[1].limit = 4  # the user thought better of it
    training_state.restore_callbacks(restored, states, arrays, build())
    assert vars(restored[0]) == vars(Counting())
    assert (restored[1].limit, restored[1].count, restored[1].seen) == (4, 5, {"best": 0.5})
    np.testing.assert_array_equal(restored[1].arrays[0], np.arange(3.0))
