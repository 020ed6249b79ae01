"""What accelerators this machine has, by its drivers, and why a framework does not see them."""

import ctypes
import importlib
import importlib.metadata
import os
import re
import sys
from typing import NamedTuple

# What TPUs say of themselves on the PCI bus: v2 and v3, v4, v5p, v5e, v6e, 7x (jax 0.10.2, jax/_src/hardware_utils.py).
_GOOGLE = "0x1ae0"
_TPUS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")

# Who is asked: library names, the function that starts it (none where counting does), the one that counts.
# The driver of CUDA and the runtime of HIP heed CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and
# number the GPUs as jax and its options do. Neither makes a context, so no memory of a GPU is taken.
_DRIVERS: dict[str, tuple[tuple[str, ...], str | None, str]] = {
    "cuda": (("libcuda.so.1",), "cuInit", "cuDeviceGetCount"),
    "rocm": (("libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"), None, "hipGetDeviceCount"),
}
PLATFORMS = tuple(_DRIVERS)

# The least driver of Linux for each CUDA (docs.nvidia.com/cuda/cuda-toolkit-release-notes), and what else there is.
_DRIVER_OF_CUDA = {12: 525, 13: 580}
_FOR_OLDER_DRIVERS = {
    "torch": ", or install torch's build for CUDA 12 (pytorch.org/get-started)",
    "jax": ", or pip install 'jax[cuda12]' in an environment without CUDA 13",
}
_WITH_CUDA = {
    "torch": "pip uninstall torch, then pip install 'kerasdp[torch]', which on Linux brings CUDA",
    "jax": "pip install 'kerasdp[jax-cuda]'",
    "tensorflow": "pip install 'kerasdp[tensorflow-cuda]' in an environment of its own",
}
_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
# Of cuInit, where the kernel does see GPUs (CUDA driver API, CUresult).
_ERRORS_OF_DRIVER = {
    802: "the GPUs' fabric is not ready: nvidia-fabricmanager must run",
    803: "its library and its kernel module are of different versions: restart the machine",
    804: "its compatibility library does not know these GPUs: leave /usr/local/cuda/compat out of LD_LIBRARY_PATH",
}


class Driver(NamedTuple):
    """NVIDIA's driver.

    Attributes:
        num_gpus: that this process may see; a slice of one (MIG) counts as one.
        cuda: the newest version of CUDA that it knows, as `(13, 0)`.
        error: of its start; 0: none.
    """

    num_gpus: int
    cuda: tuple[int, int]
    error: int


def nvidia_driver() -> Driver | None:
    """Returns what NVIDIA's driver says; None where there is none."""
    if (known := _cuda_of_driver()) is None:
        return None
    error: int = ctypes.CDLL("libcuda.so.1").cuInit(0)
    return Driver(num_gpus("cuda"), known, error)


def _cuda_of_driver() -> tuple[int, int] | None:
    """Returns the CUDA that the driver knows, without starting it: a process that has may not be forked any more."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # it is not installed, or a stub
        return None
    return version.value // 1000, version.value % 1000 // 10


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


def why_unseen(backend: str) -> str:
    """Says why a framework sees no GPU though NVIDIA's driver has some, and what mends it; empty where it has none.

    Args:
        backend: whose framework is imported.
    """
    driver = nvidia_driver()
    if driver is None or not (driver.num_gpus or (driver.error and kernel_gpus())):
        return ""
    if not driver.num_gpus:
        reason = _ERRORS_OF_DRIVER.get(driver.error, "does `nvidia-smi` work?")
        return f"NVIDIA's driver does not start (CUDA error {driver.error}): {reason}"
    count = f"{driver.num_gpus} GPU{'s' if driver.num_gpus > 1 else ''}"
    known = "CUDA {}.{}".format(*driver.cuda)
    begin = f"NVIDIA's driver ({known}) has {count}, and {backend} sees none: "
    built_for = _cuda_of(backend)
    if built_for is None:
        return f"{begin}it is installed without CUDA; {_WITH_CUDA[backend]}"
    if is_too_old_for(built_for):
        major = int(built_for.partition(".")[0])
        newer = f"update the driver to {_DRIVER_OF_CUDA.get(major, 'a newer one')} or newer"
        return f"{begin}it is built for CUDA {major}; {newer}{_FOR_OLDER_DRIVERS.get(backend, '')}"
    return f"{begin}what it says about it is above; does `nvidia-smi` work?"


def _cuda_of(backend: str) -> str | None:
    """Returns the version of CUDA that the installed framework is for; None if it is for none."""
    if backend == "torch":
        found: str | None = importlib.import_module("torch").version.cuda
        return found
    if backend == "jax":
        return next((major for major in ("13", "12") if _is_installed(f"jax-cuda{major}-plugin")), None)
    build = importlib.import_module("tensorflow").sysconfig.get_build_info()
    # The plain package is built for CUDA, and brings none of its libraries.
    return build.get("cuda_version") if _is_installed("nvidia-cudnn-cu12") else None


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def kernel_gpus(folder: str = "/proc/driver/nvidia/gpus") -> int:
    """Returns how many NVIDIA GPUs the kernel knows, also those that a container does not show; `folder` lists them."""
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0


def has_tpu(pci: str = "/sys/bus/pci/devices") -> bool:
    """Returns whether a TPU is plugged in; `pci` is where Linux lists what is."""
    for name in os.listdir(pci) if os.path.isdir(pci) else []:
        try:
            with open(os.path.join(pci, name, "vendor")) as vendor, open(os.path.join(pci, name, "device")) as device:
                if vendor.read().strip() == _GOOGLE and device.read().strip() in _TPUS:
                    return True
        except OSError:
            continue
    return False


_OF_CUDA = re.compile(r"(nvidia-.+)-cu(\d\d)")


def clash_of_cuda_packages(path: list[str] | None = None) -> str | None:
    """Returns a line that names packages for two versions of CUDA which share a folder; None if there are none.

    `nvidia-cudnn-cu12` and `nvidia-cudnn-cu13` both write `nvidia/cudnn/lib/libcudnn.so.9`, and so do those of nccl,
    nvshmem and cusparselt: what was installed last is what the other one's framework gets. Packages without a suffix
    (`nvidia-cublas` and others of CUDA 13) have a folder of their own, `nvidia/cu13`.

    Args:
        path: folders with installed packages. None: those of this interpreter.
    """
    found: dict[str, dict[int, str]] = {}
    for distribution in importlib.metadata.distributions(path=sys.path if path is None else path):
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if matched := _OF_CUDA.fullmatch(name):
            found.setdefault(matched[1], {})[int(matched[2])] = name
    clashes = {library: names for library, names in found.items() if len(names) > 1}
    if not clashes:
        return None
    versions = sorted({version for names in clashes.values() for version in names})
    packages = [name for library in sorted(clashes) for _, name in sorted(clashes[library].items())]
    return (
        f"packages of CUDA {' and '.join(map(str, versions))} have overwritten each other in this environment: "
        f"{', '.join(packages)}; use one environment for each backend (docs/accelerators.md)"
    )
