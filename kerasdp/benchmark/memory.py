"""Reads how much memory this process has, and had at most."""

import contextlib


def memory_now() -> int:
    """Returns the memory that this process has now, in bytes; 0 where the system does not say (not Linux)."""
    return _status("VmRSS")


def memory_peak() -> int:
    """Returns the most that it had since `forget_memory_peak`, in bytes."""
    return _status("VmHWM")


def forget_memory_peak() -> None:
    """Lets the peak begin anew."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # man 5 proc


def _status(name: str) -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
