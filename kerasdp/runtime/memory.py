"""What becomes of memory that a step has freed: by default it goes back to the system, and the next step asks anew."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

# Parameters of glibc's `mallopt` (malloc.h): what keeps freed memory, and the default.
_PARAMETERS = {-1: (-1, 128 * 1024), -4: (0, 65536), -8: (1, 0)}  # M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX")


def keep(backend: str) -> bool:
    """Lets memory that is freed stay with this process for the next step; returns whether it does.

    A compiled step frees all that it has computed. glibc (2.36) gives most of it back to the system, and the next step
    waits for each page anew: of a small GPT on jax for 20,000, a third of its time. From here on the heap keeps all,
    and threads that begin later share it. Not with TensorFlow (2.21): it gains nothing, and its threads wait for each
    other. Nor where the environment tells glibc what to do, or with another C library.
    """
    is_told = "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _CHOSEN_BY_USER)
    if backend == "tensorflow" or is_told:
        return False
    return _set({parameter: kept for parameter, (kept, _) in _PARAMETERS.items()})


@contextlib.contextmanager
def kept(backend: str) -> Iterator[None]:
    """Returns the context of `keep`; afterwards what is free goes back to the system."""
    is_kept = keep(backend)
    try:
        yield
    finally:
        if is_kept:
            _set({parameter: default for parameter, (_, default) in _PARAMETERS.items()})
            give_back()


def _set(values: dict[int, int]) -> bool:
    mallopt = _of_c_library("mallopt")
    return mallopt is not None and all(mallopt(parameter, value) for parameter, value in values.items())


def give_back() -> None:
    """Gives what is free back to the system."""
    if (trim := _of_c_library("malloc_trim")) is not None:
        trim(0)


def _of_c_library(name: str) -> Callable[..., int] | None:
    """Returns a function of the C library; None where that is not Linux's, or has none of that name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
