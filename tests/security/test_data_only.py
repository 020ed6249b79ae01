"""Files bring data, never code: a person who writes one chooses no program, and nothing beside what was asked for."""

import base64
import json
import marshal
import os
import pickle
import sys
import zipfile

import keras
import numpy as np
import pytest

import kerasdp
from kerasdp.checkpoint import files, state
from kerasdp.checkpoint.state import architecture_of, build_architecture, load_keras_file
from kerasdp.checkpoint.storage import folder_at
from kerasdp.errors import UserError
from tests.checkpoint.test_loading import saved
from tests.helpers import PROGRAMS, run

X = keras.Input((3,), name="x")
DENSE = keras.Model(X, keras.layers.Dense(2, name="dense")(X))


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """A file that an attack makes if it runs code, and a module that makes it."""
    path = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(
        "import pathlib\n"
        f"pathlib.Path({str(path)!r}).touch()\n"
        "def build(**arguments):\n    return None\n"
    )  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    assert not path.exists()
    sys.modules.pop("evil", None)


@pytest.mark.parametrize("name", ["evil:build", "{folder}/evil.py:build"])
@pytest.mark.parametrize("architecture", [{}, {"class_name": "Odd", "module": "odd", "config": {}}])
def test_a_model_that_a_checkpoint_names_is_not_built(name, architecture, ran, tmp_path):
    """Where it holds no layers, or layers that are not known."""
    path = saved(DENSE, tmp_path, architecture=architecture, model=name.format(folder=tmp_path))
    with pytest.raises(UserError, match="load_model: .*; build the model, and pass it") as caught:
        kerasdp.load_model(path)
    assert "\n" not in str(caught.value)


def marshalled(program):
    """A lambda as Keras writes one, whose call runs the program."""
    code = eval(f"lambda x: {program} or x").__code__
    return base64.b64encode(marshal.dumps(code)).decode()


def layer(name, config, module="keras.layers"):
    return {"module": module, "class_name": name, "config": {"name": "dense"} | config, "registered_name": None}


def graph(inner):
    """The layers of a model, of which one is another."""
    found = json.loads(json.dumps(architecture_of(DENSE)))
    found["config"]["layers"][1].pop("build_config")
    found["config"]["layers"][1] |= inner
    return found


def function(name, module):
    return {"module": module, "class_name": "function", "config": name, "registered_name": name}


LAMBDA, VALUE = {"code": "CODE", "defaults": None, "closure": None}, {"value": ["CODE", None, None]}
GADGETS = {
    "a lambda": layer("Lambda", {"function": {"class_name": "__lambda__", "config": LAMBDA}}),
    "a lambda as activation": layer("Dense", {"units": 3, "activation": {"class_name": "__lambda__", "config": VALUE}}),
    "a function of os": layer("Lambda", {"function": function("system", "os")}),
    "a class of subprocess": layer("Popen", {"args": ["touch", "RAN"]}, "subprocess"),
    "a module of the folder": layer("Evil", {}, "evil"),
    "an activation": layer("Dense", {"units": 3, "activation": function("system", "os")}),
    "a pickle of torch": layer("TorchModuleWrapper", {"module": "PICKLE"}),
    "a saved model": layer("TFSMLayer", {"filepath": "FOLDER"}),
    "a file of words": layer("StringLookup", {"vocabulary": "FOLDER/evil.py"}),
    "a function that writes": layer("Lambda", {"function": function("plot_model", "keras.utils")}),
    "a function that connects": layer("Lambda", {"function": function("initialize", "keras.distribution")}),
    "a function that loads": layer("Lambda", {"function": function("load_data", "keras.datasets.imdb")}),
    "a name in a name": layer("Lambda", {"function": function("utils.plot_model", "keras")}),
    "a function for a class": layer("plot_model", {}, "keras.utils"),
}


class Evil:
    """What runs when a pickle is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("allowed", [False, True], ids=["as ever", "where the script allows lambdas"])
@pytest.mark.parametrize("kind", GADGETS)
def test_layers_of_a_file_are_layers(kind, allowed, ran, tmp_path):
    """Of a checkpoint and of a .keras file; also where a script has asked Keras to trust files of its own."""
    text = json.dumps(graph(GADGETS[kind])).replace("CODE", marshalled(f"__import__('os').mkdir({str(ran)!r})"))
    text = text.replace("PICKLE", base64.b64encode(pickle.dumps(Evil(ran))).decode())
    architecture = json.loads(text.replace("FOLDER", str(tmp_path)).replace("RAN", str(ran)))
    path = str(tmp_path / "model.keras")
    DENSE.save(path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (parts | {"config.json": json.dumps(architecture)}).items():
            archive.writestr(name, content)
    before = keras.src.saving.serialization_lib.in_safe_mode()
    try:
        if allowed:
            keras.config.enable_unsafe_deserialization()
        for make in (lambda: build_architecture(architecture), lambda: load_keras_file(path)):
            with pytest.raises((ValueError, TypeError, ImportError)):
                make()
            assert not ran.exists()
        assert "evil" not in sys.modules
    finally:
        keras.src.backend.common.global_state.set_global_attribute("safe_mode_saving", before)


def test_layers_that_models_are_made_of_are_taken(tmp_path):
    assert build_architecture(graph(layer("Dense", {"units": 7}))).output_shape == (None, 7)  # what the attacks change
    inputs = keras.Input((4, 4, 3))
    x = keras.layers.Conv2D(4, 3, activation="gelu", kernel_regularizer="l2", kernel_initializer="he_normal")(inputs)
    x = keras.ops.mean(keras.layers.Activation(keras.activations.relu)(x), axis=(1, 2)) + 1.0
    x = keras.layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(2.0))(x)
    model = keras.Model(inputs, keras.layers.Dropout(0.5)(x))
    model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True), [keras.metrics.AUC()])
    model.save(tmp_path / "model.keras")
    data = np.ones((2, 4, 4, 3), "float32")
    loaded = load_keras_file(str(tmp_path / "model.keras"))
    np.testing.assert_allclose(loaded.predict(data, verbose=0), model.predict(data, verbose=0), atol=1e-6)
    assert build_architecture(architecture_of(model)).count_params() == model.count_params()


class Own(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.count, self.note, self.rule = 0, "a", len

    def ask(self):
        return self.count

    @property
    def twice(self):
        return 2 * self.count


def test_callbacks_of_a_checkpoint_get_data_alone(tmp_path):
    """No method, and none of the places to which Keras' own callbacks write."""
    own, saver = Own(), keras.callbacks.ModelCheckpoint(str(tmp_path / "own.keras"))
    logger = keras.callbacks.CSVLogger(str(tmp_path / "own.csv"))
    states = {
        "Own/0": {
            "count": 3, "note": "b", "new": [1], "ask": 7, "rule": 7, "twice": 7, "__class__": 7, "_model": 7,
        },
        "ModelCheckpoint/0": {"filepath": "/root/.ssh/authorized_keys", "best": 0.5},
        "CSVLogger/0": {"filename": "/etc/cron.d/own"},
    }  # fmt: skip
    state.restore_callbacks([own, saver, logger], states, {}, DENSE)
    assert (own.count, own.note, own.new, own.ask(), own.rule, own.twice) == (3, "b", [1], 3, len, 6)
    assert (saver.filepath, saver.best, logger.filename) == (
        str(tmp_path / "own.keras"),
        0.5,
        str(tmp_path / "own.csv"),
    )
    assert own.__class__ is Own


def test_a_resumed_run_takes_no_name_from_its_checkpoint(ran, tmp_path):
    """It trains what its own command line says."""
    settings = {"backend": "torch", "num_devices": 1, "workdir": str(tmp_path / "run"), "epochs": 1}
    first = run(PROGRAMS / "resume.py", json.dumps(settings), backend="torch")
    assert first.returncode == 0, first.stderr
    folder = str(tmp_path / "run" / "checkpoints")
    path, found = files.load_newest(folder, print)
    names = {"model": f"{tmp_path}/evil.py:build", "dataset": f"subprocess:getoutput(cmd='touch {ran}')"}
    state = found.state | {"config": found.state["config"] | names}
    files.save(path, files.Checkpoint(arrays=found.arrays, state=state))
    again = run(PROGRAMS / "resume.py", json.dumps(settings | {"resume": True, "epochs": 2}), backend="torch")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    "url", ["reference://x?fo={fo}", "simplecache::reference::file://{fo}", "reference::file://{fo}"]
)
def test_a_url_leads_to_no_templates(url, ran, tmp_path):
    """fsspec's files of references hold templates of Jinja, which run what they hold."""
    program = "{{ cycler.__init__.__globals__.os.mkdir('" + str(ran) + "') }}"
    references = {"version": 1, "gen": [{"key": "a{{i}}", "url": program, "dimensions": {"i": [0]}}], "refs": {}}
    (tmp_path / "references.json").write_text(json.dumps(references))
    with pytest.raises(UserError, match="is a reference file system, which is not allowed because it can execute code"):
        folder_at(url.format(fo=tmp_path / "references.json")).names()
