"""Writes what the tests on GPUs and TPUs have found."""

import functools
import importlib.metadata
import pathlib
import platform
import shutil
import subprocess

from tests.helpers import BACKENDS, result_of, run

REPORT = "gpu-report.md"
_PACKAGES = ("kerasdp", "keras", "torch", "triton", "jax", "jaxlib", "tensorflow", "numpy")


@functools.cache
def seen_by(backend):
    """How many GPUs or TPUs of this machine a run of a backend would take."""
    program = (
        f"from kerasdp.backends.{backend}.devices import make_devices; from kerasdp.config import Config; "
        f"found = make_devices(Config(backend={backend!r})); print('RESULT', found.count * found.is_accelerator)"
    )
    return result_of(run("-c", program))


def write_report(path: pathlib.Path, outcomes: list) -> None:
    """Writes what there is on this machine, and what each test found."""
    lines = ["# kerasdp on GPUs and TPUs", "", f"- {platform.platform()}, Python {platform.python_version()}"]
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        lines += [f"- {line}" for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines()]
    installed = {one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()}
    known = sorted({*_PACKAGES, *(name for name in installed if name.startswith(("nvidia-", "jax-cuda")))})
    lines.append("- " + ", ".join(f"{name} {installed[name]}" for name in known if name in installed))
    lines += [f"- {backend}: {seen_by(backend)} GPUs or TPUs" for backend in BACKENDS]
    lines += ["", "| test | outcome | seconds | found |", "|---|---|---|---|"]
    for outcome in outcomes:
        name = outcome.nodeid.partition("::")[2]
        found = ", ".join(f"{name} {value}" for name, value in outcome.user_properties)
        if outcome.outcome == "skipped":
            found = outcome.longrepr[2].removeprefix("Skipped: ")
        lines.append(f"| {name} | {outcome.outcome} | {outcome.duration:.1f} | {found} |")
    for outcome in outcomes:
        if outcome.outcome == "failed":
            lines += ["", f"## {outcome.nodeid}", "", "```", str(outcome.longrepr)[-6000:], "```"]
    path.write_text("\n".join(lines) + "\n")
