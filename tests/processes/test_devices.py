"""Which backend and which devices a run takes."""

import json
import os
import sys
import types

import pytest

from kerasdp.config import BACKENDS, Config
from kerasdp.errors import UserError
from kerasdp.processes import devices
from tests import helpers
from tests.helpers import BACKENDS as INSTALLED


def test_a_backend_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "is_installed", lambda name: name != "torch")
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"torch is not installed \(installed: jax, tensorflow\); add it: pip install"):
        devices.choose_backend("torch")
    monkeypatch.setattr(devices, "is_installed", lambda name: False)
    with pytest.raises(UserError, match="no backend is installed"):
        devices.choose_backend(None)


WRITTEN_BY_KERAS = {"floatx": "float32", "epsilon": 1e-07, "image_data_format": "channels_last"}


@pytest.mark.parametrize(
    ("imported", "variable", "file", "expected"),
    [
        ("jax", "tensorflow", '{"backend": "tensorflow"}', "jax"),
        (None, "jax", '{"backend": "tensorflow"}', "jax"),
        (None, None, '{"backend": "tensorflow"}', "tensorflow"),
        (None, None, json.dumps(WRITTEN_BY_KERAS | {"backend": "tensorflow"}), "torch"),  # nobody's choice
        (None, None, json.dumps(WRITTEN_BY_KERAS | {"backend": "jax"}), "jax"),
        (None, None, "{", "torch"),
        (None, "", None, "torch"),
        (None, "theano", None, "KERAS_BACKEND: expected one of torch, jax, tensorflow as backend. Received: 'theano'"),
        ("openvino", None, None, "the Keras that is already imported: expected one of torch, jax, tensorflow as"),
        (None, None, '{"backend": "openvino"}', "keras.json: expected one of torch, jax, tensorflow as backend. Rec"),
    ],
)
def test_the_backend_of_a_run_that_names_none(imported, variable, file, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "is_installed", lambda name: True)
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    if imported:
        monkeypatch.setitem(sys.modules, "keras", keras_with(imported))
    if variable is not None:
        monkeypatch.setenv("KERAS_BACKEND", variable)
    if file:
        (tmp_path / "keras.json").write_text(file)
    if expected in BACKENDS:
        assert devices.choose_backend(None) == expected
        assert devices.choose_backend("torch") == "torch"
    else:
        with pytest.raises(UserError) as caught:
            devices.choose_backend(None)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)


def keras_with(name):
    """What `keras.config.backend()` needs."""
    return types.SimpleNamespace(config=types.SimpleNamespace(backend=lambda: name))


@pytest.mark.parametrize(
    ("choices", "there", "expected"),
    [
        ({}, (0,), "1 virtual CPU device (no GPU found)"),
        ({"num_devices": 4, "device": "cpu"}, (2,), "4 virtual CPU devices (as asked)"),
        ({}, (3,), "3 GPUs"),
        ({}, (4, "tpu"), "4 TPUs"),
        ({"device": "tpu", "num_devices": 1, "backend": "jax"}, (4, "tpu"), "1 TPU"),
        ({"strategy": "tensor", "batch_size": 2, "num_devices": 4}, (4,), "4 GPUs"),  # the batch is not split
    ],
)
def test_choice_of_devices(choices, there, expected):
    assert str(devices.choose_devices(Config(**choices), *there)) == expected


@pytest.mark.parametrize(
    ("choices", "num_gpus", "words"),
    [
        ({"num_devices": 4}, 2, "--gpus: this process can use 2 GPUs. Received: 4"),
        ({"num_devices": 1, "device": "gpu"}, 0, "sees no GPU"),
        ({"batch_size": 4}, 8, "expected at least 8 samples for 8 devices. Received: 4"),
        (
            {"accumulate": 9, "batch_size": 16},
            2,
            "the 8 samples of a device cannot be split into 9",
        ),
        ({"shard": "weights"}, 0, "expected several devices. Received: 1"),
    ],
)
def test_a_choice_that_does_not_fit_the_devices_that_are_found(choices, num_gpus, words):
    with pytest.raises(UserError, match=words):
        devices.choose_devices(Config(**choices), num_gpus)


def test_keras_with_another_backend_cannot_be_changed(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", keras_with("jax"))
    with pytest.raises(devices.AlreadyStartedError, match="Keras is already imported with the jax backend"):
        devices.set_backend("torch")


def test_what_is_compiled_is_kept_where_nobody_else_can_write(monkeypatch, tmp_path):
    """It is run: neither a folder that others may write to, nor one that another user has made, as in a shared HOME."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = devices.cache_folder("torch")
    os.chmod(folder, 0o777)  # noqa: S103
    assert devices.cache_folder("torch") == folder and os.stat(folder).st_mode & 0o777 == 0o700
    if os.getuid() == 0:
        os.chown(folder, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert devices.cache_folder("torch") is None


@pytest.mark.proof
@pytest.mark.skipif("torch" not in INSTALLED, reason="needs torch")
def test_torch_compiles_into_no_folder_that_anybody_can_make(tmp_path, monkeypatch):
    """Without a HOME, Inductor itself would take one in the temporary folder, by the name of the user."""
    program = (
        "import os; from kerasdp.backends.torch.devices import Config, Devices, device_of_process\n"
        "device_of_process(Devices(kind='cpu', count=1), Config(backend='torch'))\n"
        "folder = os.environ['TORCHINDUCTOR_CACHE_DIR']; print(folder, oct(os.stat(folder).st_mode))"
    )
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    done = helpers.run("-c", program, HOME="/dev/null", XDG_CACHE_HOME="", TMPDIR=str(tmp_path))
    assert done.stdout.startswith(f"{tmp_path}/kerasdp-") and done.stdout.endswith(" 0o40700\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.proof
def test_a_name_that_needs_keras_takes_a_backend_that_is_there():
    """Keras itself takes TensorFlow, where nobody has chosen."""
    program = (
        "import os, sys, kerasdp; kerasdp.is_installed = lambda name: name != 'tensorflow'; "
        "kerasdp.choose_backend = lambda name: 'jax'; help(kerasdp.RecordSource); import keras; "
        "print(keras.backend.backend(), 'KERAS_BACKEND' in os.environ, 'tensorflow' in sys.modules)"
    )
    done = helpers.run("-c", program)
    assert done.stdout.splitlines()[-1] == "jax False False", done.stderr


TF_DATA = """
import kerasdp

def train(runner):
    import tensorflow as tf
    return sum(map(int, tf.data.Dataset.range(4)))

print(kerasdp.launch(train, device="cpu", verbose=0))
"""


@pytest.mark.proof
@pytest.mark.skipif(len(INSTALLED) < 2 or "tensorflow" not in INSTALLED, reason="needs tensorflow and another backend")
def test_tensorflow_says_nothing_where_it_only_reads_data():
    done = helpers.run("-c", TF_DATA, KERAS_BACKEND=INSTALLED[0])
    assert (done.stdout, done.stderr) == ("6\n", "")
