"""Records what PyTorch does, for `--profile`."""

import os

import torch

HOW_TO_OPEN = "open the file at https://ui.perfetto.dev"

_running: list[torch.profiler.profile] = []


def start(folder: str) -> None:
    """Begins to record, of this process."""
    os.makedirs(folder, exist_ok=True)
    _running.append(torch.profiler.profile())  # of the CPU, and of a GPU if there is one
    _running[-1].start()


def stop(folder: str) -> None:
    """Ends the record, and writes `trace.json`."""
    profile = _running.pop()
    profile.stop()
    profile.export_chrome_trace(os.path.join(folder, "trace.json"))
