"""Programs that the tests start: a process for each backend, since a process can hold only one."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "runners" / "programs"
# For the tests of code that is the same on every backend, which run in this process.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
BACKENDS = [name for name in ("torch", "jax", "tensorflow") if importlib.util.find_spec(name)]

os.environ["KERAS_BACKEND"] = BACKENDS[0]


def environment(**extra: str) -> dict[str, str]:
    """The environment without anything that chooses a backend."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KERAS", "XLA_", "JAX_"))}
    # Two programs run at a time, and torch's threads would spin while they wait.
    return kept | {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "passive"} | extra


def run(
    *arguments: object, cwd: pathlib.Path = ROOT, timeout: float = 280, **extra: str
) -> subprocess.CompletedProcess:
    """Runs a Python program of this repository to its end, whatever that is."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def result_of(done: subprocess.CompletedProcess) -> dict:
    """What a test program printed behind RESULT."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each installed backend in turn."""
    return request.param
