"""The promise: stopped anywhere, resumed anywhere, the same curve."""

import functools
import json
import os
import re
import shutil

import numpy as np
import pytest

from kerasdp.checkpoint import files as checkpoint
from tests.helpers import BACKENDS, NUM_STEPS, PROGRAMS, all_but, files_of_run, result_of, run, train_resumable

STOP = 17  # of NUM_STEPS = 40, in the second epoch
SINGLE = (BACKENDS[0], 1)  # where it is no matter of the backend


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What each backend gives if nothing happens."""

    @functools.cache
    def get(backend, count=None):
        folder = tmp_path_factory.mktemp(backend) / "run"
        export = str(folder.parent / "model.keras")
        result = result_of(train_resumable(folder, backend, count, checkpoint_every="never", export=export))
        return (result, *files_of_run(folder), export)

    return get


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The workdir of a run that got SIGUSR1 in its second epoch."""

    @functools.cache
    def get(backend):
        folder = tmp_path_factory.mktemp(f"{backend}-stopped") / "run"
        done = train_resumable(folder, backend, trouble="signal", at_step=STOP)
        assert done.returncode == 99, done.stderr
        # The ranks agree on the step one step later.
        assert re.search(rf"stopped by .* after step ({STOP}|{STOP + 1}), saved in", done.stderr)
        return folder

    return get


def copy_of(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run.trouble").touch()
    return copy


@all_but("jax", "tensorflow")
def test_the_same_backend_resumes_bit_for_bit(backend, undisturbed, stopped, tmp_path):
    workdir = copy_of(stopped(backend), tmp_path)
    result = result_of(train_resumable(workdir, backend, resume=True))
    expected, losses, rows, _ = undisturbed(backend)
    assert files_of_run(workdir) == (losses, rows)
    assert result == expected
    rates = result["history"]["learning_rate"]
    assert rates[1] > rates[2]  # what a callback did behind the stop depends on what it saw before


@pytest.mark.skipif(len(BACKENDS) < 2, reason="there is one backend")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # One pair in short; a run of jax is resumed in backends/test_jax_tensor_parallel.py.
        pytest.param(old, BACKENDS[place - 1], marks=[pytest.mark.proof] * (place > 0))
        for place, old in enumerate(BACKENDS)
    ],
)
def test_another_backend_resumes(old, new, undisturbed, stopped, tmp_path):
    workdir = copy_of(stopped(old), tmp_path)
    result = result_of(train_resumable(workdir, new, 1 if old == "torch" else None, resume=True))
    expected, losses, rows, _ = undisturbed(old)
    received, received_rows = files_of_run(workdir)
    assert received[:STOP] == losses[:STOP]
    np.testing.assert_allclose(received[: STOP + 10], losses[: STOP + 10], rtol=1e-5)
    np.testing.assert_allclose(received, losses, rtol=1e-3)
    for row, other in zip(rows, received_rows, strict=True):
        assert row == pytest.approx(other, rel=1e-3)
    assert len(result["history"]["loss"]) == 4
    assert result["waited"] == expected["waited"]


def test_a_run_that_is_killed_starts_again(undisturbed, tmp_path):
    choices = {"trouble": "kill", "at_step": STOP, "max_restarts": 1, "checkpoint_every": "5"}
    done = train_resumable(tmp_path / "run", BACKENDS[0], **choices)
    expected, losses, rows, _ = undisturbed(BACKENDS[0])
    said = "was ended by SIGKILL; check whether the system has enough memory\nrestart 1 of 1, from the last checkpoint"
    assert said in done.stderr
    result = result_of(done)
    assert result["weights"] == expected["weights"]
    assert files_of_run(tmp_path / "run") == (losses, rows)


@pytest.mark.proof
def test_a_run_that_max_steps_ended_within_an_epoch(undisturbed, tmp_path):
    """Resumed as it was there is nothing to do, and nothing is lost; then it resumes to the end."""
    for choices in ({"max_steps": STOP}, {"max_steps": STOP, "resume": True}, {"resume": True}):
        done = train_resumable(tmp_path / "run", *SINGLE, verbose=2, **choices)
        result = result_of(done)
        assert ("nothing is left to train" in done.stdout) == (choices == {"max_steps": STOP, "resume": True})
        if "max_steps" in choices:  # of the epoch so far, also where nothing was trained
            assert json.loads((tmp_path / "run" / "report.json").read_text())["final"]["loss"] > 0
    expected, losses, rows, _ = undisturbed(*SINGLE)
    assert files_of_run(tmp_path / "run") == (losses, rows)
    assert result == expected
    report = tmp_path / "run" / "report.json"
    written = report.stat().st_mtime_ns
    train_resumable(tmp_path / "run", *SINGLE, resume=True)  # which trains nothing, on another backend maybe
    assert report.stat().st_mtime_ns == written


@pytest.mark.proof
def test_another_precision_resumes(undisturbed, stopped, tmp_path):
    """The scale of the loss, which float32 has not, begins again."""
    name = BACKENDS[0]
    done = train_resumable(copy_of(stopped(name), tmp_path), name, 1, resume=True, precision="float16")
    _, losses, _, _ = undisturbed(name)
    result_of(done)
    received = files_of_run(tmp_path / "run")[0]
    np.testing.assert_allclose(received[STOP : STOP + 5], losses[STOP : STOP + 5], rtol=5e-3)
    assert received[STOP + 1 :] != losses[STOP + 1 :]
    newest = checkpoint.load(checkpoint.paths_in(tmp_path / "run" / "checkpoints")[0])
    assert any(key.startswith("loss_scale/") for key in newest.arrays)


@pytest.mark.proof
def test_a_signal_in_a_validation(undisturbed, tmp_path):
    """It comes with the second batch of it, and does not wait for the others."""
    done = train_resumable(tmp_path / "run", *SINGLE, trouble="signal in validation", at_step=20)
    assert done.returncode == 99, done.stderr
    result = result_of(train_resumable(tmp_path / "run", *SINGLE, resume=True))
    expected, losses, rows, _ = undisturbed(*SINGLE)
    assert files_of_run(tmp_path / "run") == (losses, rows)
    assert result == expected


@pytest.mark.parametrize(("name", "count"), [(BACKENDS[0], 2), pytest.param(BACKENDS[-1], 1, marks=pytest.mark.proof)])
def test_not_a_number_names_the_last_good_checkpoint(name, count, tmp_path):
    done = train_resumable(tmp_path / "run", name, count, trouble="nan", at_step=STOP, checkpoint_every="1")
    assert done.returncode == 1
    path = re.search(r"the last good checkpoint is (\S+)", done.stderr)[1]
    # With torch the rate is not a number on the last rank alone: rank 0 learns of it one step later.
    assert checkpoint.load(path).state["step"] < STOP + count
    assert checkpoint.paths_in(tmp_path / "run" / "checkpoints")[0] == path


def test_another_run_is_refused(stopped, tmp_path):
    done = train_resumable(copy_of(stopped(BACKENDS[0]), tmp_path), BACKENDS[0], 1, resume=True, learning_rate=0.02)
    assert done.returncode == 2
    assert "in learning rate: expected 0.00999" in done.stderr  # in float32


@pytest.mark.proof
def test_a_full_disk_costs_the_files_not_the_training(tmp_path):
    """Where a file may not be larger than a few kilobytes, which a checkpoint is."""
    fields = {"backend": BACKENDS[-1], "num_devices": 1, "workdir": str(tmp_path / "run"), "epochs": 2}
    text = json.dumps(fields | {"tracker": "tensorboard"})
    limited = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
    limited += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = run("-c", limited, PROGRAMS / "resume.py", text, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr
    assert len(result_of(done)["history"]["loss"]) == 2
    assert done.stderr.count("cannot write checkpoints into") == 1
    *_, last = done.stderr.splitlines()
    assert re.match(r"warning: could not write the checkpoint of step 20 \(.*File too large", last)
    assert os.listdir(tmp_path / "run" / "checkpoints") == []


@pytest.mark.proof
def test_a_workdir_that_vanishes(tmp_path):
    done = train_resumable(tmp_path / "run", *SINGLE, trouble="remove", at_step=STOP)
    assert len(result_of(done)["history"]["loss"]) == 4


LOAD = """
import sys, json, numpy as np, keras
assert "kerasdp" not in sys.modules
found = {}
for path in sys.argv[1:]:
    model = keras.saving.load_model(path)
    assert not any(type(layer).__module__.startswith("kerasdp") for layer in model.layers)
    x = np.random.RandomState(0).randn(150, 6).astype("float32")
    outputs = model.predict(x[:5], verbose=0).tolist()
    loss = model.fit(x, np.zeros(150, "int32"), epochs=1, verbose=0).history["loss"]
    assert model.jit_compile == (keras.backend.backend() == "jax")  # as each decides by itself, on the CPU
    found[path] = [outputs, int(model.optimizer.iterations)]
print("RESULT", json.dumps(found))
"""


@pytest.mark.proof
def test_an_exported_model_loads_everywhere(backend, undisturbed, tmp_path):
    paths = [undisturbed(name)[3] for name in BACKENDS]
    program = tmp_path / "load.py"
    program.write_text(LOAD)
    found = result_of(run(program, *paths, cwd=tmp_path, KERAS_BACKEND=backend))
    for name, path in zip(BACKENDS, paths, strict=True):
        outputs, iterations = found[path]
        np.testing.assert_allclose(outputs, undisturbed(name)[0]["outputs"], atol=1e-6)
        assert iterations == NUM_STEPS + 5  # 150 samples in batches of 32
