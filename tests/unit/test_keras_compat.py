"""Each private name of Keras that the kit uses: a new Keras says here, in one run, which of them are gone."""

import concurrent.futures
import inspect
import pathlib

import keras
import numpy as np
import pytest

from kerasdp.keras_compat.graph_ends import calls_own_graph, last_activation, output_symbols
from kerasdp.keras_compat.layers import added_losses, hook_add_loss, is_of_keras, living_variables, weight_penalties
from kerasdp.keras_compat.models import (
    as_functional,
    building_nothing,
    calls,
    compiled_metrics,
    inputs_structure,
    loss_options,
    methods_through,
    output_losses,
    outputs_structure,
)
from kerasdp.keras_compat.optimizers import (
    copy_decay_exclusions,
    slots_by_weight,
    slots_of,
    weights_unknown_to,
    weights_without_decay,
)
from kerasdp.keras_compat.own_steps import losses_by_thread
from kerasdp.keras_compat.tracking import parts_of
from kerasdp.portability.added_losses import take_added_loss

SOURCE = pathlib.Path(inspect.getfile(keras)).parent / "src"


@pytest.fixture(scope="module")
def model():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(3, kernel_regularizer="l2")(inputs))
    model = keras.Model({"x": inputs}, [keras.layers.Dense(2)(hidden)])
    model.compile("adamw", loss="mse", metrics=["mae"])
    model.fit({"x": np.zeros((4, 4), "float32")}, np.zeros((4, 2), "float32"), verbose=0)
    return model


OF_MODELS = (
    "_flatten_layers", "_trainable_variables", "_non_trainable_variables", "_seed_generators", "_get_own_losses",
    "_nodes_by_depth", "_inputs_struct", "_outputs_struct", "_symbolic_build", "_compile_loss", "_compile_metrics",
    "_loss_tracker", "_compile_config", "call_signature_parameters", "_layers", "_metrics", "_operations",
    "_convert_input_args",
)  # fmt: skip
OF_OPTIMIZERS = (
    "_learning_rate", "_var_key", "_use_weight_decay", "_trainable_variables", "_trainable_variables_indices",
    "_backend_update_step", "_all_reduce_sum_gradients", "weight_decay", "global_clipnorm",
)  # fmt: skip


@pytest.mark.parametrize("name", OF_MODELS)
def test_models_have(model, name):
    assert hasattr(model, name)


@pytest.mark.parametrize("name", OF_OPTIMIZERS)
def test_optimizers_have(model, name):
    if name == "_all_reduce_sum_gradients":  # on TensorFlow alone
        assert f"def {name}(" in (SOURCE / "backend/tensorflow/optimizer.py").read_text()
    else:
        assert hasattr(model.optimizer, name)


@pytest.mark.parametrize(
    "name",
    [
        "_common_apply", "_stateful_handle_finite_grads", "_stateful_handle_non_finite_grads", "step_counter",
        "dynamic_scale", "_overwrite_variable_with_gradient",
    ],
)  # fmt: skip
def test_optimizers_that_scale_the_loss_have(model, name):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.build(model.trainable_variables)
    assert hasattr(optimizer, name)


@pytest.mark.parametrize("name", ["_exclude_from_weight_decay", "_exclude_from_weight_decay_cache"])
def test_optimizers_remember_what_does_not_decay(model, name):
    optimizer = keras.optimizers.AdamW()
    optimizer.build(model.trainable_variables)
    optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:1])
    other = keras.optimizers.AdamW()
    copy_decay_exclusions(optimizer, other)
    assert hasattr(other, name)
    assert weights_without_decay(optimizer, model.trainable_variables) == model.trainable_variables[:1]


def test_metrics_of_compile(model):
    assert {"_flat_metrics", "_flat_weighted_metrics", "built"} <= vars(model._compile_metrics).keys()
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


def test_what_a_layer_holds(model):
    parts = parts_of(model)
    assert [type(layer).__name__ for layer in parts.in_order] == ["InputLayer", "Dense", "Dropout", "Dense"]
    assert parts.other_layers == parts.metrics == parts.variables == []
    dense, dropout = parts.in_order[1], parts_of(parts.in_order[2])
    found = parts_of(dense)
    assert [found.attributes[id(variable)].lstrip("_") for variable, _ in found.variables] == ["kernel", "bias"]
    assert [dropout.attributes[id(holder)] for _, holder in dropout.variables] == ["seed_generator"]


@pytest.mark.parametrize("name", ["operation", "arguments", "input_tensors", "outputs", "is_input"])
def test_nodes_of_a_graph_have(model, name):
    nodes = calls(model)
    assert len(nodes) == 3
    assert all(hasattr(node, name) for node in nodes)


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
        (
            [keras.layers.Dense(4, name="a"), keras.layers.Activation("linear"), keras.layers.Reshape((2, 2))],
            ("a", "linear"),
        ),
        ([keras.Sequential([keras.layers.Dense(4, "softmax", name="a")])], ("a", "softmax")),
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


def test_added_losses():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    layer(np.ones((2, 3), "float32"))
    assert len(added_losses(layer)) == 1


def test_hook_of_add_loss():
    taken, layer = [], keras.layers.Layer()
    hook_add_loss(take_added_loss)
    hook_add_loss(lambda *given: taken.append(given))  # once for good
    layer.add_loss(keras.ops.ones(()))
    assert not taken
    assert len(added_losses(layer)) == 1


def test_losses_by_thread():
    layer = keras.layers.Layer()
    with losses_by_thread([layer]):
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(layer.add_loss, keras.ops.ones(())).result()
        assert layer.losses == []
        layer.add_loss(keras.ops.ones(()))
        assert len(layer.losses) == 1
    assert layer.losses == []


def test_methods_are_replaced_for_all_models_and_put_back(model):
    own = keras.Model.evaluate
    with methods_through({"evaluate": lambda original: lambda model: (model, original)}):
        assert model.evaluate() == (model, own)
    assert keras.Model.evaluate is own
    assert "evaluate" not in vars(keras.Model)


def test_weights_unknown_to_an_optimizer(model):
    other = keras.Variable(np.ones(3, "float32"))
    assert weights_unknown_to(model.optimizer, [*model.trainable_variables, other]) == [other]


def test_living_variables():
    variable = keras.Variable(np.ones(3, "float32"))
    assert any(each is variable for each in living_variables())


def test_building_nothing(model):
    unused = keras.layers.Dense(3)
    model.unused = unused
    with building_nothing(model):
        assert unused.built
    assert not unused.built
    del model.unused


def test_building_nothing_takes_no_batch(model, monkeypatch):
    """Keras' `fit` under MirroredStrategy builds by the first batch of its data, whatever is built already."""
    batches = iter([1, 2])
    monkeypatch.setattr(keras.Model, "_maybe_symbolic_build", lambda model, data: next(data), raising=False)
    with building_nothing(model):
        model._maybe_symbolic_build(batches)
    assert model._maybe_symbolic_build(batches) == 1
