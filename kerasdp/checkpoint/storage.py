"""Stores files in a local folder, or under a URL of an object store or another remote file system (fsspec).

URLs begin with a protocol of fsspec, such as s3://, gs://, az://, hdfs:// or sftp://. Each protocol needs a separate
package (https://filesystem-spec.readthedocs.io). fsspec is imported only when a URL is used. A run locks a local
folder, but not a URL.
"""

import contextlib
import fcntl
import os
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
_BEGUN = ".tmp"  # what follows a name while a file is written


class OutOfReachError(OSError):
    """Raised if a URL cannot be reached, so that it is unknown which files exist under the URL."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, such as `s3://bucket/folder`."""
    return _URL.match(os.fspath(path)) is not None


def folder_at(path: str | os.PathLike[str]) -> "_LocalFolder | _RemoteFolder":
    """Returns an object that reads and writes files in the folder at a path or URL. Each write is atomic.

    Raises:
        UserError: if the URL cannot be used on this machine.
    """
    name = os.fspath(path)
    return _RemoteFolder(name) if is_url(name) else _LocalFolder(name)


def require_folder(path: str, resume: bool, flag: str = "checkpoint_dir", inner: str = "") -> None:
    """Checks that a folder or URL is writable, and that a new run would not replace checkpoints of an earlier run.

    Args:
        path: path or URL of the folder. The folder is created if it does not exist.
        resume: whether the run resumes, so that the folder may contain checkpoints.
        flag: name of the flag that sets the folder, for the error message.
        inner: subfolder of the checkpoints. Empty: the checkpoints are in the folder itself.

    Raises:
        UserError: if the folder is not writable, or contains checkpoints although `resume` is False.
    """
    folder = folder_at(path)
    # The name is this process's own: others of the run, on other machines, try the same.
    probe = f".writable-{socket.gethostname()}-{os.getpid()}"
    try:
        names = folder_at(os.path.join(path, inner)).names()
        with folder.writing(probe) as temporary, open(temporary, "w") as file:
            file.write("can be removed")
        folder.remove(probe)
    except OSError as error:
        reason = error.strerror or redacted(str(error), path)
        raise UserError(
            f"--{flag}: cannot use {path!r} ({reason}); give this machine access to it, or choose another place"
        ) from error
    if not resume and any(name.startswith("step-") for name in names):
        raise UserError(
            f"--{flag}: {path!r} holds the checkpoints of an earlier run; resume it (--resume), or choose another place"
        )


def _temporary(name: str) -> str:
    """Returns the name of the temporary file that is later renamed to `name`.

    Checkpoints of all steps use the same temporary name. So the next write replaces an incomplete file of a killed run.
    """
    return re.sub(r"^step-\d+", "step", name) + _BEGUN


class _LocalFolder:
    """Reads and writes files in a local folder. The folder need not exist yet."""

    def __init__(self, path: str):
        self._path = path

    def names(self) -> list[str]:
        """Returns the names of the complete files; empty if the folder does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(self._path) if not name.endswith(_BEGUN)]
        return []

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """Yields a temporary path to write to. The file is renamed to `name` if the `with` block raises no error."""
        os.makedirs(self._path, exist_ok=True)
        temporary = self._at(_temporary(name))
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
        """Yields the path of a file, to read from."""
        yield self._at(name)

    def remove(self, name: str) -> None:
        """Removes a file."""
        os.remove(self._at(name))

    def _at(self, name: str) -> str:
        return os.path.join(self._path, name)


class _RemoteFolder:
    """Reads and writes files under a URL, with the same methods as `_LocalFolder`."""

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        self._files, self._path = file_system(url)

    def names(self) -> list[str]:
        listed: list[str] = []
        with self._reached(), contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()  # s3fs, for one, remembers what a folder held
            listed = self._files.ls(self._path, detail=False)
        return [os.path.basename(path.rstrip("/")) for path in listed if not path.endswith(_BEGUN)]

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
            local, protocol = os.path.join(folder, name), self._files.protocol
            yield local
            with self._reached():
                # An object is there when the whole of it has arrived.
                if _OBJECT_STORES.isdisjoint([protocol] if isinstance(protocol, str) else protocol):
                    self._files.makedirs(self._path, exist_ok=True)
                    self._files.put_file(local, temporary := self._at(_temporary(name)))
                    self._files.mv(temporary, self._at(name))
                else:
                    self._files.put_file(local, self._at(name))

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
            local = os.path.join(folder, name)
            with self._reached():
                self._files.get_file(self._at(name), local)
            yield local

    def remove(self, name: str) -> None:
        with self._reached():
            self._files.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Turns errors of file system packages, except `FileNotFoundError`, into `OutOfReachError`.

        The packages also raise errors that are not subclasses of `OSError`.
        """
        try:
            yield
        except (FileNotFoundError, OutOfReachError):
            raise
        except Exception as error:
            raise OutOfReachError(_in_a_line(error, self._url)) from error


def file_system(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the path in it."""
    if "reference" in re.split("::|://", url):
        raise UserError(
            f"--checkpoint_dir: {url!r} is a reference file system, which is not allowed because it can execute code; "
            "use the URL of the files themselves"
        )
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except Exception as error:  # of the protocol's own package, which may look for the account at once
        raise UserError(
            f"--checkpoint_dir: cannot use {url!r} ({_in_a_line(error, url)}); install fsspec and the package of its "
            "protocol: pip install 'kerasdp[fsspec]'"
        ) from error


def _in_a_line(error: Exception, url: str) -> str:
    return f"{type(error).__name__}: {redacted(' '.join(str(error).split()), url):.300}"


def _sync(path: str) -> None:
    """Waits until the content of a file, or the list of files in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Seconds: a requeued job may meet the last moments of the one that it resumes.
_WAIT_TO_RESUME = 30.0


@contextlib.contextmanager
def locked_folder(folder: str, resume: bool = False, flag: str = "workdir") -> Iterator[None]:
    """Locks a folder during the `with` block, so that no other run can use the folder.

    The operating system releases the lock when this process ends, even if the process is killed. On network file
    systems without locks, the function has no effect.

    Args:
        folder: an existing folder.
        resume: whether to wait up to 30 seconds for the end of another run that uses the folder.
        flag: name of the flag that sets the folder, for the error message.

    Raises:
        UserError: if another run uses the folder. The message names its process and host.
    """
    until = time.monotonic() + (_WAIT_TO_RESUME if resume else 0.0)
    # The file stays: if it were removed, another run could lock a file of that name that is no longer there.
    with open(os.path.join(folder, ".lock"), "a+") as lock:
        while not _try_to_lock(lock):
            if time.monotonic() >= until:
                lock.seek(0)
                raise UserError(
                    f"--{flag}: {folder!r} is in use by another run ({lock.read(200)}); wait for its end, or choose "
                    "another folder"
                )
            time.sleep(0.2)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # also of processes that were forked meanwhile


def _try_to_lock(lock: TextIO) -> bool:
    """Tries to lock a file. Returns False if another process has locked the file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # there are no locks here
        pass
    return True
