"""Says which version of JAX is installed, and which devices it sees."""

import importlib.metadata
from typing import Any

import jax


def describe() -> dict[str, Any]:
    """Returns the version, the devices, and the platform that drives them."""
    found = [device for device in jax.devices() if device.platform != "cpu"]
    memory = [(device.memory_stats() or {}).get("bytes_limit", 0) / 2**30 for device in found]
    return {
        "version": jax.__version__,
        "devices": [f"{device.device_kind} ({size:.0f} GiB for jax)" for device, size in zip(found, memory)],
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": found[0].client.platform_version.replace("\n", " ") if found else None,
    }
