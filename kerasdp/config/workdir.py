"""Prepares the folder that a run writes into."""

import contextlib
import fcntl
import glob
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import TextIO

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
    if not resume and glob.glob(os.path.join(glob.escape(workdir), CHECKPOINTS, "step-*")):
        raise UserError(
            f"--workdir: {workdir!r} holds the checkpoints of an earlier run; resume it (--resume), or choose "
            "another folder"
        )
    path = pathlib.Path(workdir).absolute()
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        try:
            os.makedirs(workdir, exist_ok=True)
            # The name is this process's own: others of the run, on hosts that share the folder, try the same.
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


# Seconds: a requeued job may meet the last moments of the one that it resumes.
_WAIT_TO_RESUME = 30.0


@contextlib.contextmanager
def locked_workdir(workdir: str | None, resume: bool = False, flag: str = "workdir") -> Iterator[None]:
    """Keeps other runs out of the workdir, or another folder, within the `with` block.

    The system lifts the lock when this process ends, however it ends. File systems without locks (some network ones)
    keep nobody out.

    Args:
        workdir: a folder that is there. None: there is none.
        resume: whether to wait half a minute for the other run to end.
        flag: that names the folder, for the error message.

    Raises:
        UserError: if another run has the folder; it names that run's process and host.
    """
    if workdir is None:
        yield
        return
    path, until = os.path.join(workdir, ".lock"), time.monotonic() + (_WAIT_TO_RESUME if resume else 0.0)
    while (lock := _try_to_lock(path)) is None:
        if time.monotonic() >= until:
            with open(path, errors="replace") as file:
                owner = file.read(200)
            raise UserError(
                f"--{flag}: {workdir!r} is in use by another run ({owner}); wait for its end, or choose another folder"
            )
        time.sleep(0.2)
    try:
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield
    finally:
        with contextlib.suppress(OSError):  # somebody has removed the folder
            os.remove(path)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # also of processes that were forked meanwhile
        lock.close()


def _try_to_lock(path: str) -> TextIO | None:
    """Returns the file, which nobody else has locked; None if somebody has."""
    while True:
        lock = open(path, "a")  # noqa: SIM115 (closed by the caller)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        except OSError:  # there are no locks here
            return lock
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(lock.fileno())):
                lock.truncate(0)  # of a run that was killed
                return lock
        lock.close()  # a run that ended meanwhile has removed it
