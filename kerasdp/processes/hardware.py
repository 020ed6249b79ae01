"""Counts NVIDIA GPUs through the NVIDIA driver, and sets whether glibc returns freed memory to the system."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

_CURES = {
    "torch": "pip uninstall torch, then pip install 'kerasdp[torch]' (on Linux with CUDA)",
    "jax": "pip install 'kerasdp[jax-cuda]'",
    "tensorflow": "pip install 'kerasdp[tensorflow-cuda]' in a separate environment",
}


def num_gpus() -> int:
    """Returns the number of NVIDIA GPUs that this process may use; 0 if the NVIDIA driver is not installed.

    The driver respects CUDA_VISIBLE_DEVICES, and numbers GPUs in the same order as jax. The function creates no CUDA
    context, so it uses no GPU memory.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # it is not installed
        return 0
    found = ctypes.c_int(0)
    is_known = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(found)) == 0
    return found.value if is_known else 0


def why_unseen(backend: str) -> str:
    """Returns an error text for a backend that sees no GPU; empty if the NVIDIA driver has no GPU either."""
    count = num_gpus()
    if not count:
        return ""
    return (
        f"NVIDIA's driver has {count} GPU{'s' if count > 1 else ''}, but {backend} sees none; run {_CURES[backend]}, "
        "or update the driver (docs/accelerators.md)"
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
    """Configures glibc, the C library of Linux, to keep freed memory for the next step. Returns whether it succeeded.

    A compiled step frees all its results. glibc (2.36) returns most of this memory to the system, so the next step
    waits for page faults. On torch a step of a small GPT has 8,000 page faults, which take a quarter of its time. On
    TensorFlow (2.21) a step of a small ViT has 8,000 page faults, which take an eighth of its time. With this function
    the ViT has 3,000 page faults per step. With torch, and with jax on the CPU, threads that start later share one
    heap. The function changes nothing and returns False if the environment already configures glibc, or if the C
    library is not glibc.
    """
    is_told = "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ)
    # XLA compiles for a GPU in a thread per core, and in one arena these wait for each other, as TensorFlow's do: two
    # that compile for an H100 (jaxlib 0.10.2, on 2 cores that others used) two to three times as often, four once 20
    # times. glibc asks only once how many arenas there may be: that is before the devices are known.
    backend = "tensorflow" if backend == "jax" and num_gpus() else backend
    return backend in _OF_BACKEND and not is_told and _set(_OF_BACKEND[backend])


@contextlib.contextmanager
def kept_memory(backend: str) -> Iterator[None]:
    """Applies `keep_memory` during the `with` block, then restores the defaults and returns free memory to Linux."""
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
    """Returns a function of the C library by name; None if the function is missing, or the system is not Linux."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
