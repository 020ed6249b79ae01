"""What the kit reads of Keras by private names: a new Keras says here what is gone, or has another meaning."""

import concurrent.futures

import keras
import numpy as np
import pytest

from kerasdp.keras_compat.layers import (
    all_layers,
    has_seed_generators,
    is_of_keras,
    living_variables,
    mask_of,
    seed_variables,
    set_mask,
    weight_penalties,
    with_mask,
)
from kerasdp.keras_compat.models import (
    as_functional,
    calls,
    calls_own_graph,
    compiled_metrics,
    inputs_structure,
    last_activation,
    loss_options,
    losses_by_thread,
    output_losses,
    output_symbols,
    outputs_structure,
)
from kerasdp.keras_compat.optimizers import (
    slots_by_weight,
    slots_of,
    weights_unknown_to,
)
from kerasdp.keras_compat.random import is_in_layer_call
from kerasdp.keras_compat.settings import kept_by_clear_session


@pytest.fixture(scope="module")
def model():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(3, kernel_regularizer="l2")(inputs))
    model = keras.Model({"x": inputs}, [keras.layers.Dense(2)(hidden)])
    model.compile("adamw", loss="mse", metrics=["mae"])
    model.fit({"x": np.zeros((4, 4), "float32")}, np.zeros((4, 2), "float32"), verbose=0)
    return model


def test_metrics_of_compile(model):
    ((name, metric),) = compiled_metrics(model)
    assert (name, metric.name) == ("mae", "mae")


def test_slots(model):
    slots = slots_of(model.optimizer, len(model.trainable_variables))
    assert {name for name, _ in slots} == {"_momentums", "_velocities"}
    assert len(slots) == 2 * len(model.trainable_variables)


def test_slots_and_their_weights(model):
    """Also those that a user-defined optimizer keeps elsewhere than in a list."""

    class Own(keras.optimizers.Adam):
        def build(self, variables):
            super().build(variables)
            self.own = {variable.path: self.add_variable_from_reference(variable, "own") for variable in variables}

    optimizer = Own()
    optimizer.build(model.trainable_variables)
    found = slots_by_weight(optimizer)
    assert {kind for kind, _ in found.values()} == {"momentums", "velocities", "own"}
    for weight in model.trainable_variables:
        assert found[id(optimizer.own[weight.path])] == ("own", weight)
        assert sum(of is weight for _, of in found.values()) == 3


def test_calls_of_a_graph_give_what_the_model_gives(model):
    (inputs,) = keras.tree.flatten(inputs_structure(model))
    (outputs,) = outputs_structure(model)
    known = {id(inputs): np.ones((2, 4), "float32")}
    for node in calls(model):
        args, kwargs = node.arguments.fill_in({id(each): known[id(each)] for each in node.input_tensors})
        for symbol, tensor in zip(node.outputs, keras.tree.flatten(node.operation(*args, **kwargs)), strict=True):
            known[id(symbol)] = tensor
    expected, received = (
        keras.ops.convert_to_numpy(keras.ops.stop_gradient(each))
        for each in (*keras.tree.flatten(model({"x": np.ones((2, 4), "float32")})), known[id(outputs)])
    )
    np.testing.assert_allclose(received, expected, rtol=1e-6)


def test_layers_and_their_seeds(model):
    assert all_layers(model) == [model, *model.layers] and all_layers(model, include_self=False) == model.layers
    assert [has_seed_generators(layer) for layer in model.layers] == [False, False, True, False]
    assert seed_variables(model) == [model.layers[2].seed_generator.state]


def test_structures(model):
    assert inputs_structure(model).keys() == {"x"}
    assert len(outputs_structure(model)) == 1


def test_functional_within_sequential(model):
    assert as_functional(model) is model
    assert as_functional(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])) is not None
    assert as_functional(type("Own", (keras.Model,), {})()) is None


def test_what_a_model_says_of_its_outputs(model):
    class Own(keras.Model):
        def call(self, inputs):
            return keras.ops.concatenate([inputs, inputs], axis=-1)

    assert calls_own_graph(model)
    assert calls_own_graph(keras.Sequential())
    assert not calls_own_graph(Own())
    symbols = keras.KerasTensor((6, 4))
    assert output_symbols(Own(), symbols).shape == (6, 8)
    assert output_symbols(type("No", (keras.Model,), {})(), symbols) is None
    unbuilt = keras.Sequential([keras.layers.Dense(2, "softmax", name="last")])
    found = output_symbols(unbuilt, symbols)
    assert found.shape[1:] == (2,)
    assert last_activation(found) == ("last", "softmax")


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([keras.layers.Dense(4, "sigmoid", name="a")], ("a", "sigmoid")),
        ([keras.layers.Dense(4, name="a"), keras.layers.Softmax(name="b")], ("b", "softmax")),
        ([keras.layers.Dense(4, name="a"), keras.layers.Activation("softmax", name="b")], ("b", "softmax")),
        ([keras.layers.Dense(4, name="a")], ("a", "linear")),
        ([keras.layers.Dropout(0.5, name="a")], ("a", None)),
    ],
)
def test_the_activation_behind_an_output(layers, expected):
    symbol = keras.Input((3,))
    for layer in layers:
        symbol = layer(symbol)
    assert last_activation(symbol) == expected
    assert last_activation(keras.KerasTensor((2, 3))) == ("", None)


def test_losses_of_outputs(model):
    (loss,) = output_losses(model)
    assert loss.fn is keras.losses.mean_squared_error
    assert is_of_keras(type(loss))
    assert loss_options(keras.losses.SparseCategoricalCrossentropy(axis=1))["axis"] == 1


def test_penalties_of_weights_are_those_of_keras(model):
    (own,), (expected,) = weight_penalties(model), model._get_regularization_losses()
    assert float(own) == float(expected) > 0


def test_losses_by_thread():
    layer = keras.layers.Layer()
    with losses_by_thread([layer]):
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(layer.add_loss, keras.ops.ones(())).result()
        assert layer.losses == []
        layer.add_loss(keras.ops.ones(()))
        assert len(layer.losses) == 1
    assert layer.losses == []


def test_weights_unknown_to_an_optimizer(model):
    other = keras.Variable(np.ones(3, "float32"))
    assert weights_unknown_to(model.optimizer, [*model.trainable_variables, other]) == [other]


def test_living_variables():
    variable = keras.Variable(np.ones(3, "float32"))
    assert any(each is variable for each in living_variables())


def test_masks_go_where_their_tensors_go():
    tensor, mask = keras.ops.ones((4, 2)), keras.ops.convert_to_tensor([True, False, True, True])
    assert mask_of(with_mask(lambda rows: rows[:3], tensor)) is None
    first = with_mask(lambda rows: rows[:3], set_mask(tensor, mask))
    assert keras.ops.convert_to_numpy(mask_of(first)).tolist() == [True, False, True]


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
