"""The state of a training, taken and given back."""

import collections
import json

import keras
import numpy as np
import pytest

from kerasdp.checkpoint import state
from kerasdp.checkpoint.names import GROUPS
from kerasdp.config import Config
from kerasdp.data.batch import SampleReader
from kerasdp.data.sampling import Order, Split
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


def gather(model, groups=GROUPS):
    """The values of all variables, as a checkpoint has them."""
    return {name: state.to_numpy(variable) for name, variable in state.variables_of(model, groups).items()}


def test_a_copy_does_not_change_with_the_model():
    model = trained()
    arrays = gather(model)
    kept = {name: array.copy() for name, array in arrays.items()}
    x = np.ones((8, 3), "float32")
    model.fit(x, x[:, :1], verbose=0)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, kept[name])


def with_metrics(metrics, weighted=None):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs) for _ in range(2)])
    model.compile("sgd", ["mse", "mae"], metrics=metrics, weighted_metrics=weighted)
    return model


def fitted(model):
    x = np.random.RandomState(0).randn(8, 3).astype("float32")
    y = [x[:, :1] > 0, x[:, 1:2] > 0]
    model.fit(x, y, sample_weight=[x[:, 2] ** 2] * 2, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (([["mae", "mse"], ["mse", "cosine_similarity"]],), ([["mse", "mae"], ["cosine_similarity", "mse"]],)),
        (([["mae"], None], [["mse", "mae"], None]), ([["mae"], None], [["mae", "mse"], None])),
    ],
    ids=["names", "weighted"],
)
def test_metrics_in_another_order(saved, resumed):
    source, target = fitted(with_metrics(*saved)), fitted(with_metrics(*resumed))
    target.reset_metrics()
    state.restore(target, gather(source), ("metrics",))

    def results(model):
        metrics = model._compile_metrics.metrics
        return sorted((json.dumps(state.in_words(each)), float(each.result())) for each in metrics)

    assert results(target) == results(source)
    assert len({value for _, value in results(source)}) > 1


@pytest.mark.parametrize("metrics", [[["mae", "mse"], ["mse"]], [["mae"], None], [None, ["mae"]], [["mse"], ["mse"]]])
def test_other_metrics_within_an_epoch_are_refused(metrics):
    source, target = fitted(with_metrics([["mae"], ["mse"]])), fitted(with_metrics(metrics))
    with pytest.raises(UserError, match=r"the checkpoint does not fit the metrics: metrics/compiled/dense/\d/m"):
        state.restore(target, gather(source), ("metrics",))


def test_loss_scaling_comes_and_goes():
    """A run in float16 resumes in float32, and the other way round."""
    plain, scaled = trained(), trained(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    groups = ("model", "optimizer", "loss_scale")
    state.restore(plain, gather(scaled), groups)
    state.restore(scaled, gather(plain), groups)


@pytest.mark.parametrize("other", [{"units": 5}, {"optimizer": "sgd"}])
def test_other_variables_are_refused(other):
    with pytest.raises(UserError, match="the checkpoint does not fit the (model|optimizer)"):
        state.restore(trained(**other), gather(trained()), ("model", "optimizer"))


def identity(model=None, *, config=None, batch_size=8, shift=0.0):
    x = np.arange(60, dtype="float32").reshape(20, 3) + shift
    source = ArraySource(x, x[:, :1], None)
    order = Order(num_samples=20, batch_size=batch_size, seed=0)
    return state.identity(config or Config(), model or build(), SampleReader(source, order, Split(1)), None)


def test_the_same_run_is_the_same():
    saved = json.loads(json.dumps(identity()))
    state.check_identity(saved, identity())
    state.check_identity(saved, identity(config=Config(backend="jax", num_devices=4, max_steps=99)))


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
    with pytest.raises(UserError, match=f"differs from the run in the workdir in {name}: expected"):
        state.check_identity(identity(), other())


def model_of_lambdas(source, line, name):
    function = eval(compile("\n" * line + source, name, "eval"))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(function), keras.layers.Dense(1, function)])
    model.compile("sgd", "mse")
    return model


def test_a_lambda_is_the_same_wherever_it_stands(monkeypatch):
    monkeypatch.setattr("inspect.getsource", lambda thing: "")  # which Keras shows in a warning
    source = "lambda x: keras.ops.relu(x) * max(y for y in (1, 2))"
    assert identity(model_of_lambdas(source, 0, "a.py")) == identity(model_of_lambdas(source, 5, "b/a.py"))


class Counting(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.limit, self.count, self.seen, self.arrays, self.function = 3, 0, {}, [], print


def test_callbacks_keep_what_changed():
    first, second = Counting(), Counting()
    begin = [state.plain_attributes(callback) for callback in (first, second)]
    second.count, second.seen, second.arrays = 5, {"best": np.float32(0.5)}, [np.arange(3.0)]
    arrays = {}
    states = json.loads(json.dumps(state.callback_states([first, second], begin, arrays, build())))
    assert states.keys() == {"Counting/1"}
    restored = [Counting(), Counting()]
    restored[1].limit = 4  # the user thought better of it
    state.restore_callbacks(restored, states, arrays, build())
    assert vars(restored[0]) == vars(Counting())
    assert (restored[1].limit, restored[1].count, restored[1].seen) == (4, 5, {"best": 0.5})
    np.testing.assert_array_equal(restored[1].arrays[0], np.arange(3.0))


class Collecting(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs, self.nested, self.best, self.places = {}, {}, {}, {}
        self.pair, self.seen, self.lists = None, set(), collections.defaultdict(list)


def test_callbacks_get_collections_as_they_were():
    """Those of Python's own classes: of others, which need more than their items, a line says that they are lost."""
    callback, model, arrays = Collecting(), build(), {}
    begin, before = [state.plain_attributes(callback)], state.unsaved_attributes(callback)
    callback.epochs = {1: 1.0, "1": 2.0, (1, None): {"array": 3}, "items": {"kind": "dict", "items": []}}
    callback.nested = {"a": {"b": np.zeros(2)}, "a/b": np.ones(2), 0: [np.ones(1)]}
    callback.best = {"weights": model.get_weights()}
    callback.places = {"weights": [1, 2]}
    callback.pair = (1, [2, (3,)])
    callback.seen |= {1, "a"}
    callback.lists["x"].append(1)
    states = json.loads(json.dumps(state.callback_states([callback], begin, arrays, model)))
    assert state.unsaved_attributes(callback).keys() == before.keys() == {"lists"}
    assert state.unsaved_attributes(callback) != before
    restored = Collecting()
    state.restore_callbacks([restored], states, arrays, model)
    expected, received = vars(callback), vars(restored)
    assert expected.pop("lists") != received.pop("lists")
    assert received.keys() == expected.keys()
    for name, value in expected.items():
        assert type(received[name]) is type(value)
        assert list(map(type, received[name] or [])) == list(map(type, value or [])), name
        np.testing.assert_equal(received[name], value)
