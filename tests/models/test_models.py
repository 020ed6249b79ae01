"""The kit's models: their shapes, their sizes, what their first layer does."""

import keras
import numpy as np
import pytest

from kerasdp.errors import UserError
from kerasdp.models import build_model, make_optimizer

MODELS = ("mlp", "lenet", "convnet", "resnet18", "resnet50")


def test_the_toy():
    model = build_model("mlp", (10,), 5)
    assert model.count_params() == 10 * 10 + 10 + 10 * 5 + 5


@pytest.mark.short("mlp", "lenet", "convnet", "resnet18")
@pytest.mark.parametrize("name", MODELS)
def test_images_are_scaled_inside(name):
    model = build_model(name, (32, 32, 3), 4)
    scaling = model.get_layer("rescaling")
    assert float(np.asarray(scaling(np.array([255.0], "float32")))[0]) == pytest.approx(1.0)
    assert model.layers[1] is scaling


@pytest.mark.parametrize("name", MODELS)
def test_kernel_initializer_reaches_every_kernel(name):
    for layer in build_model(f"{name}(kernel_initializer='random_normal(stddev=0.25)')", (32, 32, 3), 4).layers:
        if hasattr(layer, "kernel_initializer"):
            assert isinstance(layer.kernel_initializer, keras.initializers.RandomNormal)
            assert layer.kernel_initializer.stddev == 0.25


def test_models_of_the_user(tmp_path):
    file = tmp_path / "own_model.py"
    file.write_text(
        "def build(input_shape, num_classes, width=3):\n"
        "    import keras\n"
        "    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(width), "
        "keras.layers.Dense(num_classes)])\n"
        "def none(input_shape, num_classes):\n    pass\n"
        "def narrow(input_shape):\n    pass\n"
    )
    model = build_model(f"{file}:build(width=7)", (4,), 2)
    assert (model.layers[0].units, model.output_shape) == (7, (None, 2))
    for name, words in [
        ("none", "to return a Keras model. Received: NoneType"),
        ("narrow", "cannot be called with input_shape, num_classes"),
    ]:
        with pytest.raises(UserError, match=words):
            build_model(f"{file}:{name}", (4,), 2)
    with pytest.raises(UserError, match="cannot be called with kernel_initializer"):
        build_model(f"{file}:build(kernel_initializer='he_normal')", (4,), 2)


@pytest.mark.parametrize("text", ["nosuch", "random_normal(width=3)"])
def test_unknown_initializers(text):
    with pytest.raises(UserError, match="--model: lenet cannot be built for inputs of shape"):
        build_model(f"lenet(kernel_initializer={text!r})", (28, 28, 1), 10)


def test_optimizers():
    optimizer = make_optimizer("sgd(momentum=0.9)", 0.1)
    assert isinstance(optimizer, keras.optimizers.SGD)
    assert optimizer.momentum == 0.9
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    assert float(make_optimizer("AdamW(weight_decay=0.1)").learning_rate) == pytest.approx(0.001)
    assert float(make_optimizer("adam(learning_rate=0.5)").learning_rate) == pytest.approx(0.5)
    for text, words in [("sgdd", "expected one of .*sgd. Received: 'sgdd'"), ("adam(foo=1)", "does not take these")]:
        with pytest.raises(UserError, match=words):
            make_optimizer(text)
