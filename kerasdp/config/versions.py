"""The versions of what trains."""

import contextlib
import importlib.metadata
import platform

_PACKAGES = ("kerasdp", "keras", "torch", "jax", "tensorflow", "numpy")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of every relevant package that is installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
