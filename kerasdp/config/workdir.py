"""Prepares the folder that a run writes into."""

import contextlib
import os
import socket
from collections.abc import Iterator

from kerasdp.errors import UserError

CHECKPOINTS = "checkpoints"  # folder in the workdir


@contextlib.contextmanager
def prepared_workdir(workdir: str | None, resume: bool = False) -> Iterator[None]:
    """Makes the workdir for what runs within the `with` block, and removes it if that leaves nothing in it.

    Args:
        workdir: its path; the folders above it are made as well, and removed with it. None: there is none.
        resume: whether the run may find checkpoints there.

    Raises:
        UserError: if nothing can be written there, or if the checkpoints of another run would be lost.
    """
    if workdir is None:
        yield
        return
    if not resume and any(name.startswith("step-") for name in _names_in(os.path.join(workdir, CHECKPOINTS))):
        raise UserError(
            f"--workdir: {workdir!r} holds the checkpoints of an earlier run; resume it (--resume), or choose "
            "another folder"
        )
    missing = list(_missing_folders(os.path.abspath(workdir)))
    try:
        try:
            os.makedirs(workdir, exist_ok=True)
            # Of this process: others of the run, on hosts that share the folder, try the same.
            probe = os.path.join(workdir, f".writable-{socket.gethostname()}-{os.getpid()}")
            with open(probe, "w"):
                pass
            os.remove(probe)
        except OSError as error:
            raise UserError(
                f"--workdir: cannot write into {workdir!r} ({error.strerror}); choose another folder"
            ) from error
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # it holds something, or was not made
                os.rmdir(folder)


def _missing_folders(path: str) -> Iterator[str]:
    """Yields the path and those above it that do not exist, the deepest first."""
    while not os.path.lexists(path):
        yield path
        path = os.path.dirname(path)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
