"""Makes a CUDA device for programs on machines without one: call `start` before torch is imported.

Its memory is the CPU's, and the CPU's kernels compute in it: `tests/accelerators/cuda_on_cpu.cpp`. The rest of torch
(2.13, a build for the CPU) takes it for a GPU.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import tempfile
import threading
from typing import ClassVar

SOURCE = pathlib.Path(__file__).resolve().parents[1] / "accelerators" / "cuda_on_cpu.cpp"


class Event:
    """In place of `torch.cuda.Event`, which a build for the CPU does not have; counts how often one is waited for."""

    num_waited = 0

    def __init__(self, **_):
        self.is_recorded = False

    def record(self, stream=None):
        self.is_recorded = True

    def query(self):
        return self.is_recorded

    def synchronize(self):
        assert self.is_recorded
        Event.num_waited += 1


class Stream:
    """In place of `torch.cuda.Stream`: the thread that made it, how often it was waited for, and whose memory it uses.

    Attributes:
        made: all of them; the first is the default one.
    """

    made: ClassVar = []

    def __init__(self, _device=None):
        self.num_awaited, self.num_kept, self.thread = 0, 0, threading.current_thread()
        Stream.made.append(self)

    def synchronize(self):
        self.num_awaited += 1


def library() -> pathlib.Path:
    """The compiled source, from the user's cache after the first time, which takes 9 s."""
    key = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()[:16]
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    found = cache / "kerasdp" / "tests" / f"cuda_on_cpu-{key}.so"
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=found.parent) as folder:
            made = pathlib.Path(folder) / found.name
            command = ["g++", "-O0", "-w", "-shared", "-fPIC", "-std=c++20", f"-I{_torch() / 'include'}", str(SOURCE)]
            subprocess.run([*command, "-o", made, f"-L{_torch() / 'lib'}", "-lc10", "-ltorch_cpu"], check=True)
            made.replace(found)
    return found


def start() -> None:
    """Registers the device in this process, and lets `torch.cuda` know of it."""
    ctypes.CDLL(str(_torch() / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library()), ctypes.RTLD_GLOBAL)
    import torch

    assert torch.version.cuda is None, "expected a build of torch without CUDA"
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "max_memory_allocated": 0,
        "_lazy_init": None,
        "default_stream": Stream(),
    }
    torch.cuda.Event, torch.cuda.Stream = Event, Stream
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    current = threading.local()
    torch.cuda.set_stream = functools.partial(setattr, current, "stream")
    torch.cuda.current_stream = lambda _device=None: getattr(current, "stream", torch.cuda.default_stream())

    def record_stream(tensor, stream):
        assert tensor.is_cuda
        stream.num_kept += 1

    torch.Tensor.record_stream = record_stream


def _torch() -> pathlib.Path:
    return pathlib.Path(importlib.util.find_spec("torch").origin).parent
