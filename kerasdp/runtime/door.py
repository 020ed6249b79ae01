"""Lets the processes of a run meet, and nobody else.

Between machines both ends show that they know KERASDP_SECRET, by a digest over what the other one has just made up. On
one machine the socket lies in a folder that only the user who runs it can enter. Only then is anything read that is
more than a few numbers and a name, in JSON.
"""

import contextlib
import hashlib
import hmac
import json
import os
import queue
import resource
import secrets
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kerasdp.errors import UserError
from kerasdp.runtime import addresses

# Of a secret that nobody guesses.
FEWEST_LETTERS = 16
# Where the processes of a run meet: host and port; or, on one machine, the path of a socket.
Place = tuple[str, int] | str

# The name in front tells other programs that knock.
_GREETING = b"kerasdp 2\n"
_NONCE, _DIGEST, _MOST_WORDS = 32, 32, 4096
# What a process that joins answers: the greeting, a nonce of its own, the digest, and the bytes of words after it.
_ANSWER = struct.Struct(f"<{len(_GREETING)}s{_NONCE}s{_DIGEST}sI")
# A whole greeting; those that are slower are sent away, the oldest first when there are too many.
_SECONDS_TO_GREET, _MOST_GREETINGS = 10.0, 256
_SECONDS_BETWEEN_TRIES = 0.2
# Once may be a greeting that was corrupted on its way.
_TIMES_REFUSED = 3


def secret() -> bytes:
    """Returns what all processes of a run on several machines know, and others do not."""
    return os.fsencode(os.environ.get("KERASDP_SECRET", ""))  # any bytes, as those of /dev/urandom


def require_secret(source: str) -> None:
    """Raises `UserError` unless there is a secret; `source`: who says that there are several machines."""
    if (length := len(secret())) < FEWEST_LETTERS:
        raise UserError(
            f"{source}: several machines need a secret, so that nobody else joins them: expected KERASDP_SECRET in the "
            f"environment of each process, the same on all, of {FEWEST_LETTERS} letters or more. Received: "
            f"{f'one of {length}' if length else 'none'}; make it once, "
            "export KERASDP_SECRET=$(python -c 'import secrets; print(secrets.token_hex(16))'), and hand it to each"
        )


def private_folder() -> str:
    """Returns this user's folder for the sockets of runs on this machine, which nobody else can enter.

    Raises:
        UserError: if another user has made a folder of that name.
    """
    path = os.path.join(tempfile.gettempdir(), f"kerasdp-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"expected {path} to be a folder of this user alone (mode 0700); remove it, or set TMPDIR")
    return path


class Door:
    """Listens for the processes of a run until all have come; each greeting has a thread and a deadline of its own.

    Attributes:
        place: where it listens.
    """

    def __init__(self, place: Place):
        """Begins to listen; at port 0: at any free one.

        Raises:
            UserError: if that cannot be had.
        """
        self._greeting = list[socket.socket]()
        self._come: queue.SimpleQueue[tuple[socket.socket, dict[str, Any]]] = queue.SimpleQueue()
        self._refused, self._is_closed = set[str](), threading.Event()
        # Strangers leave this process files of its own to open (256 at a time on macOS).
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = _MOST_GREETINGS if limit == resource.RLIM_INFINITY else min(_MOST_GREETINGS, 1 + limit // 4)
        self._socket = _listen_at_path(place) if isinstance(place, str) else addresses.listen(*place)
        self.place = place if isinstance(place, str) else self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True, name="door").start()

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        for connection in [self._socket, *self._greeting]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if isinstance(self.place, str):
            os.unlink(self.place)

    def next(self, seconds: float) -> tuple[socket.socket, dict[str, Any]] | None:
        """Returns the next one that may join, and what it says of itself; None if none comes."""
        with contextlib.suppress(queue.Empty):
            return self._come.get(timeout=seconds)
        return None

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, address = self._socket.accept()
                self._greeting.append(connection)
                for oldest in self._greeting[: -self._most]:
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
                name = str(address[0]) if address else ""
                try:
                    threading.Thread(target=self._greet, args=(connection, name), daemon=True, name="greeting").start()
                except RuntimeError:
                    self._greeting.remove(connection)
                    connection.close()
                    raise
            except (OSError, RuntimeError):  # closed; or there are too many files or threads, for a moment
                self._is_closed.wait(_SECONDS_BETWEEN_TRIES)

    def _greet(self, connection: socket.socket, address: str) -> None:
        said = None
        with contextlib.suppress(OSError, ValueError):
            said = self._words_of(connection, address)
        self._greeting.remove(connection)  # before another thread may end the greetings
        if said is None:
            connection.close()
        else:
            self._come.put((connection, said))

    def _words_of(self, connection: socket.socket, address: str) -> Any:
        """Lets a process that has connected show that it knows the secret, and hear that this one does."""
        mine, read = secrets.token_bytes(_NONCE), _reader(connection)
        connection.sendall(_GREETING + mine)
        greeting, theirs, digest, size = _ANSWER.unpack(read(_ANSWER.size))
        if greeting != _GREETING or size > _MOST_WORDS:
            raise ConnectionRefusedError("another program")
        words = read(size)
        if not hmac.compare_digest(digest, _digest(b"joins", mine, theirs, words)):
            connection.sendall(bytes(_DIGEST))
            self._refuse(address)
            raise ConnectionRefusedError("another secret")
        connection.sendall(_digest(b"listens", theirs, mine))
        return json.loads(words)

    def _refuse(self, address: str) -> None:
        if address not in self._refused and len(self._refused) < _MOST_GREETINGS:
            self._refused.add(address)
            print(f"refused a process at {address}, which has another KERASDP_SECRET", file=sys.stderr, flush=True)


def connect(place: Place, words: dict[str, Any], seconds: float = addresses.SECONDS_TO_JOIN) -> socket.socket:
    """Connects to the process that listens there, as soon as it does; `words`: what to say of this one.

    Raises:
        UserError: if nobody listens there for so many seconds, or it knows another secret.
    """
    wait, num_refused = addresses.Wait(seconds), 0
    name = place if isinstance(place, str) else f"{place[0]}:{place[1]}"
    while True:
        try:
            return _connected(place, json.dumps(words).encode())
        except _OtherSecretError as error:
            num_refused += 1
            if num_refused == _TIMES_REFUSED:
                raise UserError(f"--coordinator: {name} knows another KERASDP_SECRET: set the same one") from error
            reason = "it knows another KERASDP_SECRET"
        except OSError as error:
            reason = error.strerror or str(error)
        if wait.is_over(f"waits for {name} ({reason})"):
            raise UserError(
                f"--coordinator: nobody listens at {name} for {seconds:.0f} s ({reason}); start process 0, and "
                "check address, port and firewall"
            )
        time.sleep(_SECONDS_BETWEEN_TRIES)


class _OtherSecretError(Exception):
    pass


def _connected(place: Place, words: bytes) -> socket.socket:
    if isinstance(place, str):
        connection = socket.socket(socket.AF_UNIX)
        with _short(place) as path:
            connection.connect(path)
    else:
        connection = socket.create_connection(place, _SECONDS_TO_GREET)
    try:
        read = _reader(connection)
        if read(len(_GREETING)) != _GREETING:
            raise ConnectionRefusedError("another program listens there")
        mine, theirs = secrets.token_bytes(_NONCE), read(_NONCE)
        digest = _digest(b"joins", theirs, mine, words)
        connection.sendall(_ANSWER.pack(_GREETING, mine, digest, len(words)) + words)
        try:
            answer = read(_DIGEST)
        except ConnectionResetError:
            raise ConnectionRefusedError("it accepts no connections now") from None
        if not hmac.compare_digest(answer, _digest(b"listens", mine, theirs)):
            raise _OtherSecretError
    except BaseException:
        connection.close()
        raise
    return connection


def _reader(connection: socket.socket) -> Callable[[int], bytes]:
    """Returns a function that reads so many bytes; all of them together have a deadline."""
    end = time.monotonic() + _SECONDS_TO_GREET
    connection.settimeout(_SECONDS_TO_GREET)

    def read(size: int) -> bytes:
        content = b""
        while len(content) < size:
            connection.settimeout(max(0.001, end - time.monotonic()))
            part = connection.recv(size - len(content))
            if not part:
                raise ConnectionResetError("the other end has left")
            content += part
        return content

    return read


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """Yields another path of a socket, of the few letters that its address has room for (unix(7): 107)."""
    folder, name = os.path.split(path)
    if sys.platform != "linux":
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def _listen_at_path(path: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    with _short(path) as short:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(short)
            raise UserError(f"another run's processes meet at {path}: give this one another MASTER_PORT")
        with contextlib.suppress(FileNotFoundError):  # of a run that was killed
            os.unlink(path)
        door.bind(short)
    door.listen(1024)
    return door


def _digest(role: bytes, *parts: bytes) -> bytes:
    return hmac.new(secret(), role + b"".join(parts), hashlib.sha256).digest()
