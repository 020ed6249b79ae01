"""Counts NVIDIA GPUs through their driver, and sets how the C library of Linux returns freed memory."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

_CURES = {
    "torch": "pip uninstall torch, then pip install 'kerasdp[torch]', which on Linux brings CUDA",
    "jax": "pip install 'kerasdp[jax-cuda]'",
    "tensorflow": "pip install 'kerasdp[tensorflow-cuda]' in a separate environment",
}


def num_gpus() -> int:
    """Returns how many NVIDIA GPUs this process may use; 0 if there is no driver.

    The driver reads CUDA_VISIBLE_DEVICES, and numbers the GPUs as jax does. The function makes no CUDA context, so it
    uses no GPU memory.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # it is not installed
        return 0
    found = ctypes.c_int(0)
    is_known = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(found)) == 0
    return found.value if is_known else 0


def why_unseen(backend: str) -> str:
    """Returns advice if NVIDIA's driver has GPUs and the backend sees none; empty if there are no GPUs."""
    count = num_gpus()
    if not count:
        return ""
    return (
        f"NVIDIA's driver has {count} GPU{'s' if count > 1 else ''}, and {backend} sees none: {_CURES[backend]}, or "
        "update the driver (docs/accelerators.md)"
    )


# Parameters of glibc's `mallopt` (malloc.h), with their defaults.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536, _ARENA_MAX: 0}
_OF_BACKEND = {
    "torch": {_TRIM_THRESHOLD: -1, _MMAP_MAX: 0, _ARENA_MAX: 1},
    # Blocks above 32 MiB still go back to the system. If the heap kept them, it would fragment: a GPT with a vocabulary
    # of 16,000 would need 2.7 times the memory, for 0.7 of the time.
    "jax": {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 1 << 25, _ARENA_MAX: 1},
    # No single arena: TensorFlow's threads would wait for each other.
    "tensorflow": {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 1 << 25},
}


def keep_memory(backend: str) -> bool:
    """Makes the C library keep freed memory for the next step; returns whether it does.

    A compiled step frees all its results. glibc (2.36) returns most of that memory to the system, and the next step
    waits for page faults. A step of a small GPT on torch has 8,000 page faults, a quarter of its time. A step of a
    small ViT on TensorFlow (2.21) also has 8,000, an eighth of its time; with this function it has 3,000. After this
    call the heap keeps freed memory, and threads that start later share it. The function changes nothing, and returns
    False, if the environment already configures glibc, or with another C library.
    """
    is_told = "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ)
    # XLA compiles for a GPU in a thread per core, and in one arena these wait for each other, as TensorFlow's do: two
    # that compile for an H100 (jaxlib 0.10.2, on 2 cores that others used) two to three times as often, four once 20
    # times. glibc asks only once how many arenas there may be: that is before the devices are known.
    backend = "tensorflow" if backend == "jax" and num_gpus() else backend
    return backend in _OF_BACKEND and not is_told and _set(_OF_BACKEND[backend])


@contextlib.contextmanager
def kept_memory(backend: str) -> Iterator[None]:
    """Applies `keep_memory` in a context; on exit, restores the defaults and returns free memory to the system."""
    is_kept = keep_memory(backend)
    try:
        yield
    finally:
        if is_kept:
            _set(_DEFAULTS)
            give_memory_back()


def _set(values: dict[int, int]) -> bool:
    mallopt = _of_c_library("mallopt")
    return mallopt is not None and all(mallopt(parameter, value) for parameter, value in values.items())


def give_memory_back() -> None:
    """Returns the free memory of this process to the system."""
    if (trim := _of_c_library("malloc_trim")) is not None:
        trim(0)


def _of_c_library(name: str) -> Callable[..., int] | None:
    """Returns a function of the C library by name; None if it is missing, or the system is not Linux."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
