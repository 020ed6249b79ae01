"""What this machine gives a run: GPUs, by their driver, and memory, by its C library."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

_CURES = {
    "torch": "pip uninstall torch, then pip install 'kerasdp[torch]', which on Linux brings CUDA",
    "jax": "pip install 'kerasdp[jax-cuda]'",
    "tensorflow": "pip install 'kerasdp[tensorflow-cuda]' in an environment of its own",
}


def num_gpus() -> int:
    """Returns how many GPUs of NVIDIA's driver this process may see; 0 also where there is no driver.

    The driver reads CUDA_VISIBLE_DEVICES, and numbers the GPUs as jax does. It makes no context, so no memory of a GPU
    is taken.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # it is not installed
        return 0
    found = ctypes.c_int(0)
    is_known = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(found)) == 0
    return found.value if is_known else 0


def why_unseen(backend: str) -> str:
    """Says what to do where NVIDIA's driver has GPUs, of which a backend sees none; empty where it has none."""
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
    # Its largest blocks, above 32 MiB, still go back: kept, they would not fit into what others have left of them, and
    # a GPT with 16,000 tokens would take 2.7 times the memory, for 0.7 of the time.
    "jax": {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 1 << 25, _ARENA_MAX: 1},
    # Its threads would wait for each other, if they shared.
    "tensorflow": {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 1 << 25},
}


def keep_memory(backend: str) -> bool:
    """Lets memory that is freed stay with this process for the next step; returns whether it does.

    A compiled step frees all that it has computed. glibc (2.36) gives most of it back to the system, and the next step
    waits for each page again: of a small GPT on torch for 8,000, a quarter of its time; of a small ViT on TensorFlow
    (2.21) for 8,000, of which 3,000 are left, an eighth. From here on the heap keeps it, and threads that begin later
    share it. Not where the environment tells glibc what to do, or with another C library.
    """
    is_told = "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ)
    # XLA compiles for a GPU in a thread per core, and in one arena these wait for each other, as TensorFlow's do: two
    # that compile for an H100 (jaxlib 0.10.2, on 2 cores that others used) two to three times as often, four once 20
    # times. glibc asks only once how many arenas there may be: that is before the devices are known.
    backend = "tensorflow" if backend == "jax" and num_gpus() else backend
    return backend in _OF_BACKEND and not is_told and _set(_OF_BACKEND[backend])


@contextlib.contextmanager
def kept_memory(backend: str) -> Iterator[None]:
    """Returns the context of `keep_memory`; afterwards what is free goes back to the system."""
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
    """Gives what is free back to the system."""
    if (trim := _of_c_library("malloc_trim")) is not None:
        trim(0)


def _of_c_library(name: str) -> Callable[..., int] | None:
    """Returns a function of the C library; None where that is not Linux's, or has none of that name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
