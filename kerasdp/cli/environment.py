"""Looks at this machine: versions, backends, devices, memory, and what is wrong."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from typing import Any

from packaging.requirements import Requirement

from kerasdp.config.validation import BACKENDS
from kerasdp.errors import UserError
from kerasdp.runtime.cuda_packages import clash_of_cuda_packages
from kerasdp.runtime.devices import choose_backend, is_installed
from kerasdp.runtime.gpu_count import num_gpus

_CUDA_EXTRAS = {"torch": "torch", "jax": "jax-cuda", "tensorflow": "tensorflow-cuda"}
_SECONDS = 120


def report() -> tuple[list[str], list[str]]:
    """Returns lines that say what there is, and lines that say what is wrong and what mends it."""
    lines, problems = _of_machine(), _of_packages()
    installed = [name for name in BACKENDS if is_installed(name)]
    num_nvidia = num_gpus("cuda")
    lines.append(f"NVIDIA GPUs, by their driver: {num_nvidia or 'none'}")
    for name in BACKENDS:
        if name not in installed:
            lines.append(f"{name}: not installed (pip install 'kerasdp[{name}]')")
            continue
        found = _of_backend(name)
        if "error" in found:
            lines.append(f"{name}: cannot be used")
            problems.append(f"{name} cannot be imported ({found['error']}): pip install --force-reinstall {name}")
            continue
        devices: list[str] = found.pop("devices")
        lines.append(f"{name} {found.pop('version')}: {', '.join(devices) or 'no GPU or TPU; virtual CPU devices'}")
        lines += [f"    {what} {value}" for what, value in found.items() if value]
        if num_nvidia and not devices:
            problems.append(
                f"{name} sees no GPU, though there are {num_nvidia}: pip install 'kerasdp[{_CUDA_EXTRAS[name]}]' "
                "(in an environment of its own: docs/accelerators.md)"
            )
    try:
        lines.append(f"backend of a run without --backend: {choose_backend(None)}")
    except UserError as error:
        problems.append(str(error))
    if clash := clash_of_cuda_packages():
        problems.append(clash)
    return lines, problems


def _of_machine() -> list[str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        f"kerasdp {_version('kerasdp')} in {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}",
        f"Python {platform.python_version()} ({sys.executable}) on {platform.platform()}",
        f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} CPU cores, "
        f"{memory:.0f} GiB of memory",
        f"keras {_version('keras') or 'not installed'}, numpy {_version('numpy') or 'not installed'}",
    ]


def _of_packages() -> list[str]:
    """Returns what is missing or of another version than kerasdp needs; of extras only what is installed."""
    problems = []
    for text in importlib.metadata.requires("kerasdp") or []:
        wanted = Requirement(text)
        extra = next((name for name in BACKENDS if wanted.marker and wanted.marker.evaluate({"extra": name})), None)
        if wanted.marker and extra is None:
            continue
        found = _version(wanted.name)
        if found is None and extra is None:
            problems.append(f"{wanted.name} is not installed: pip install '{wanted.name}{wanted.specifier}'")
        elif found is not None and not wanted.specifier.contains(found, prereleases=True):
            problems.append(
                f"{wanted.name} {found} is installed, kerasdp needs {wanted.specifier}: "
                f"pip install '{wanted.name}{wanted.specifier}'"
            )
    return problems


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _of_backend(name: str) -> dict[str, Any]:
    """Asks a framework, in a process of its own, which devices it sees: all of them would take memory of each GPU."""
    program = f"import json; from kerasdp.backends.{name}.about import describe; print('FOUND', json.dumps(describe()))"
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path]))
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_SECONDS, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it has not answered within {_SECONDS} s"}
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
            return found
    return {"error": (done.stderr.strip().splitlines() or ["it has ended"])[-1]}
