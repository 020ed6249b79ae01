"""Starts the programs that a benchmark compares: each answers a line on its input with a repetition (`protocol.py`)."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any, NamedTuple

from kerasdp.config import Config
from kerasdp.errors import RunError, UserError
from kerasdp.processes.devices import is_installed

# The peers: framework (None: any), file in this folder, further flags.
PEERS: dict[str, tuple[str | None, str, list[str]]] = {
    "torch": ("torch", "torch_loop.py", []),
    "torch-compile": ("torch", "torch_loop.py", ["--compile"]),
    "jax": ("jax", "jax_loop.py", []),
    "tensorflow": ("tensorflow", "tensorflow_loop.py", []),
    "tensorflow-xla": ("tensorflow", "tensorflow_loop.py", ["--compile"]),
    "keras": (None, "keras_fit.py", []),
    "own-loop": (None, "", []),  # kerasdp itself, by `Runner.step` instead of `Runner.fit`
    "replica-norm": (None, "", []),  # kerasdp itself, with batch norm on each device's shard of the batch
}
FOLDER = os.path.dirname(os.path.abspath(__file__))
ONE_DEVICE = ("tensorflow-xla", "keras")
PRECISIONS = ("auto", "float32", "bfloat16")
# Models that the loops know, and their images; others are trained by kerasdp and plain Keras alone.
SHAPES = {"convnet": (28, 28, 1), "resnet18": (28, 28, 1), "resnet50": (32, 32, 3)}
NUM_SAMPLES = 4096
# What torch, jax and TensorFlow say of a device, and kerasdp of any.
_WITHOUT_MEMORY = re.compile(r"out of memory|OOM when|RESOURCE_EXHAUSTED|too little memory", re.IGNORECASE)


class Task(NamedTuple):
    """The names of a model, and of a data set for one that is not in `SHAPES`, with its folder if it is `images`."""

    model: str
    dataset: str | None = None
    data_dir: str | None = None

    @property
    def flags(self) -> list[str]:
        """Returns the flags that name them to a program."""
        return [f"--{name}={value}" for name, value in self._asdict().items() if value]


@dataclasses.dataclass(kw_only=True)
class Way:
    """Who trains on what.

    Args:
        name: `"kerasdp-jax"`, `"keras-jax"`, `"jax"`.
        backend: its framework.
        num_devices: that it trains on.
    """

    name: str
    backend: str
    num_devices: int

    @property
    def is_kit(self) -> bool:
        """Returns whether it is this package."""
        return self.name.startswith("kerasdp-")

    @property
    def title(self) -> str:
        """Returns the name, and on how many devices if there are several."""
        return self.name if self.num_devices == 1 else f"{self.name} x {self.num_devices}"


@dataclasses.dataclass(kw_only=True)
class Contender(Way):
    """A program that trains. `command` starts it; it is ended when it has run for `limit` seconds, if there is one."""

    command: tuple[str, ...]
    limit: float | None = None

    def __str__(self) -> str:
        return self.title


def choose(
    config: Config, task: Task, backends: list[str], device_counts: list[int], peers: list[str] | None, steps: int
) -> list[Contender]:
    """Returns the contenders: kerasdp on each backend and device count, then those peers that can do the same.

    Args:
        config: how it is trained.
        task: what is trained.
        backends: of the kit; also of the peers, where `peers` does not name them.
        device_counts: numbers of devices.
        peers: names in `PEERS`; None: all that fit; empty: the kit alone.
        steps: of a repetition.

    Raises:
        UserError: if a peer that is named cannot take part.
    """
    if config.precision not in PRECISIONS:
        raise UserError(f"--precision: expected {', '.join(PRECISIONS)} here. Received: {config.precision}")
    for count in device_counts:
        if config.batch_size % count:
            raise UserError(f"--batch_size: expected a multiple of {count} devices. Received: {config.batch_size}")
    if task.model in SHAPES and config.batch_size > NUM_SAMPLES:
        raise UserError(f"--batch_size: expected at most {NUM_SAMPLES} here. Received: {config.batch_size}")
    names = [name for name in PEERS if PEERS[name][0] in (None, *backends) and name != "own-loop"]
    names = names if peers is None else peers
    for name in peers or ():
        if name not in PEERS:
            raise UserError(f"--peers: expected some of {', '.join(PEERS)}. Received: {name!r}")
        framework = PEERS[name][0]
        if framework and not is_installed(framework):
            raise UserError(f"--peers: {name} needs {framework}, which is not installed")
        if name == "replica-norm" and config.batch_norm != "sync":
            raise UserError("--peers: replica-norm is what --batch_norm=sync is measured against; add that")
        if framework and task.model not in SHAPES:
            raise UserError(
                f"--peers: {name} trains {', '.join(SHAPES)}; of {task.model} only keras and own-loop can take part, "
                "and, with --batch_norm=sync, replica-norm"
            )
    if task.model not in SHAPES:
        names = [name for name in names if PEERS[name][0] is None]
    found = []
    for count in device_counts:
        found += [_kit(config, task, backend, count, steps) for backend in backends]
        for name in names:
            if _takes_part(name, config, count):
                found += [_peer(name, backend, config, task, count, steps) for backend in _backends(name, backends)]
    return found


def _takes_part(name: str, config: Config, count: int) -> bool:
    if name == "replica-norm":
        return count > 1 and config.batch_norm == "sync"
    return count == 1 or name not in ONE_DEVICE


def _backends(name: str, backends: list[str]) -> list[str]:
    framework = PEERS[name][0]
    return [framework] if framework else backends


def _kit(config: Config, task: Task, backend: str, count: int, steps: int) -> Contender:
    changes: dict[str, Any] = {"backend": backend, "num_devices": count}
    if task.model in SHAPES:
        size = config.batch_size * (NUM_SAMPLES // config.batch_size)
        task = task._replace(dataset=f"synthetic(shape={SHAPES[task.model]}, num_samples={size})")
    if count == 1:
        changes["batch_norm"] = "sync"
    if backend != "torch":
        changes["compile"] = "auto"
    elif config.compile == "auto":
        changes["compile"] = "on"  # the rounds stand for a long run
    changes |= {"workdir": None, "checkpoint_dir": None, "checkpoint_every": "never", "verbose": 0}
    settings = dataclasses.replace(config, **changes)
    program = os.path.join(FOLDER, "kit_loop.py")
    words = ("--config", json.dumps(settings.as_dict()), f"--backend={backend}", f"--steps={steps}")
    command = (sys.executable, program, *words, *task.flags)
    return Contender(name=f"kerasdp-{backend}", backend=backend, num_devices=count, command=command)


def _peer(name: str, backend: str, config: Config, task: Task, count: int, steps: int) -> Contender:
    if name == "own-loop":
        kit = _kit(config, task, backend, count, steps)
        return dataclasses.replace(kit, name=f"{name}-{backend}", command=(*kit.command, "--loop"))
    if name == "replica-norm":
        kit = _kit(dataclasses.replace(config, batch_norm="replica"), task, backend, count, steps)
        return dataclasses.replace(kit, name=f"{name}-{backend}")
    _, file, extra = PEERS[name]
    flags = {
        "batch_size": config.batch_size, "devices": count, "steps": steps, "precision": config.precision,
        "device": config.device, "batch_norm": config.batch_norm,
    }  # fmt: skip
    if name == "keras":
        name, extra = f"keras-{backend}", [f"--backend={backend}"]
    words = [os.path.join(FOLDER, file), *(f"--{flag}={value}" for flag, value in flags.items()), *task.flags, *extra]
    return Contender(name=name, backend=backend, num_devices=count, command=(sys.executable, *words))


class Program:
    """A contender that runs. It is in a process group of its own, so that all its processes can be ended."""

    def __init__(self, contender: Contender):
        self.contender = contender
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            contender.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=_environment(contender), start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout  # noqa: S101  # both are pipes
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._timer = threading.Timer(contender.limit or 0, self._end_late)
        self._is_late = False
        if contender.limit is not None:
            self._timer.start()

    def answer(self) -> dict[str, Any]:
        """Waits for its next line, and returns what it says.

        Raises:
            RunError: the last line of its errors, if it has ended instead.
        """
        for line in self._answers:
            if line.startswith("{"):
                return json.loads(line)
        code = self._process.wait()
        if self._is_late:
            raise RunError(f"out of time ({self.contender.limit:.0f} s)")
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        if any(_WITHOUT_MEMORY.search(line) for line in lines):
            raise RunError("out of memory")
        raise RunError(lines[-1] if lines else f"it ended with exit code {code}")

    def repeat(self) -> dict[str, Any]:
        """Returns what a repetition took. Raises as `answer`."""
        with contextlib.suppress(BrokenPipeError):  # its errors say why
            self._requests.write("\n")
            self._requests.flush()
        return self.answer()

    def end(self) -> None:
        """Ends all its processes."""
        self._timer.cancel()
        self._kill()
        self._process.wait()
        self._answers.close()
        self._errors.close()

    def _end_late(self) -> None:
        self._is_late = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def caches_in(folder: str) -> dict[str, str]:
    """Returns the environment with which compiled programs are cached in a folder."""
    return {
        "XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
    }  # fmt: skip


def _environment(contender: Contender) -> dict[str, str]:
    """Returns the environment of a contender: the same cores and GPU memory for all, without a choice of backend."""
    cores = os.cpu_count() or 1
    processes = contender.num_devices if contender.backend == "torch" else 1
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // processes)),
        # Where anything else runs, threads that wait by spinning make torch ten times slower.
        "OMP_WAIT_POLICY": "passive",
        # They share a GPU: none may take all of its memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    } | {name: value for name, value in os.environ.items() if name not in ("KERAS_BACKEND", "KERAS_TORCH_DEVICE")}
    return environment | {"PYTHONUNBUFFERED": "1"}
