"""Runs and sweeps on a Ray cluster of simulated nodes."""

import contextlib
import csv
import json
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.helpers import BACKENDS, HOST_BACKENDS, PROGRAMS, ROOT, environment, result_of, run

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]
pytest.importorskip("ray")

RECIPE = ROOT / "recipes" / "ray_train.py"


def steps(workdir):
    return [json.loads(line) for line in (workdir / "steps.jsonl").read_text().splitlines()]


def on_two_nodes(backend, workdir, **settings):
    settings = {"backend": backend, "workdir": str(workdir), "epochs": 5, "max_steps": 40} | settings
    return run(PROGRAMS / "ray_cluster.py", json.dumps(settings), timeout=600)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of 40 steps in one process of each backend."""
    found = {}

    def get(backend):
        if backend not in found:
            folder = tmp_path_factory.mktemp(backend) / "run"
            flags = [f"--backend={backend}", "--device=cpu", "--gpus=1", "--max_steps=40", "--log_every=1"]
            done = run(ROOT / "recipes" / "train.py", *flags, f"--workdir={folder}")
            assert done.returncode == 0, done.stderr
            found[backend] = [line["loss"] for line in steps(folder)]
        return found[backend]

    return get


def assert_as_alone(workdir, expected):
    assert [line["step"] for line in steps(workdir)] == list(range(1, 41))
    losses = [line["loss"] for line in steps(workdir)]
    print(f"\nlosses differ by {np.abs(np.subtract(losses, expected)).max():.1e}")
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_two_nodes_learn_what_one_process_learns(backend, alone, tmp_path):
    workdir = tmp_path / "run"
    done = on_two_nodes(backend, workdir)
    result = result_of(done)
    assert "on 2 virtual CPU devices of 2 processes" in done.stdout
    assert_as_alone(workdir, alone(backend))
    # What Ray knows of it: the metrics of each epoch, and where the checkpoints are.
    pointers = sorted(workdir.glob("ray/*/checkpoint.json"))
    metrics = [json.loads(path.read_text()) for path in pointers]
    assert [each["loss"] for each in metrics] == result["loss"] and metrics[0]["epoch"] == 1
    assert metrics[0]["checkpoints"] == str(workdir / "checkpoints")


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_a_node_is_killed_and_another_takes_its_place(backend, alone, tmp_path):
    workdir = tmp_path / "run"
    done = on_two_nodes(backend, workdir, checkpoint_every="5", max_restarts=2, remove_at_step=20, spare_after=0)
    result = result_of(done)
    assert "a node was killed" in done.stdout and "resumes after step " in done.stdout
    assert_as_alone(workdir, alone(backend))
    print(f"{result['seconds']:.0f} s in all")


def test_a_node_is_killed_and_fewer_workers_continue(alone, tmp_path):
    workdir, name = tmp_path / "run", BACKENDS[-1]
    done = on_two_nodes(
        name, workdir, checkpoint_every="5", max_restarts=2, remove_at_step=20, num_workers=[1, 2],
        checkpoint_dir=f"file://{tmp_path}/place",
    )  # fmt: skip
    result_of(done)
    assert "of 2 processes" in done.stdout and "on 1 virtual CPU device" in done.stdout
    assert_as_alone(workdir, alone(name))
    assert (tmp_path / "place" / "step-00000040.safetensors").exists()
    assert list((tmp_path / "place" / "ray").iterdir())  # what Ray keeps


def test_a_mistake_is_one_line_and_no_restart(tmp_path):
    done = on_two_nodes(BACKENDS[0], tmp_path / "run", max_restarts=3, batch_size=1)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("UserError: ")]
    assert len(lines) == 1 and "the global batch" in lines[0] or "samples of all devices together" in lines[0]
    assert "RETRY" not in done.stdout


def test_a_sweep_is_interrupted_and_continues(tmp_path):
    workdir = tmp_path / "sweep"
    flags = ["--sweep=learning_rate=0.01,0.03,0.1; batch_size=32,64", f"--workdir={workdir}", "--log_every=1"]
    flags += [f"--backend={BACKENDS[0]}", "--device=cpu", "--epochs=2"]
    with open(tmp_path / "first.txt", "w") as said:
        command = [sys.executable, RECIPE, *flags]
        env = environment(RAY_ADDRESS="local")
        program = subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said)
    while len(list(workdir.glob("*/report.json"))) < 2:
        assert program.poll() is None, (tmp_path / "first.txt").read_text()
        time.sleep(0.2)
    program.send_signal(signal.SIGINT)
    program.wait(120)
    begun = {path: path.stat().st_ino for path in workdir.glob("*/checkpoints/step-*")}
    assert len(begun) >= 2
    refused = run(RECIPE, *flags, timeout=200, RAY_ADDRESS="local")
    assert refused.returncode == 2 and "holds the checkpoints of an earlier run" in refused.stderr
    done = run(RECIPE, *flags, "--resume", timeout=600, RAY_ADDRESS="local")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with open(workdir / "sweep.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["learning_rate"], row["batch_size"]) for row in rows] == [
        (rate, size) for rate in ("0.01", "0.03", "0.1") for size in ("32", "64")
    ]
    assert all(row["epochs"] == "2" and float(row["val_loss"]) < 2.5 for row in rows) and "error" not in rows[0]
    assert {path: path.stat().st_ino for path in begun} == begun  # of runs that had ended nothing was trained again
    assert "best: learning_rate=" in done.stdout and (workdir / "sweep.png").stat().st_size > 10_000


def test_a_job_is_submitted(tmp_path):
    tools = tmp_path / "bin"  # `ray` may be installed where no shell finds it
    tools.mkdir()
    (tools / "ray").write_text(f'#!/bin/sh\nexec {sys.executable} -m ray.scripts.scripts "$@"\n')
    (tools / "ray").chmod(0o755)
    kept = environment(PATH=f"{tools}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    kept |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # without one a head takes no jobs
    head = subprocess.Popen(
        ["ray", "start", "--head", "--block", "--num-cpus=2", "--port=6390", "--dashboard-port=8275"],
        env=kept, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, executable=str(tools / "ray"),
    )  # fmt: skip
    try:
        while True:
            assert head.poll() is None
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", 8275), timeout=1).close()
                break
            time.sleep(0.5)
        flags = [
            "--workers=2",
            f"--backend={BACKENDS[0]}",
            "--device=cpu",
            "--max_steps=10",
            f"--workdir={tmp_path}/run",
        ]
        submit = ["sh", str(ROOT / "cluster" / "ray-job.sh"), *flags]
        kept = kept | {"RAY_ADDRESS": "http://127.0.0.1:8275"}
        done = subprocess.run(submit, cwd=ROOT, env=kept, timeout=400, capture_output=True, text=True)
        assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
        assert (tmp_path / "run" / "checkpoints" / "step-00000010.safetensors").exists()
        assert "of 2 processes" in done.stdout
    finally:
        head.terminate()  # it ends what it started
        head.wait(60)


def test_a_cluster_that_is_gone(tmp_path):
    """Said in two minutes, not in thirteen."""
    begin = time.monotonic()
    done = run(RECIPE, f"--workdir={tmp_path}/run", timeout=300, RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 2 and "RAY_ADDRESS=local starts one of this machine" in done.stderr, done.stderr
    assert time.monotonic() - begin < 180
