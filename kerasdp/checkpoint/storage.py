"""Keeps files in a folder, or under a URL of object stores and other file systems (fsspec).

https://filesystem-spec.readthedocs.io: s3://, gs://, az://, hdfs://, sftp:// and many more, each with a package of its
own. Loads neither fsspec nor NumPy until a URL is used. Two runs cannot write to one place: a folder has a lock, a URL
a file with the run's id.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from kerasdp.config import Config, locked_workdir
from kerasdp.errors import UserError, redacted

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(://|::)")
# An object is there when all of it has been sent, and not before.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "tos", "obs", "hf"}


class OutOfReachError(OSError):
    """What a URL leads to cannot be had just now; nothing is known of the files there."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, as `s3://bucket/folder`."""
    return _URL.match(os.fspath(path)) is not None


def is_left_over(name: str, names: re.Pattern[str]) -> bool:
    """Returns whether a file is what a process of this machine that has ended had begun to write.

    Args:
        name: of the file.
        names: that the file may have when it is whole.
    """
    found = re.fullmatch(rf"(.+)\.{re.escape(socket.gethostname())}-(\d+)\.tmp", name)
    if found is None or not names.fullmatch(found[1]):
        return False
    try:
        os.kill(int(found[2]), 0)  # asks alone
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # somebody else's
        return False
    return int(found[2]) == os.getpid()


def _temporary(name: str) -> str:
    """Returns the name of a file while this process writes it."""
    return f"{name}.{socket.gethostname()}-{os.getpid()}.tmp"


def folder_at(path: str | os.PathLike[str]) -> "_LocalFolder | _RemoteFolder":
    """Returns the folder of a path or a URL, a place for files, each there as a whole or not at all.

    Raises:
        UserError: if the URL cannot be used on this machine.
    """
    name = os.fspath(path)
    return _RemoteFolder(name) if is_url(name) else _LocalFolder(name)


def require_folder(path: str, resume: bool) -> None:
    """Raises `UserError` unless checkpoints can be written to a path or a URL, and none of another run are lost there.

    Args:
        path: of `--checkpoint_dir`.
        resume: whether the run may find checkpoints there.
    """
    folder = folder_at(path)
    # The name is this process's own: others of the run, on other machines, try the same.
    probe = f".writable-{socket.gethostname()}-{os.getpid()}"
    doing = "read"
    try:
        if not resume and any(name.startswith("step-") for name in folder.names()):
            raise UserError(
                f"--checkpoint_dir: {path!r} holds the checkpoints of an earlier run; resume it (--resume), or choose "
                "another place"
            )
        doing = "write into"
        with folder.writing(probe) as temporary, open(temporary, "w") as file:
            file.write("can be removed")
        folder.remove(probe)
    except OSError as error:
        reason = error.strerror or redacted(str(error), path)
        raise UserError(
            f"--checkpoint_dir: cannot {doing} {path!r} ({reason}); choose another place, or give this machine access "
            "to it"
        ) from error


class _LocalFolder:
    """Files of a folder that the system knows; there may be no such folder yet."""

    def __init__(self, path: str):
        self._path = path

    def names(self) -> list[str]:
        """Returns the names of the files; none if there is no such folder."""
        with contextlib.suppress(FileNotFoundError):
            return os.listdir(self._path)
        return []

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """Gives a path to write to; the file is there, under its name, when the context ends without an error."""
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
        """Gives a path to read from."""
        yield self._at(name)

    def copy(self, name: str, new: str) -> None:
        """Copies a file, or gives it a second name."""
        temporary = self._at(_temporary(new))
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        try:
            os.link(self._at(name), temporary)
        except OSError:  # not every file system has links
            shutil.copyfile(self._at(name), temporary)
        os.replace(temporary, self._at(new))

    def rename(self, name: str, new: str) -> None:
        """Gives a file another name."""
        os.replace(self._at(name), self._at(new))

    def remove(self, name: str) -> None:
        """Removes a file."""
        os.remove(self._at(name))

    def _at(self, name: str) -> str:
        return os.path.join(self._path, name)


class _RemoteFolder:
    """Files under a URL, as `_LocalFolder`."""

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        self._files, self._path = file_system(url)
        protocols = self._files.protocol
        self._is_object_store = not _OBJECT_STORES.isdisjoint([protocols] if isinstance(protocols, str) else protocols)

    def names(self) -> list[str]:
        def listed() -> list[str]:
            self._files.invalidate_cache()  # s3fs, for one, remembers what a folder held
            try:
                return self._files.ls(self._path, detail=False)
            except FileNotFoundError:
                return []

        return [path.rstrip("/").rpartition("/")[2] for path in self._tried(listed)]

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
            local = os.path.join(folder, name)
            yield local
            if self._is_object_store:
                self._tried(lambda: self._files.put_file(local, self._at(name)))
                return
            temporary = self._at(_temporary(name))
            try:
                self._tried(lambda: self._files.makedirs(self._path, exist_ok=True))
                self._tried(lambda: self._files.put_file(local, temporary))
                self._tried(lambda: self._files.mv(temporary, self._at(name)))
            except BaseException:
                with contextlib.suppress(OSError):
                    self._tried(lambda: self._files.rm_file(temporary))
                raise

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
            local = os.path.join(folder, name)
            self._tried(lambda: self._files.get_file(self._at(name), local))
            yield local

    def copy(self, name: str, new: str) -> None:
        try:
            if self._is_object_store:
                self._tried(lambda: self._files.cp_file(self._at(name), self._at(new)))
                return
            self._tried(lambda: self._files.cp_file(self._at(name), self._at(_temporary(new))))
            self.rename(_temporary(new), new)
        except OutOfReachError as error:
            if not isinstance(error.__cause__, NotImplementedError):
                raise
            # What cannot copy by itself: by way of this machine.
            with self.reading(name) as found, self.writing(new) as local:
                shutil.copyfile(found, local)

    def rename(self, name: str, new: str) -> None:
        self._tried(lambda: self._files.mv(self._at(name), self._at(new)))

    def remove(self, name: str) -> None:
        self._tried(lambda: self._files.rm_file(self._at(name)))

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"

    def _tried(self, action: Callable[[], Any]) -> Any:
        """Returns what an action returns; each package has errors of its own, not all of them an `OSError`."""
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as error:
            text = redacted(" ".join(str(error).split()) or type(error).__name__, self._url)
            raise OutOfReachError(f"{type(error).__name__}: {text:.300}") from error


def file_system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system of a URL, and the path in it."""
    protocol = url.partition("::")[0].partition("://")[0]
    if "reference" in re.split("::|://", url):
        raise UserError(
            f"--checkpoint_dir: {url!r} is made of a file of references, which may hold templates, and those are code; "
            "give the URL of the files themselves"
        )
    try:
        import fsspec
    except ImportError as error:
        raise UserError(
            f"--checkpoint_dir: {url!r} is read and written by fsspec, which is not installed: "
            "pip install 'kerasdp[fsspec]'"
        ) from error
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
        raise UserError(
            f"--checkpoint_dir: {url!r} needs a package for {protocol}://: pip install "
            f"{package.get(protocol, f'it ({error})')}"
        ) from error
    except Exception as error:  # of the protocol's own package, which may look for the account at once
        known = ", ".join(sorted(fsspec.available_protocols()))
        if protocol not in fsspec.available_protocols():
            raise UserError(
                f"--checkpoint_dir: fsspec knows no protocol {protocol!r}. Received: {url!r}; expected one of {known}"
            ) from error
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


_MARKER = "in-use.json"
_MOST_BYTES_OF_MARKER = 1000


def locked_folder(settings: Config) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which no other run has the folder of `checkpoint_dir`, as `locked_workdir` of the workdir.

    A URL has no locks: see `Marker`.
    """
    place = settings.checkpoint_dir
    if place is None or is_url(place):
        return contextlib.nullcontext()
    if settings.workdir is not None and os.path.realpath(place) == os.path.realpath(settings.workdir):
        return contextlib.nullcontext()  # it is locked
    return locked_workdir(place, settings.resume, "checkpoint_dir")


class Marker:
    """A file that says which run writes to a URL. Two that begin at once are told apart before their first write."""

    def __init__(self, url: str, takes_over: bool):
        """Writes the file.

        Args:
            url: of the checkpoints.
            takes_over: whether the run may follow one that has not removed its file, since it was killed.

        Raises:
            UserError: if another run has the place, and this one does not take over.
            OSError: if nothing can be read or written there.
        """
        self._url, self._folder = url, folder_at(url)
        self._own = {"run": uuid.uuid4().hex, "process": str(os.getpid()), "host": socket.gethostname()}
        if not takes_over:
            self.check()
        self._write()

    def check(self) -> None:
        """Raises `UserError` if another run writes to the place."""
        found = self._read()
        if found not in (None, self._own):
            owner = " on ".join(ascii(str((found or {}).get(name)))[1:-1][:80] for name in ("process", "host"))
            raise UserError(
                f"--checkpoint_dir: {self._url!r} is in use by another run (process {owner}); choose another place, "
                "or, if that run was killed, resume it (--resume)"
            )

    def remove(self) -> None:
        """Removes the file, if it is this run's."""
        with contextlib.suppress(OSError):
            if self._read() == self._own:
                self._folder.remove(_MARKER)

    def _read(self) -> dict[str, str] | None:
        """Returns what the file holds; None if there is none."""
        if _MARKER not in self._folder.names():
            return None
        with contextlib.suppress(FileNotFoundError), self._folder.reading(_MARKER) as path, open(path, "rb") as file:
            try:
                found = json.loads(file.read(_MOST_BYTES_OF_MARKER))
            except (ValueError, RecursionError):
                found = None
            return found if isinstance(found, dict) else {}
        return None

    def _write(self) -> None:
        with self._folder.writing(_MARKER) as path, open(path, "w") as file:
            json.dump(self._own, file)
