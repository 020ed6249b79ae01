"""Keeps two runs from writing their checkpoints to one place: a lock in a folder, a file with the run's id in a URL."""

import contextlib
import json
import os
import socket
import uuid

from kerasdp.checkpoint.storage import folder_at, is_url
from kerasdp.config import Config, locked_workdir
from kerasdp.errors import UserError

_NAME = "in-use.json"
_MOST_BYTES = 1000


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
                self._folder.remove(_NAME)

    def _read(self) -> dict[str, str] | None:
        """Returns what the file holds; None if there is none."""
        if _NAME not in self._folder.names():
            return None
        with contextlib.suppress(FileNotFoundError), self._folder.reading(_NAME) as path, open(path, "rb") as file:
            try:
                found = json.loads(file.read(_MOST_BYTES))
            except (ValueError, RecursionError):
                found = None
            return found if isinstance(found, dict) else {}
        return None

    def _write(self) -> None:
        with self._folder.writing(_NAME) as path, open(path, "w") as file:
            json.dump(self._own, file)
