"""Counts GPUs by asking their driver, so that a framework need not start, which would take memory of each."""

import ctypes

# Who is asked: library names, the function that starts it (none where counting does), the one that counts.
# The driver of CUDA and the runtime of HIP heed CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and
# number the GPUs as jax and its options do. Neither makes a context, so no memory of a GPU is taken.
_DRIVERS: dict[str, tuple[tuple[str, ...], str | None, str]] = {
    "cuda": (("libcuda.so.1",), "cuInit", "cuDeviceGetCount"),
    "rocm": (("libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"), None, "hipGetDeviceCount"),
}
PLATFORMS = tuple(_DRIVERS)


def num_gpus(platform: str) -> int:
    """Returns how many GPUs of a platform this process may see; 0 also where there is no driver to ask.

    Args:
        platform: `"cuda"` or `"rocm"`.
    """
    names, start, ask = _DRIVERS[platform]
    for name in names:
        try:
            driver = ctypes.CDLL(name)
        except OSError:  # it is not installed
            continue
        found = ctypes.c_int(0)
        if start is not None and getattr(driver, start)(0) != 0:
            return 0
        return found.value if getattr(driver, ask)(ctypes.byref(found)) == 0 else 0
    return 0
