"""Runs on a Ray cluster of simulated nodes."""

import contextlib
import json
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.helpers import BACKENDS, HOST_BACKENDS, PROGRAMS, ROOT, environment, losses_in, run, steps_in

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]
pytest.importorskip("ray")

RECIPE = ROOT / "recipes" / "ray_train.py"


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
            found[backend] = losses_in(folder)
        return found[backend]

    return get


def assert_as_alone(workdir, expected):
    assert [line["step"] for line in steps_in(workdir)] == list(range(1, 41))
    losses = losses_in(workdir)
    print(f"\nlosses differ by {np.abs(np.subtract(losses, expected)).max():.1e}")
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_two_nodes_learn_what_one_process_learns(backend, alone, tmp_path):
    workdir = tmp_path / "run"
    done = on_two_nodes(backend, workdir)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "on 2 virtual CPU devices of 2 processes" in done.stdout
    assert_as_alone(workdir, alone(backend))


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_a_node_is_killed_and_another_takes_its_place(backend, alone, tmp_path):
    workdir = tmp_path / "run"
    done = on_two_nodes(backend, workdir, checkpoint_every="5", max_restarts=2, remove_at_step=20)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "a node was killed" in done.stdout and "resumes after step " in done.stdout
    assert_as_alone(workdir, alone(backend))


def test_a_mistake_is_one_line_and_no_restart(tmp_path):
    done = on_two_nodes(BACKENDS[0], tmp_path / "run", max_restarts=3, batch_size=1)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "--batch_size: expected at least" in lines[0]
    assert "RETRY" not in done.stdout


def test_a_workdir_is_not_used_twice(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    done = run(RECIPE, f"--workdir={tmp_path}/run")
    assert done.returncode == 2 and "holds a run; continue it (--resume), or choose another folder" in done.stderr


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
