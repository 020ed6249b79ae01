"""What several test files use: programs to start, each in a process of its own, and data to feed them."""

import concurrent.futures
import contextlib
import csv
import fcntl
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "programs"
BACKENDS = [name for name in ("torch", "jax", "tensorflow") if importlib.util.find_spec(name)]
# Those that train on several machines.
HOST_BACKENDS = [name for name in BACKENDS if name != "tensorflow"]
# For runs of programs/resume.py: 120 samples in batches of 13, 10 steps an epoch, the last with 3 samples.
DEVICES = {"torch": 2, "jax": 4, "tensorflow": 1}
NUM_STEPS = 40


def environment(**extra: str) -> dict[str, str]:
    """The environment without anything that chooses a backend."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KERAS", "XLA_", "JAX_"))}
    # Three programs run at a time, and torch's threads would spin while they wait.
    return kept | {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "passive"} | extra


class Warm:
    """A program that `server.py` runs for this process; to its user what `subprocess.Popen` is."""

    def __init__(self, backend: str, arguments: tuple[object, ...], cwd: pathlib.Path, env: dict[str, str]):
        pipes = [os.pipe() for _ in range(3)]
        request = {"argv": [str(argument) for argument in arguments], "cwd": str(cwd), "env": env}
        socket.send_fds(_server(backend), [json.dumps(request).encode()], [writer for _, writer in pipes])
        for _, writer in pipes:
            os.close(writer)
        self._answers, self.stdout, self.stderr = (open(reader) for reader, _ in pipes)  # noqa: SIM115
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.returncode = int(self._answers.readline())
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code."""
        if self.returncode is None:
            select.select([self._answers], [], [], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To this process alone."""
        os.kill(self.pid, number)

    def finish(self, timeout: float) -> subprocess.CompletedProcess:
        """Waits for the end, whatever that is; one that lasts too long is killed with all that it started."""
        with concurrent.futures.ThreadPoolExecutor(2) as readers:
            texts = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            finally:
                if self.returncode is None:
                    kill_session(self.pid)
                    self.wait(20)
            return subprocess.CompletedProcess([], self.returncode, *(text.result() for text in texts))


# The folder of the servers' sockets, which the processes of pytest share.
SERVERS = "KERASDP_TEST_SERVERS"


@functools.cache
def _server(backend: str) -> socket.socket:
    """A connection of this process to the one server of a backend, which it starts if it is the first."""
    path = os.path.join(os.environ[SERVERS], backend)
    connection = socket.socket(socket.AF_UNIX)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):  # there is none yet, or nobody needed it any more
            connection.connect(path)
            return connection
        # Its imports ask whether there are GPUs; torch's threads would spin while they wait.
        env = environment(KERAS_TORCH_DEVICE="cpu", PYTHONPATH=str(ROOT))
        command = [sys.executable, ROOT / "tests" / "server.py", backend, path]
        pathlib.Path(path).unlink(missing_ok=True)
        # In a session of its own: who ends pytest with Ctrl-C would end the server first, whose tests would then fail.
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=ROOT, env=env, start_new_session=True)
        while not os.path.exists(path):
            assert server.poll() is None, f"the server of {backend} has ended: {server.returncode}"
            time.sleep(0.05)
        connection.connect(path)
        return connection


def start(*arguments: object, backend: str | None, cwd: pathlib.Path = ROOT, **extra: str) -> Warm | subprocess.Popen:
    """Starts a program of this repository in a new session: cold, as a user does, or with a backend imported."""
    # Where there are GPUs, the framework may look for them in one process only.
    if backend is not None and sys.platform == "linux" and not os.path.exists("/dev/nvidia0"):
        return Warm(backend, arguments, cwd, environment(**extra))
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts its background jobs with Ctrl-C switched off, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finish(program: Warm | subprocess.Popen, timeout: float) -> subprocess.CompletedProcess:
    """Waits for the end of a program that `start` has started, whatever that is."""
    if isinstance(program, Warm):
        return program.finish(timeout)
    stdout, stderr = program.communicate(timeout=timeout)
    return subprocess.CompletedProcess([], program.returncode, stdout, stderr)


def run(
    *arguments: object, backend: str | None = None, cwd: pathlib.Path = ROOT, timeout: float = 280, **extra: str
) -> subprocess.CompletedProcess:
    """Runs a Python program of this repository to its end, whatever that is.

    Args:
        *arguments: of `python`.
        backend: the one that the program uses, if it may find it imported: that is most of what a short run costs.
        cwd: the folder it runs in.
        timeout: in seconds.
        **extra: environment variables.
    """
    if backend is not None:
        return finish(start(*arguments, backend=backend, cwd=cwd, **extra), timeout)
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def result_of(done: subprocess.CompletedProcess) -> dict:
    """What a test program printed after RESULT."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@functools.cache
def results(program, backend, *arguments, **extra):
    """What a test program printed after RESULT; it runs once for all tests of a file."""
    return result_of(run(PROGRAMS / program, backend, *arguments, backend=backend, timeout=900, **extra))


def steps_in(workdir):
    """What a run has written down of its steps."""
    return [json.loads(line) for line in (workdir / "steps.jsonl").read_text().splitlines()]


def losses_in(workdir):
    """Of each step that a run has written down."""
    return [step["loss"] for step in steps_in(workdir)]


def each_way(cases, quick, counts=(1, 2, 4), is_there=lambda *way: True):
    """The parameters `backend`, `count` and `case`, of what is there; what is not `quick(*way)` is a proof."""
    ways = itertools.product(BACKENDS, counts, cases)
    found = [pytest.param(*way, marks=[pytest.mark.proof] * (not quick(*way))) for way in ways if is_there(*way)]
    return pytest.mark.parametrize(("backend", "count", "case"), found)


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


def kill_session(session):
    """Kills what still runs of a session, and returns it."""
    left = session_members(session)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def left_after(session, seconds):
    """Processes of a session that still run after so many seconds, and are killed then."""
    end = time.monotonic() + seconds
    while session_members(session) and time.monotonic() < end:
        time.sleep(0.05)
    return kill_session(session)


@contextlib.contextmanager
def killed_at_the_end(process):
    """The context after which nothing of a program's session runs."""
    try:
        yield
    finally:
        kill_session(process.pid)


def left_in(folder):
    """What a run has left in its TMPDIR; on torch Keras (3.15) makes the folder of Inductor's cache when imported."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]


def train_resumable(workdir, backend, count=None, **settings):
    settings = {"epochs": 4, "optimizer": "adam", "learning_rate": 0.01} | settings
    count = DEVICES[backend] if count is None else count
    fields = settings | {"backend": backend, "num_devices": count, "workdir": str(workdir)}
    return run(PROGRAMS / "resume.py", json.dumps(fields), backend=backend)


def files_of_run(workdir):
    """Losses of the steps, and the rows of history.csv."""
    lines = steps_in(workdir)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    with open(workdir / "history.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4"]
    return [line["loss"] for line in lines], [
        {name: float(value) for name, value in row.items() if name not in ("seconds", "images_per_second")}
        for row in rows
    ]


def assert_same(expected, received, tolerance):
    """Compares nested numbers, and names the place where they diverge."""
    if isinstance(expected, dict):
        assert expected.keys() == received.keys()
        for name in expected:
            assert_same(expected[name], received[name], tolerance)
    else:
        np.testing.assert_allclose(received, expected, rtol=0, atol=tolerance)


def numbers(result):
    """All numbers of a result, in order."""
    if isinstance(result, dict):
        return list(itertools.chain(*(numbers(result[name]) for name in sorted(result))))
    return list(itertools.chain(*map(numbers, result))) if isinstance(result, list) else [result]


def assert_alike(received, expected, rtol=1e-9, atol=1e-12, name=""):
    """Compares all numbers of two results."""
    assert not isinstance(received, str), received
    np.testing.assert_allclose(numbers(received), numbers(expected), rtol=rtol, atol=atol, err_msg=name)


def some_images(count, *shape):
    random = np.random.RandomState(count)
    return random.randint(0, 256, (count, *shape)).astype("uint8"), random.randint(0, 10, count)


def make_images(folder, counts, size=(9, 7)):
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            colour = np.full((*size, 3), 10 * number + 5, "uint8")
            Image.fromarray(colour).save(folder / name / f"{number}.png")


def all_but(*slow: str) -> pytest.MarkDecorator:
    """Each installed backend in turn, as the fixture `backend`; the slow ones are proofs."""
    cases = [pytest.param(name, marks=[pytest.mark.proof] * (name in slow)) for name in BACKENDS]
    return pytest.mark.parametrize("backend", cases, indirect=True)
