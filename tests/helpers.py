"""What several test files use: programs to start, each in a process of its own, and data to feed them."""

import csv
import gzip
import importlib.util
import json
import os
import pathlib
import struct
import subprocess
import sys

import numpy as np
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "programs"
BACKENDS = [name for name in ("torch", "jax", "tensorflow") if importlib.util.find_spec(name)]
# For runs of programs/resume.py: 120 samples in batches of 13, 10 steps an epoch, the last with 3 samples.
DEVICES = {"torch": 2, "jax": 4, "tensorflow": 2}
NUM_STEPS = 40


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


def session_members(session):
    """Processes of a session that still run."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if int(rest[2]) == session and state != "Z":
                found.append(int(entry.name))
    return found


def train_resumable(workdir, backend, count=None, **settings):
    settings = {"epochs": 4, "optimizer": "adam", "learning_rate": 0.01} | settings
    count = DEVICES[backend] if count is None else count
    fields = settings | {"backend": backend, "num_devices": count, "workdir": str(workdir)}
    return run(PROGRAMS / "resume.py", json.dumps(fields))


def files_of_run(workdir):
    """Losses of the steps, and the rows of history.csv."""
    lines = [json.loads(line) for line in (workdir / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    with open(workdir / "history.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4"]
    return [line["loss"] for line in lines], [
        {name: float(value) for name, value in row.items() if name not in ("seconds", "images_per_second")}
        for row in rows
    ]


def assert_same(expected, received, tolerance):
    """Compares nested numbers, and names the place where they part."""
    if isinstance(expected, dict):
        assert expected.keys() == received.keys()
        for name in expected:
            assert_same(expected[name], received[name], tolerance)
    else:
        np.testing.assert_allclose(received, expected, rtol=0, atol=tolerance)


def write_idx(folder, split, images, labels, packed=False):
    for kind, array in ((f"images-idx{images.ndim}-ubyte", images), ("labels-idx1-ubyte", labels)):
        content = (
            struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype("uint8").tobytes()
        )
        path = folder / f"{split}-{kind}{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(content) if packed else content)


def some_images(count, *shape):
    random = np.random.RandomState(count)
    return random.randint(0, 256, (count, *shape)).astype("uint8"), random.randint(0, 10, count)


def make_images(folder, counts, size=(9, 7)):
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            colour = np.full((*size, 3), 10 * number + 5, "uint8")
            Image.fromarray(colour).save(folder / name / f"{number}.png")
