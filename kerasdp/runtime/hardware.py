"""What GPUs this machine has, by their drivers, and what to do where a framework sees none of them."""

import ctypes

# Who is asked: library names, the function that starts it (none where counting does), the one that counts.
# The driver of CUDA and the runtime of HIP heed CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and
# number the GPUs as jax and its options do. Neither makes a context, so no memory of a GPU is taken.
_DRIVERS: dict[str, tuple[tuple[str, ...], str | None, str]] = {
    "cuda": (("libcuda.so.1",), "cuInit", "cuDeviceGetCount"),
    "rocm": (("libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"), None, "hipGetDeviceCount"),
}
PLATFORMS = tuple(_DRIVERS)

_CURES = {
    "torch": "pip uninstall torch, then pip install 'kerasdp[torch]', which on Linux brings CUDA",
    "jax": "pip install 'kerasdp[jax-cuda]'",
    "tensorflow": "pip install 'kerasdp[tensorflow-cuda]' in an environment of its own",
}
_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR


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


def has_tf32() -> bool:
    """Returns whether the first NVIDIA GPU multiplies in TF32: since Ampere, of compute capability 8."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, major = ctypes.c_int(0), ctypes.c_int(0)
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
            return False
        driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    except (OSError, AttributeError):
        return False
    return major.value >= 8


def is_too_old_for(cuda: str | None) -> bool:
    """Returns whether NVIDIA's driver does not know the CUDA that a framework is built for, as `"13.0"`.

    Drivers of one major version run all its minor versions.
    """
    known = _cuda_of_driver()
    return known is not None and cuda is not None and 0 < known[0] < int(cuda.partition(".")[0])


def _cuda_of_driver() -> tuple[int, int] | None:
    """Returns the CUDA that the driver knows, without starting it: a process that has may not be forked any more."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # it is not installed, or a stub
        return None
    return version.value // 1000, version.value % 1000 // 10


def why_unseen(backend: str) -> str:
    """Says what to do where NVIDIA's driver has GPUs, of which a backend sees none; empty where it has none."""
    count = num_gpus("cuda")
    if not count:
        return ""
    return (
        f"NVIDIA's driver has {count} GPU{'s' if count > 1 else ''}, and {backend} sees none: {_CURES[backend]}, or "
        "update the driver (docs/accelerators.md)"
    )
