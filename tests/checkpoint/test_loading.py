"""A trained model is loaded from whatever holds it, or a line says what is missing."""

import keras
import numpy as np
import pytest

import kerasdp
from kerasdp.checkpoint import files
from kerasdp.checkpoint.state import architecture_of, build_architecture
from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.models import build_model
from tests.checkpoint.test_state import gather

IMAGES = np.random.RandomState(0).randint(0, 256, (3, 28, 28, 1)).astype("uint8")


class Subclassed(keras.Model):
    """A model that no description holds."""

    def __init__(self, num_classes):
        super().__init__()
        self.flatten, self.dense = keras.layers.Flatten(), keras.layers.Dense(num_classes)

    def call(self, x):
        return self.dense(self.flatten(x))


def saved(trained, folder, step=1, architecture=None, **config):
    """Writes what a run of the model would leave, with the right checksum, as anybody can."""
    described = architecture_of(trained) if architecture is None else architecture or None
    state = {"step": step, "config": Config().as_dict() | config, "architecture": described}
    path = files.path_of(str(folder / "checkpoints"), step)
    files.save(path, files.Checkpoint(arrays=gather(trained, ("model",)), state=state))
    return path


def assert_alike(model, other):
    np.testing.assert_allclose(model.predict(IMAGES, verbose=0), other.predict(IMAGES, verbose=0), atol=1e-6)


@pytest.mark.short("convnet")
@pytest.mark.parametrize("name", ["lenet", "convnet"])
def test_a_checkpoint_holds_its_model(name, tmp_path):
    model = build_model(name, (28, 28, 1), 10)
    path = saved(model, tmp_path, step=7, model="mlp")  # what the flags said does not matter
    saved(build_model(name, (28, 28, 1), 10), tmp_path, step=5)
    for place in (path, str(tmp_path), tmp_path / "checkpoints"):  # of a folder the newest
        assert_alike(kerasdp.load_model(place), model)
    other = build_model(name, (28, 28, 1), 10)
    assert kerasdp.load_model(path, other) is other
    assert_alike(other, model)


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_a_file_of_keras(ending, tmp_path):
    model, path = build_model("lenet", (28, 28, 1), 10), str(tmp_path / f"model{ending}")
    kerasdp.export(model, path)
    other = build_model("lenet", (28, 28, 1), 10)
    assert kerasdp.load_model(path, other) is other
    assert_alike(other, model)
    if ending == ".keras":
        assert_alike(kerasdp.load_model(path), model)
    else:
        with pytest.raises(UserError, match="has only weights; build the model, and pass it"):
            kerasdp.load_model(path)
    with pytest.raises(UserError, match="load_model: the model in .* cannot be loaded .*; pass the model that was"):
        kerasdp.load_model(path, build_model("convnet", (28, 28, 1), 10))


def test_a_model_that_is_no_graph_is_given(tmp_path):
    model, other = Subclassed(10), Subclassed(10)
    model(IMAGES)
    path = saved(model, tmp_path)
    with pytest.raises(UserError, match="contains weights, but no layers; build the model, and pass it"):
        kerasdp.load_model(path)
    with pytest.raises(UserError, match="expected a built model; call subclassed"):
        kerasdp.load_model(path, other)
    other(IMAGES)
    assert_alike(kerasdp.load_model(path, other), model)
    wrong = Subclassed(7)
    wrong(IMAGES)
    with pytest.raises(UserError, match="the checkpoint does not fit the model: .*; build the model, and pass"):
        kerasdp.load_model(path, wrong)


def test_layers_take_the_precision_of_the_run_that_uses_them():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        described = architecture_of(build_model("lenet", (28, 28, 1), 10))
    finally:
        keras.config.set_dtype_policy(before)
    assert {layer.compute_dtype for layer in build_architecture(described).layers} == {before.compute_dtype}


def test_files_that_hold_no_model(tmp_path):
    (tmp_path / "text.keras").write_text("no model")
    (tmp_path / "text.safetensors").write_text("no checkpoint")
    (tmp_path / "text.txt").write_text("nothing")
    (tmp_path / "empty").mkdir()
    model = build_model("lenet", (28, 28, 1), 10)
    saved(model, tmp_path / "part", checkpoint_weights="trained")
    for name, words in [
        ("nowhere", "load_model: there is no file or folder"),
        ("nowhere.keras", "load_model: there is no file or folder"),
        ("text.keras", "load_model: the model in .*text.keras cannot be loaded"),
        ("text.safetensors", "load_model: .* is corrupt or truncated"),
        ("text.txt", "load_model: .*Not a directory"),
        ("empty", "load_model: there are no checkpoints in .*empty"),
        ("part", "has no frozen weights, because its run used .*resume that run, .*export"),
    ]:
        for given in ((), (model,)):
            with pytest.raises(UserError, match=words) as caught:
                kerasdp.load_model(str(tmp_path / name), *given)
            assert "\n" not in str(caught.value)
