"""What each change of Keras is for: without it and with it the outcome differs, and afterwards Keras is as before.

A new Keras says here, in one run, which of them have lost their effect, and which are needed no more.
"""

import concurrent.futures
import itertools
import sys
import types

import keras
import numpy as np
import pytest
from keras.src.utils import module_utils

from kerasdp.errors import RunError, UserError
from kerasdp.keras_compat import (
    images,
    layers,
    models,
    numerics,
    operations,
    optimizers,
    patches,
    settings,
)
from kerasdp.keras_compat.patches import replaced
from kerasdp.same.layer_calls import hook_layers
from tests.helpers import PROGRAMS, result_of, run
from tests.programs import keras_patches

ON_TORCH = pytest.mark.skipif("keras.backend.backend() != 'torch'", reason="a patch of Keras' torch backend")
ONES = np.ones((2, 3), "float32")


@pytest.fixture(autouse=True)
def alone():
    """Keras imports TensorFlow to serialize anything: seconds, and two LLVMs."""
    with settings.without_tensorflow():
        yield


def dense(units=2, **options):
    """A model of one layer whose weights are ones."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, kernel_initializer="ones", **options)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    return model


def array(tensor):
    return keras.ops.convert_to_numpy(keras.ops.stop_gradient(keras.ops.convert_to_tensor(tensor)))


@pytest.mark.parametrize(
    ("equation", "number"),
    [
        ("abc,cd->abd", 1), ("abc,cde->abde", 1), ("abcd,cde->abe", 2), ("...x,xy->...y", 1), ("ab,bc->ac", 1),
        ("abc,cde->adbe", 0), ("abc,dce->abde", 0), ("abcd,abde->abce", 0), ("abcd,dce->abe", 0), ("abc,cd->ab", 0),
        ("aab,bc->aac", 0), ("a,a->", 0), ("a,b->ab", 0), ("abc->cba", 0), ("ab,b...->a...", 0), ("ab,bc", 0),
    ],
)  # fmt: skip
def test_einsums_that_are_one_product(equation, number):
    assert numerics._contracted(equation) == number
    if number:
        sizes = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 6, "x": 7, "y": 8}
        terms = equation.replace("...", "ab").split("->")[0].split(",")
        shapes = [[sizes[letter] for letter in term] for term in terms]
        given = [np.random.RandomState(0).randn(*shape) for shape in shapes]
        received = numerics._as_one_product(None, equation, *given)
        np.testing.assert_allclose(array(received), np.einsum(equation, *given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"use_bias": False, "go_backwards": True, "return_sequences": False}])
def test_an_lstm_multiplies_its_inputs_first(monkeypatch, arguments, has_mask):
    layer = keras.layers.LSTM(3, **({"return_sequences": True, "use_cudnn": False} | arguments))
    x = np.random.RandomState(0).rand(2, 4, 5).astype("float32")
    mask = np.arange(4) < np.array([[4], [2]]) if has_mask else None
    expected = array(layer(x, mask=mask))
    # Without Keras' own loop to fall back to.
    monkeypatch.setattr(
        keras.layers.RNN, "inner_loop", lambda *given, **more: numerics._inputs_first(None, *given, **more)
    )
    np.testing.assert_allclose(array(layer(x, mask=mask)), expected, rtol=1e-5, atol=1e-6)


@ON_TORCH
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4, 5, 6), {"groups": 3}), ((2, 6, 5), {"groups": 2, "axis": 1}), ((2, 4, 3, 4, 6), {"groups": -1}),
        ((1, 1, 1, 4), {"groups": -1}),
        ((2, 4, 6), {"groups": 6, "scale": False}), ((2, 4, 6), {"groups": 1, "center": False, "dtype": "float16"}),
    ],
)  # fmt: skip
def test_group_normalization_by_pytorch(shape, options):
    layer = keras.layers.GroupNormalization(**options)
    x = np.random.RandomState(0).rand(*shape).astype(options.get("dtype", "float32"))
    layer.build(shape)
    layer.set_weights([np.random.RandomState(1).rand(*weight.shape) for weight in layer.weights])
    expected = layer(x)
    received = numerics._by_groups(None, layer, keras.ops.convert_to_tensor(x))
    assert received.dtype == expected.dtype
    np.testing.assert_allclose(array(received), array(expected), rtol=1e-5, atol=2e-3 if "dtype" in options else 1e-5)


@ON_TORCH
@pytest.mark.parametrize("widths", [2, (2,), ((1, 0), (3, 2)), ((1, 1), (1, 1))])
@pytest.mark.parametrize("mode", ["symmetric", "constant"])
@pytest.mark.parametrize("kind", ["float32", "int32", "uint8"])
def test_padding_as_numpy(widths, mode, kind):
    x = np.arange(6).reshape(2, 3).astype(kind)
    with numerics.same_on_all_backends():
        received = keras.ops.pad(x, widths, mode=mode)
    np.testing.assert_array_equal(array(received), np.pad(x, widths, mode=mode))


@pytest.mark.parametrize("mode", ["constant", "nearest", "reflect", "wrap"])
@pytest.mark.parametrize("kind", ["bilinear", "nearest"])
def test_images_are_moved_as_on_torch_and_jax(mode, kind):
    """By what tensorflow calls; on tensorflow itself, Keras' "wrap" is another."""
    if keras.backend.backend() == "tensorflow" and mode == "wrap":
        pytest.skip("compared on torch and jax")
    numbers = np.random.RandomState(0)
    x, moves = numbers.rand(3, 5, 7, 2), [[0.83, 0.31, 1.37, -0.41, 1.13, -2.47, 0, 0], [1, 0, -9.2, 0, 1, 6.3, 0, 0]]
    moves = np.array([*moves, [1, 0, 0, 0, 1, 0, 0, 0]])
    nearly = 1e-12 if keras.backend.backend() == "torch" else 1e-5
    for given, layout in ((x, "channels_last"), (np.moveaxis(x, -1, 1), "channels_first")):
        options = {"interpolation": kind, "fill_mode": mode, "fill_value": 0.5, "data_format": layout}
        expected = array(keras.ops.image.affine_transform(given, np.array(moves), **options))
        received = array(images.affine(None, given, moves, **options))
        np.testing.assert_allclose(received, expected, rtol=0, atol=nearly)


@pytest.mark.parametrize("kind", ["bilinear", "nearest"])
def test_images_are_seen_from_another_side_as_on_torch(kind):
    numbers = np.random.RandomState(0)
    x, points = numbers.rand(3, 5, 7, 2), np.array([[[0.0, 0], [6, 0], [0, 4], [6, 4]]] * 3)
    for one, layout in ((x, "channels_last"), (np.moveaxis(x, -1, 1), "channels_first")):
        tensors = map(keras.ops.convert_to_tensor, (one, points, points + numbers.uniform(-0.9, 0.9, points.shape)))
        given = *tensors, kind, 0.5, layout
        expected, received = (
            array(keras.ops.image.perspective_transform(*given)),
            array(images.perspective(None, *given)),
        )
        nearly = 1e-12 if keras.backend.backend() == "torch" else 1e-5
        np.testing.assert_allclose(received, expected, rtol=0, atol=nearly)


@ON_TORCH
@pytest.mark.parametrize("shape, size", [((8, 8), (5, 7)), ((8, 6), (5, 11)), ((6, 9), (13, 5))])
def test_images_are_resized_in_float64(shape, size):
    """As Keras does on torch."""
    x = np.random.RandomState(0).rand(2, *shape, 3)
    settings.set_precision("float64")
    try:
        ratios = {}, {"crop_to_aspect_ratio": True}, {"pad_to_aspect_ratio": True, "fill_value": 0.5}
        layouts = (x, "channels_last"), (np.moveaxis(x, -1, 1), "channels_first")
        for ratio, (one, layout), antialias in itertools.product(ratios, layouts, (False, True)):
            given = keras.ops.convert_to_tensor(one), size, "bilinear", antialias
            expected = array(keras.ops.image.resize(*given, data_format=layout, **ratio))
            received = array(images.resize(None, *given, data_format=layout, **ratio))
            np.testing.assert_allclose(received, expected, rtol=0, atol=1e-12)
    finally:
        settings.set_precision("float32")


def test_operations_that_layers_call_past_keras_ops_are_told():
    told = []
    layer, x = keras.layers.RandomRotation(0.2), np.random.RandomState(0).rand(2, 5, 5, 1)
    with operations.telling(told.append):
        layer(x, training=True)
    assert "affine_transform" in [call.name for call in told]


def test_predicting_with_averages_swaps_back():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9), "mse")
    x = np.ones((4, 4))
    model.fit(x, x[:, :1], verbose=0)
    model.optimizer._model_variables_moving_average[0].assign(np.full((4, 1), 7.0))
    before = model.get_weights()
    with numerics.same_on_all_backends():
        outputs = model.predict(x, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])
    np.testing.assert_allclose(model.get_weights()[0], before[0], rtol=1e-6)
    assert outputs.mean() > 20


@ON_TORCH
def test_whole_numbers_are_resized_cubically_as_others():
    x = np.random.RandomState(0).randint(0, 256, (1, 5, 6, 3)).astype("uint8")
    with numerics.same_on_all_backends():
        whole, exact = (keras.ops.image.resize(each, (9, 7), "bicubic") for each in (x, x.astype("float32")))
    np.testing.assert_array_equal(array(whole), np.clip(np.round(array(exact)), 0, 255).astype("uint8"))


def test_patches_of_a_backend(backend):
    """Functions that differ between backends; what is for JAX and TensorFlow alone."""
    if backend == keras.backend.backend() == "torch":  # here TensorFlow would have to divide the CPU first
        found = keras_patches.outcomes()
    else:
        found = result_of(run(PROGRAMS / "keras_patches.py", backend=backend, KERAS_BACKEND=backend))
    assert len(found) >= {"torch": 9, "jax": 9, "tensorflow": 18}[backend]
    for name, (without, patched, right) in found.items():
        np.testing.assert_allclose(patched, right, rtol=1e-14, err_msg=name)
        assert isinstance(without, str) or np.abs(np.subtract(without, right)).max() > 1e-12, name


class Plain:
    kept = 1


def test_what_is_replaced_comes_back():
    one = Plain()
    one.own = 1
    with replaced(one, own=2, kept=3, new=4):
        assert (one.own, one.kept, one.new) == (2, 3, 4)
    assert vars(one) == {"own": 1}
    with replaced(Plain, kept=2), pytest.raises(KeyError), replaced(Plain, kept=3):
        assert one.kept == 3
        raise KeyError
    assert Plain.kept == 1 and one.kept == 1


def test_what_is_wrapped_for_good_is_wrapped_once():
    own = types.SimpleNamespace(double=lambda x: 2 * x)
    for _ in range(2):
        patches.wrap_for_good(own, "double", lambda function, x: 1 + function(x))
    assert own.double(3) == 7 and patches.original(own.double)(3) == 6
    again = patches.standing_for(own.double, lambda x: 0)
    assert patches.original(again)(3) == 6


# Layers


def test_hook_of_calls():
    """It gets the arguments as the layer does, and sees what the layer gives before a regularizer does."""
    hook_layers()
    layers.hook_calls(lambda *given: pytest.fail("they are hooked once, for good"))
    model, seen = dense(activity_regularizer="l1"), []
    bound = model.layers[0]
    object.__setattr__(bound, "call", lambda inputs: inputs[:, :2] * 5)  # as users do

    def record(layer, outputs):
        seen.append((layer, array(outputs).tolist(), list(layer.losses)))

    class Doubled(keras.Operation):  # which is no layer
        def call(self, x):
            return 2 * x

    with patches.step_with(record=record):
        model(ONES)
        assert Doubled()(1) == 2
    assert [layer for layer, *_ in seen] == [bound, model]
    assert seen[0][1:] == ([[5, 5], [5, 5]], []) and len(bound.losses) == 1

    class Failing(keras.layers.Layer):
        def call(self, inputs):
            raise ValueError("no")

    with pytest.raises(ValueError, match=r"Arguments received by Failing.call\(\):\n  . inputs="):  # as Keras says it
        Failing()(ONES)
    model(ONES)
    assert len(seen) == 2


# Models


@ON_TORCH
def test_metrics_of_ranks_are_not_added_up(monkeypatch, tmp_path):
    """As Keras 3.16 does with a process group, also where there is no training: here each rank's is that of all."""
    import torch.distributed

    trainer = keras.Model.__mro__[1]

    def doubled(model):
        return {name: 2 * value for name, value in super(trainer, model).get_metrics_result().items()}

    monkeypatch.setattr(trainer, "get_metrics_result", doubled, raising=False)
    monkeypatch.setattr(trainer, "_initialize_ddp", lambda model: pytest.fail("a wrapper"), raising=False)

    class Own(keras.Sequential):
        def get_metrics_result(self):
            return super().get_metrics_result() | {"own": 1}

    model = Own([keras.Input((3,)), keras.layers.Identity()])
    model.compile("sgd", "mse", metrics=[keras.metrics.TruePositives(name="hits")])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model.test_function = lambda data: model.test_step(data[0])  # not one that Keras makes, which asks ranks itself

    def found():
        logs = model.evaluate(ONES, ONES, return_dict=True, verbose=0)
        return logs["hits"], logs["own"]

    try:
        assert found() == (12, 1)
        with models.metrics_of_ranks_as_they_are():
            assert found() == (6, 1)
            model.predict(ONES, verbose=0)
        assert found() == (12, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_a_keras_whose_functions_are_elsewhere_is_named(monkeypatch):
    """Not that of another backend, which would be changed without an effect."""
    from keras.src import backend

    other = types.SimpleNamespace(nn=types.ModuleType("keras.src.backend.numpy.nn"))
    vars(other.nn)["sparse_categorical_crossentropy"] = vars(other.nn)["categorical_crossentropy"] = None
    monkeypatch.setattr(backend, "ops", other, raising=False)
    with pytest.raises(UserError, match="expected Keras 3.15 or 3.16"), numerics.same_on_all_backends():
        pass


# Losses and metrics of `compile`, and user-defined steps


def test_optimizers_apply_once_through_loss_scaling():
    """Each of the two has an `apply`: both are exchanged."""
    weight = keras.Variable(np.zeros(2, "float32"))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1.0)
    optimizer.build([weight])
    names = []

    def noting(apply, one, *args, **kwargs):
        names.append(type(one).__name__)
        return apply(one, *args, **kwargs)

    with optimizers.wrapped_apply(noting):
        optimizer.apply([keras.ops.ones(2)], [weight])
    assert names == ["LossScaleOptimizer", "SGD"] and array(weight).tolist() == [-1, -1]


# Optimizers


@ON_TORCH
def test_numbers_are_made_on_a_gpu_for_the_thread_that_trains(monkeypatch):
    import torch

    from kerasdp.backends.torch.train_step import numbers_made_on

    filled = []
    monkeypatch.setattr(torch, "full", lambda *_, **__: filled.append(1) or torch.ones(()))
    monkeypatch.setattr(torch, "as_tensor", lambda data, dtype=None, device=None: "sent")
    with numbers_made_on(torch.device("cuda")), concurrent.futures.ThreadPoolExecutor(1) as other:
        torch.as_tensor(1.0, device="cuda")
        assert len(filled) == 1
        assert other.submit(torch.as_tensor, 1.0, device="cuda").result() == "sent"
        assert torch.as_tensor(1.0, device="cpu") == torch.as_tensor(1.0) == "sent"
    assert torch.as_tensor(1.0, device="cuda") == "sent" and len(filled) == 1


# Settings of the process


def test_errors_of_a_run_are_left_alone_in_a_call():
    class Other(Exception):
        pass

    def message(kind):
        def fail(x):
            raise kind("one line")

        with pytest.raises(kind) as caught:
            keras.layers.Lambda(fail)(ONES)
        return str(caught.value)

    settings.keep_messages_of(RunError)
    assert message(RunError) == "one line"
    assert len(message(Other)) > len("one line")


@pytest.mark.skipif("keras.backend.backend() == 'tensorflow'", reason="it is imported")
def test_tensorflow_is_not_imported_beside_another_backend(monkeypatch):
    asked = []

    class Finder:
        @staticmethod
        def find_spec(name, *_):
            if name == "tensorflow":
                asked.append(name)
                raise ImportError(name)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(module_utils.tensorflow, "_available", None)
    with settings.without_tensorflow():
        keras.utils.set_random_seed(1)
    assert not asked
    keras.utils.set_random_seed(1)
    assert asked
