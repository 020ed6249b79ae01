"""A trained model is loaded from whatever holds it, or a line says what is missing."""

import sys

import keras
import numpy as np
import pytest

from kerasdp.checkpoint import files
from kerasdp.checkpoint.state import architecture_of, build_architecture, gather
from kerasdp.config import Config, Request
from kerasdp.errors import UserError
from kerasdp.inference import load_trained
from kerasdp.models import build_model

IMAGES = np.random.RandomState(0).randint(0, 256, (3, 28, 28, 1)).astype("uint8")


def with_head(activation, units=4):
    layers = [keras.Input((3,)), keras.layers.Dense(units, activation=activation)]
    return keras.Sequential(layers)


class Subclassed(keras.Model):
    """A model that no description holds; the file that makes it has to be named."""

    def __init__(self, num_classes):
        super().__init__()
        self.flatten, self.dense = keras.layers.Flatten(), keras.layers.Dense(num_classes)

    def call(self, x):
        return self.dense(self.flatten(x))


def saved(trained, folder, step=1, **config):
    """Writes what a run of the model would leave."""
    state = {"step": step, "config": Config(**config).as_dict(), "architecture": architecture_of(trained)}
    path = files.path_of(str(folder / "checkpoints"), step)
    files.save(path, files.Checkpoint(arrays=gather(trained, ("model",)), state=state))
    return path


@pytest.mark.parametrize("name", ["lenet", "convnet"])
def test_a_checkpoint_holds_its_model(name, tmp_path):
    model = build_model(Config(model=name), (28, 28, 1), 10)
    path = saved(model, tmp_path, step=7, model="mlp")  # what the flags said does not matter
    saved(build_model(Config(model=name), (28, 28, 1), 10), tmp_path, step=5)
    expected = model.predict(IMAGES, verbose=0)
    for place in (path, str(tmp_path), str(tmp_path / "checkpoints")):  # of a folder the newest
        trained = load_trained(Request(checkpoint=place))
        np.testing.assert_allclose(trained.model.predict(IMAGES, verbose=0), expected, atol=1e-6)
        assert (trained.path, trained.dataset, trained.kind, trained.applied) == (path, "digits", "softmax", True)


def test_a_keras_file(tmp_path):
    model, path = with_head("softmax"), str(tmp_path / "model.keras")
    model.save(path)
    trained = load_trained(Request(checkpoint=path))
    assert (trained.kind, trained.applied, trained.dataset) == ("softmax", False, None)
    x = np.ones((2, 3), "float32")
    np.testing.assert_allclose(trained.model.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)


def test_a_file_of_weights(tmp_path):
    model, path = build_model(Config(model="lenet"), (28, 28, 1), 10), str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    trained = load_trained(Request(checkpoint=path, model="lenet", dataset="fashion_mnist"))
    expected = model.predict(IMAGES, verbose=0)
    np.testing.assert_allclose(trained.model.predict(IMAGES, verbose=0), expected, atol=1e-6)
    with pytest.raises(UserError, match="cannot be built|another model"):
        load_trained(Request(checkpoint=path, model="convnet", dataset="fashion_mnist"))


def test_layers_take_the_precision_of_the_run_that_uses_them():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        described = architecture_of(build_model(Config(), (28, 28, 1), 10))
    finally:
        keras.config.set_dtype_policy(before)
    assert {layer.compute_dtype for layer in build_architecture(described).layers} == {before.compute_dtype}


def test_a_model_that_is_no_graph_is_built_by_its_function(tmp_path):
    (tmp_path / "own.py").write_text(
        "import keras\n"
        "class Subclassed(keras.Model):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.flatten, self.dense = keras.layers.Flatten(), keras.layers.Dense(num_classes)\n"
        "    def call(self, x):\n"
        "        return self.dense(self.flatten(x))\n"
        "def build(input_shape, num_classes):\n"
        "    return Subclassed(num_classes)\n"
        "def another(input_shape, num_classes):\n"
        "    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(7)])\n"
    )
    model = Subclassed(10)
    expected = model.predict(IMAGES, verbose=0)
    path = saved(model, tmp_path, model=f"{tmp_path}/own.py:build")
    for own in (
        {"trust_checkpoint": True},
        {"model": f"{tmp_path}/own.py:build"},
    ):  # as the run named it, or the request
        trained = load_trained(Request(checkpoint=path, activation="none", **own))
        np.testing.assert_allclose(trained.model.predict(IMAGES, verbose=0), expected, atol=1e-6)
        assert (trained.kind, trained.applied) == ("none", False)
    with pytest.raises(UserError, match="its outputs may be logits or anything else: add --activation"):
        load_trained(Request(checkpoint=path, trust_checkpoint=True))
    with pytest.raises(
        UserError, match="the checkpoint is of another model: .*name the function that builds it: --model="
    ):
        load_trained(Request(checkpoint=path, model=f"{tmp_path}/own.py:another"))


@pytest.mark.parametrize(
    ("activation", "units", "asked", "kind", "applied"),
    [
        (None, 4, None, "softmax", True),
        (None, 4, "sigmoid", "sigmoid", True),
        (None, 4, "none", "none", False),
        (None, 1, "sigmoid", "sigmoid", True),
        ("sigmoid", 1, None, "sigmoid", False),
        ("sigmoid", 4, "none", "sigmoid", False),
    ],
)
def test_what_the_outputs_are(activation, units, asked, kind, applied, tmp_path):
    path = str(tmp_path / "model.keras")
    with_head(activation, units).save(path)
    trained = load_trained(Request(checkpoint=path, activation=asked))
    assert (trained.kind, trained.applied) == (kind, applied)


@pytest.mark.parametrize(
    ("activation", "units", "asked", "words"),
    [
        ("softmax", 4, "softmax", "--activation=softmax: the last layer of .* has a softmax already; leave it out"),
        (None, 1, None, "its outputs may be logits or anything else"),
        ("relu", 4, None, "its outputs may be logits or anything else"),
    ],
)
def test_outputs_that_have_to_be_explained(activation, units, asked, words, tmp_path):
    path = str(tmp_path / "model.keras")
    with_head(activation, units).save(path)
    with pytest.raises(UserError, match=words):
        load_trained(Request(checkpoint=path, activation=asked))


def test_files_that_hold_no_model(tmp_path):
    (tmp_path / "text.keras").write_text("no model")
    (tmp_path / "text.safetensors").write_text("no checkpoint")
    (tmp_path / "text.txt").write_text("nothing")
    (tmp_path / "empty").mkdir()
    two = keras.Model(shared := keras.Input((3,)), [keras.layers.Dense(2)(shared), keras.layers.Dense(3)(shared)])
    two.save(tmp_path / "two.keras")
    two.save_weights(tmp_path / "two.weights.h5")
    for name, words in [
        ("nowhere", "--checkpoint: there is no file or folder"),
        ("nowhere.keras", "--checkpoint: there is no file or folder"),
        ("text.keras", "--checkpoint: the model of .*text.keras cannot be built"),
        ("text.safetensors", "--checkpoint: .* is corrupt or truncated"),
        ("text.txt", "--checkpoint: expected a workdir, a folder of checkpoints, .safetensors, .keras or .weights.h5"),
        ("two.weights.h5", "two.weights.h5 has weights alone; name the function that builds it: --model="),
        ("empty", "--checkpoint: expected checkpoints in .*empty"),
        ("two.keras", "expected a model with one output. Received: 2"),
    ]:
        with pytest.raises(UserError, match=words) as caught:
            load_trained(Request(checkpoint=str(tmp_path / name)))
        assert "\n" not in str(caught.value)


def test_layers_that_are_not_known_here(tmp_path):
    x = keras.Input((3,))
    model = keras.Model(x, keras.layers.Dense(2)(keras.layers.Lambda(lambda y: 2 * y)(x)))
    path = saved(model, tmp_path)
    with pytest.raises(UserError, match="name the function that builds it: --model=FILE.py:FUNCTION"):
        load_trained(Request(checkpoint=path))


def test_layers_of_the_function_that_the_run_named(tmp_path):
    (tmp_path / "own_layers.py").write_text(
        "import keras\n"
        "class Doubled(keras.layers.Layer):\n"
        "    def call(self, x):\n"
        "        return 2 * x\n"
        "def build(input_shape, num_classes):\n"
        "    layers = [keras.Input(input_shape), Doubled(), keras.layers.Flatten(), keras.layers.Dense(num_classes)]\n"
        "    return keras.Sequential(layers)\n"
    )
    named = f"{tmp_path}/own_layers.py:build"
    model = build_model(Config(model=named), (28, 28, 1), 10)
    place = saved(model, tmp_path, model=named)
    sys.modules.pop("own_layers")  # as in another process
    with pytest.raises(UserError, match="cannot be built .*, as its run did .*own_layers.py:build.*--trust_checkpoint"):
        load_trained(Request(checkpoint=place))
    assert "own_layers" not in sys.modules
    trained = load_trained(Request(checkpoint=place, trust_checkpoint=True))
    expected = model.predict(IMAGES, verbose=0)
    np.testing.assert_allclose(trained.model.predict(IMAGES, verbose=0), expected, atol=1e-4)
    other = saved(model, tmp_path / "other", model="lenet")  # a script of its own, which is not named
    sys.modules.pop("own_layers")
    with pytest.raises(UserError, match="cannot be built .*; name the function that builds it: --model="):
        load_trained(Request(checkpoint=other))
