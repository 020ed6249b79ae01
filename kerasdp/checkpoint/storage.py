"""Keeps files in a folder, or under a URL of object stores and other file systems (fsspec).

https://filesystem-spec.readthedocs.io: s3://, gs://, az://, hdfs://, sftp:// and many more, each with a package of its
own. Loads neither fsspec nor NumPy until a URL is used. A folder has a lock; a URL has none.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from typing import Any, TextIO

from kerasdp.errors import UserError, redacted

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(://|::)")
# They have no folders to be made; with s3fs that would make the bucket.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "tos", "obs", "hf"}
_BEGUN, _WHOLE = ".tmp", ".whole"  # what follows a name while a file is written; and, under a URL, on its marker


class OutOfReachError(OSError):
    """What a URL leads to cannot be had just now; nothing is known of the files there."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, as `s3://bucket/folder`."""
    return _URL.match(os.fspath(path)) is not None


def folder_at(path: str | os.PathLike[str]) -> "_LocalFolder | _RemoteFolder":
    """Returns the folder of a path or a URL, a place for files, each there as a whole or not at all.

    Raises:
        UserError: if the URL cannot be used on this machine.
    """
    name = os.fspath(path)
    return _RemoteFolder(name) if is_url(name) else _LocalFolder(name)


def require_folder(path: str, resume: bool, flag: str = "checkpoint_dir", inner: str = "") -> None:
    """Raises `UserError` unless files can be written to a path or a URL, and no run's checkpoints are lost there.

    Args:
        path: of a folder, which is made if there is none.
        resume: whether the run may find checkpoints there.
        flag: that names the place.
        inner: the folder in it that holds the checkpoints; empty: it does itself.
    """
    folder = folder_at(path)
    # The name is this process's own: others of the run, on other machines, try the same.
    probe = f".writable-{socket.gethostname()}-{os.getpid()}"
    doing = "read"
    try:
        if not resume and any(name.startswith("step-") for name in folder_at(os.path.join(path, inner)).names()):
            raise UserError(
                f"--{flag}: {path!r} holds the checkpoints of an earlier run; resume it (--resume), or choose another "
                "place"
            )
        doing = "write into"
        with folder.writing(probe) as temporary, open(temporary, "w") as file:
            file.write("can be removed")
        folder.remove(probe)
    except OSError as error:
        reason = error.strerror or redacted(str(error), path)
        raise UserError(
            f"--{flag}: cannot {doing} {path!r} ({reason}); choose another place, or give this machine access to it"
        ) from error


@contextlib.contextmanager
def removed_if_empty(folder: str | None) -> Iterator[None]:
    """Removes a folder that is made within the `with` block, and those above it, if they end empty; None: nothing."""
    path = pathlib.Path(folder or "").absolute()
    missing = [each for each in (path, *path.parents) if not os.path.lexists(each)]
    try:
        yield
    finally:
        for each in missing:
            with contextlib.suppress(OSError):  # it holds something, or was not made
                os.rmdir(each)


class _LocalFolder:
    """Files of a folder that the system knows; there may be no such folder yet."""

    def __init__(self, path: str):
        self._path = path

    def names(self) -> list[str]:
        """Returns the names of the files that are whole; none if there is no such folder."""
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(self._path) if not name.endswith(_BEGUN)]
        return []

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """Gives a path to write to; the file is there, under its name, when the context ends without an error."""
        os.makedirs(self._path, exist_ok=True)
        # One name for all steps: the next one is written over what a killed run had begun.
        temporary = self._at(re.sub(r"^step-\d+", "step", name) + _BEGUN)
        try:
            with open(temporary, "wb") as file:
                mode = os.stat(file.fileno()).st_mode  # as the umask says
            yield temporary
            if os.stat(temporary).st_mode != mode:  # safetensors lets nobody else read its files
                os.chmod(temporary, mode & 0o777)
            _sync(temporary)
            os.replace(temporary, self._at(name))
            _sync(self._path)
        finally:
            with contextlib.suppress(OSError):
                os.remove(temporary)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[str]:
        """Gives a path to read from."""
        yield self._at(name)

    def remove(self, name: str) -> None:
        """Removes a file."""
        os.remove(self._at(name))

    def _at(self, name: str) -> str:
        return os.path.join(self._path, name)


class _RemoteFolder:
    """Files under a URL, as `_LocalFolder`. A file is listed once its marker is there, which is written last."""

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        self._files, self._path = file_system(url)

    def names(self) -> list[str]:
        listed: list[str] = []
        with self._reached(), contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()  # s3fs, for one, remembers what a folder held
            listed = self._files.ls(self._path, detail=False)
        found = {path.rstrip("/").rpartition("/")[2] for path in listed}
        return [name for name in found if name + _WHOLE in found]

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
            local = os.path.join(folder, name)
            yield local
            with self._reached():
                protocols = self._files.protocol
                if _OBJECT_STORES.isdisjoint([protocols] if isinstance(protocols, str) else protocols):
                    self._files.makedirs(self._path, exist_ok=True)
                self._unmark(name)
                self._files.put_file(local, self._at(name))
                self._files.pipe_file(self._at(name + _WHOLE), b"whole")

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
            local = os.path.join(folder, name)
            with self._reached():
                self._files.get_file(self._at(name), local)
            yield local

    def _unmark(self, name: str) -> None:
        with self._reached(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(name + _WHOLE))

    def remove(self, name: str) -> None:
        self._unmark(name)
        with self._reached():
            self._files.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Makes one kind of error of those that each package has for itself, not all of them an `OSError`."""
        try:
            yield
        except (FileNotFoundError, OutOfReachError):
            raise
        except Exception as error:
            text = redacted(" ".join(str(error).split()) or type(error).__name__, self._url)
            raise OutOfReachError(f"{type(error).__name__}: {text:.300}") from error


def file_system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system of a URL, and the path in it."""
    if "reference" in re.split("::|://", url):
        raise UserError(
            f"--checkpoint_dir: {url!r} is made of a file of references, which may hold templates, and those are code; "
            "give the URL of the files themselves"
        )
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(
            f"--checkpoint_dir: {url!r} needs fsspec, and its package for such URLs: pip install 'kerasdp[fsspec]' "
            f"({error})"
        ) from error
    except Exception as error:  # of the protocol's own package, which may look for the account at once
        raise UserError(
            f"--checkpoint_dir: cannot use {url!r} ({type(error).__name__}: "
            f"{redacted(' '.join(str(error).split()), url):.300})"
        ) from error


def _sync(path: str) -> None:
    """Waits until the file, or the names in the folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Seconds: a requeued job may meet the last moments of the one that it resumes.
_WAIT_TO_RESUME = 30.0


@contextlib.contextmanager
def locked_folder(folder: str, resume: bool = False, flag: str = "workdir") -> Iterator[None]:
    """Keeps other runs out of a folder within the `with` block.

    The system lifts the lock when this process ends, however it ends. File systems without locks (some network ones)
    keep nobody out.

    Args:
        folder: that is there.
        resume: whether to wait half a minute for the other run to end.
        flag: that names the folder, for the error message.

    Raises:
        UserError: if another run has the folder; it names that run's process and host.
    """
    path, until = os.path.join(folder, ".lock"), time.monotonic() + (_WAIT_TO_RESUME if resume else 0.0)
    while (lock := _try_to_lock(path)) is None:
        if time.monotonic() >= until:
            with open(path, errors="replace") as file:
                owner = file.read(200)
            raise UserError(
                f"--{flag}: {folder!r} is in use by another run ({owner}); wait for its end, or choose another folder"
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
