"""The proof of resuming, at full size: `python -m pytest -m proof -n 0 -s tests/checkpoint/test_resume_proof.py`.

It prints the tables that stand in the README. About 40 minutes on two cores.
"""

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kerasdp.checkpoint import files as checkpoint
from tests.helpers import BACKENDS, ROOT, environment, left_after, run, session_members, steps_in

pytestmark = [pytest.mark.proof, pytest.mark.timeout(7200)]

WAYS = [(backend, count) for backend, many in (("torch", 2), ("jax", 4), ("tensorflow", 2)) for count in (1, many)]
WAYS = [(backend, count) for backend, count in WAYS if backend in BACKENDS]
# Adam in float64: it amplifies round-off until, in float32, runs part within 40 steps by luck.
OPTIMIZERS = {
    "sgd": ("sgd(learning_rate=0.003,momentum=0.9)", "float32"),
    "adam": ("adam(learning_rate=0.001)", "float64"),
}
FARTHEST = {"sgd": 1e-4, "adam": 1e-12}
# 1,437 digits in batches of 61: 24 steps an epoch, the last with 34 samples. Step 29 is within the second epoch.
STOP, LAST = 29, 70


def command(way, workdir, optimizer, *flags):
    rule, precision = OPTIMIZERS[optimizer]
    return [
        "recipes/train.py", f"--backend={way[0]}", f"--gpus={way[1]}", "--device=cpu", f"--workdir={workdir}",
        "--model=convnet", "--batch_size=61", "--epochs=9", f"--max_steps={LAST}", "--log_every=1", "--verbose=2",
        f"--optimizer={rule}", f"--precision={precision}", *flags,
    ]  # fmt: skip


def losses(workdir):
    lines = steps_in(workdir)
    assert [line["step"] for line in lines] == list(range(1, LAST + 1))
    return np.array([line["loss"] for line in lines])


def final_arrays(workdir):
    return checkpoint.load(checkpoint.path_of(str(workdir / "checkpoints"), LAST)).arrays


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The workdir of an uninterrupted run, with a checkpoint of step 29."""

    @functools.cache
    def get(way, optimizer):
        workdir = tmp_path_factory.mktemp("undisturbed") / "run"
        done = run(*command(way, workdir, optimizer, f"--checkpoint_every={STOP}", "--keep=99"), backend=way[0])
        assert done.returncode == 0, done.stderr
        return workdir

    return get


def resumed(old, way, optimizer, folder):
    """The losses of a run that resumes after step 29 of another, as if that had been killed later in its epoch."""
    workdir = folder / "run"
    shutil.copytree(old, workdir)
    for path in checkpoint.paths_in(str(workdir / "checkpoints")):
        if path != checkpoint.path_of(str(workdir / "checkpoints"), STOP):
            os.remove(path)
    done = run(*command(way, workdir, optimizer, "--resume"), backend=way[0])
    assert done.returncode == 0, done.stderr
    assert f"resumes after step {STOP}, in epoch 2" in done.stdout
    found = losses(workdir), final_arrays(workdir)
    shutil.rmtree(workdir)
    return found


def apart(expected, received, steps):
    pair = expected[STOP : STOP + steps], received[STOP : STOP + steps]
    return float((np.abs(pair[0] - pair[1]) / np.abs(pair[0])).max())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_pair(optimizer, undisturbed, tmp_path_factory):
    """Each ordered pair of backends and device counts, stopped within an epoch."""
    rows = {}
    for old in WAYS:
        expected, arrays = losses(undisturbed(old, optimizer)), final_arrays(undisturbed(old, optimizer))
        for new in WAYS:
            received, new_arrays = resumed(undisturbed(old, optimizer), new, optimizer, tmp_path_factory.mktemp("pair"))
            assert (received[:STOP] == expected[:STOP]).all()
            ten, forty = apart(expected, received, 10), apart(expected, received, 40)
            rows[old, new] = ten, forty
            print(f"{optimizer}: {old} -> {new}: {ten:.1e} in 10 steps, {forty:.1e} in 40", flush=True)
            if old == new:
                assert (received == expected).all()
                assert all((new_arrays[name] == array).all() for name, array in arrays.items())
            assert forty < FARTHEST[optimizer]
    names = [f"{backend} x {count}" for backend, count in WAYS]
    print(f"\n| {optimizer}: saved by, resumed by | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for old, name in zip(WAYS, names, strict=True):
        print(f"| {name} | " + " | ".join("{:.0e}, {:.0e}".format(*rows[old, new]) for new in WAYS) + " |")


def workers(session):
    """The processes of a session that train: those that were spawned, and spawned none themselves."""
    found = {}
    for process in session_members(session):
        try:
            with open(f"/proc/{process}/cmdline") as file, open(f"/proc/{process}/stat") as other:
                parent = int(other.read().rpartition(")")[2].split()[1])
                found[process] = ("spawn_main" in file.read(), parent)
        except OSError:
            continue
    parents = {parent for is_spawned, parent in found.values() if is_spawned}
    return [process for process, (is_spawned, _) in found.items() if is_spawned and process not in parents]


@pytest.mark.parametrize("attempt", range(4))
def test_kill_9_at_random_moments(backend, attempt, undisturbed, tmp_path):
    """Four runs with five kills each, of any rank, while a checkpoint is written every other step."""
    chosen = random.Random(f"{backend} {attempt}")
    way, workdir = (backend, 2), tmp_path / "run"
    flags = ["--max_restarts=9", "--checkpoint_every=2", "--keep=2"]
    output = tmp_path / "output"
    with open(output, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *command(way, workdir, "sgd", *flags)],
            cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    killed = []
    for step in sorted(chosen.sample(range(1, LAST - 3), 5)):
        while process.poll() is None and number_of_lines(workdir / "steps.jsonl") < step:
            time.sleep(0.01)
        time.sleep(chosen.random() * 0.1)
        found = sorted(workers(process.pid))
        if found:
            victim = chosen.choice(found)
            os.kill(victim, signal.SIGKILL)
            killed.append(step)
            # Two kills at once would be one.
            while process.poll() is None and output.read_text().count("restart ") < len(killed):
                time.sleep(0.01)
    process.wait(timeout=280)
    assert process.returncode == 0, output.read_text()
    assert left_after(process.pid, 10) == []  # Python's own helper for shared memory ends after the process it helped
    print(f"{backend}, killed after steps {killed}: {output.read_text().count('restart ')} restarts", flush=True)
    assert output.read_text().count("restart ") == len(killed) == 5
    expected = undisturbed(way, "sgd")
    assert (losses(workdir) == losses(expected)).all()
    received = final_arrays(workdir)
    for name, array in final_arrays(expected).items():
        assert (received[name] == array).all(), name


def number_of_lines(path):
    try:
        return path.read_text().count("\n")
    except OSError:
        return 0
