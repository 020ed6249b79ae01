"""Sends messages between the processes of a run over TCP: framing, addresses, and who may join."""

import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import sys
import threading
import time

from kerasdp.errors import UserError

# Of a message: its kind, its channel, its number on that channel, and the bytes after it.
_HEAD = struct.Struct("<BIqq")
# Both ends show that they know the secret, by a digest over what the other one has just made up. The name in front
# tells other programs that knock.
_GREETING = b"kerasdp 1\n"
_NONCE, _DIGEST, _MOST_WORDS = 32, 32, 4096
_SECONDS_TO_GREET = 10.0
_SECONDS_BETWEEN_TRIES = 0.2
_SECONDS_BETWEEN_LINES = 30.0


def secret() -> bytes:
    """Returns what all processes of a run know and others do not, if `KERASDP_SECRET` is set on each machine."""
    return os.environ.get("KERASDP_SECRET", "").encode()


def own_address(coordinator: tuple[str, int], interface: str | None = None) -> str:
    """Returns this machine's address: that of the interface, or of the one on the way to the coordinator.

    Raises:
        UserError: if there is no such interface, or no way.
    """
    if interface is not None:
        return address_of_interface(interface)
    host, port = coordinator
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"--coordinator: no way from this machine to {host}:{port} ({error.strerror}); check the address"
        ) from error


def check_name(host: str) -> None:
    """Raises `UserError` if the name of this machine is known to this machine alone.

    Debian's and Ubuntu's /etc/hosts says 127.0.1.1 of it: this machine would listen where no other one can reach it.
    """
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return  # whoever listens there says so
    if host in (address, "localhost") or not ipaddress.ip_address(address).is_loopback:
        return
    others = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(UserError):
            others.append(f"{address_of_interface(name)} ({name})")
    known = ", ".join(other for other in others if not other.startswith("127.")) or "none that is known"
    raise UserError(
        f"--coordinator: expected an address that other machines reach. Received: {host}, which is {address} on its "
        f"own machine (/etc/hosts); give its address there as --coordinator=ADDRESS:PORT: {known}"
    )


def address_of_interface(name: str) -> str:
    """Returns the IPv4 address of a network interface.

    Raises:
        UserError: if there is none.
    """
    siocgifaddr = 0x8915  # netdevice(7), on Linux
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
    except OSError as error:
        known = ", ".join(known for _, known in socket.if_nameindex())
        raise UserError(
            f"--interface: expected one with an IPv4 address, of {known}. Received: {name!r} ({error.strerror})"
        ) from error
    return socket.inet_ntoa(answer[20:24])


def interface_of_address(address: str) -> str | None:
    """Returns the network interface that has an IPv4 address; None if none has."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(UserError):
            if address_of_interface(name) == address:
                return name
    return None


class Channel:
    """A connection to another process, in which whole messages travel. Sending is for any thread."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._lock = connection, threading.Lock()

    def send(self, kind: int, channel: int = 0, number: int = 0, content: bytes = b"") -> None:
        """Sends a message. Raises `OSError` if the other end is gone."""
        with self._lock:
            self._socket.sendall(_HEAD.pack(kind, channel, number, len(content)) + content)

    def receive(self) -> tuple[int, int, int, bytes]:
        """Returns kind, channel, number and content of the next message. Raises `OSError` if there are no more."""
        kind, channel, number, size = _HEAD.unpack(received(self._socket, _HEAD.size))
        return kind, channel, number, received(self._socket, size)

    def close(self) -> None:
        """Ends the connection, also for a thread that waits for a message."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def received(connection: socket.socket, size: int) -> bytes:
    """Returns so many bytes. Raises `OSError` if there are no more."""
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 2**20))
        if not part:
            raise ConnectionResetError("the other end has left")
        parts += part
    return bytes(parts)


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address of this machine; port 0: any free one.

    Raises:
        UserError: if it cannot.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        door = socket.socket(family, kind)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # that of a run that has just ended
        door.bind(place)
        door.listen(1024)
    except OSError as error:
        raise UserError(
            f"--coordinator: process 0 cannot listen at {host}:{port} ({error.strerror}); give an address of its own "
            "machine, and a port that is free there"
        ) from error
    return door


def greeted(connection: socket.socket) -> bytes:
    """Lets a process that has connected show that it knows the secret; returns what it says of itself.

    Raises:
        OSError: if it does not, or is another program.
    """
    connection.settimeout(_SECONDS_TO_GREET)
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(_GREETING + mine)
    theirs = received(connection, len(_GREETING) + _NONCE + _DIGEST + 4)
    nonce, digest = theirs[len(_GREETING) : len(_GREETING) + _NONCE], theirs[-_DIGEST - 4 : -4]
    size = int.from_bytes(theirs[-4:], "little")
    if not theirs.startswith(_GREETING) or size > _MOST_WORDS:
        raise ConnectionRefusedError("another program")
    words = received(connection, size)
    if not hmac.compare_digest(digest, _digest(b"joins", mine, nonce)):
        connection.sendall(bytes(_DIGEST))
        raise ConnectionRefusedError("another KERASDP_SECRET")
    connection.sendall(_digest(b"listens", nonce, mine))
    return words


def connect(host: str, port: int, words: bytes, seconds: float) -> socket.socket:
    """Connects to the process that listens there, as soon as it does; `words`: what to say of this one.

    Raises:
        UserError: if nobody listens there for so many seconds, or it knows another secret.
    """
    begin = told = time.monotonic()
    while True:
        try:
            return _connected(host, port, words)
        except PermissionError as error:
            raise UserError(f"--coordinator: {host}:{port} knows another KERASDP_SECRET: set the same one") from error
        except OSError as error:
            reason = error.strerror or str(error)
        now = time.monotonic()
        if now - begin > seconds:
            raise UserError(
                f"--coordinator: nobody listens at {host}:{port} for {seconds:.0f} s ({reason}); start process 0, and "
                "check address, port and firewall"
            )
        if now - told > _SECONDS_BETWEEN_LINES:
            told = now
            print(f"waits for {host}:{port} ({reason})", file=sys.stderr, flush=True)
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _connected(host: str, port: int, words: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), _SECONDS_TO_GREET)
    try:
        greeting = received(connection, len(_GREETING) + _NONCE)
        if not greeting.startswith(_GREETING):
            raise ConnectionRefusedError("another program listens there")
        mine, theirs = secrets.token_bytes(_NONCE), greeting[len(_GREETING) :]
        connection.sendall(
            _GREETING + mine + _digest(b"joins", theirs, mine) + len(words).to_bytes(4, "little") + words
        )
        try:
            answer = received(connection, _DIGEST)
        except ConnectionResetError:
            raise ConnectionRefusedError("it takes nobody now") from None
        if not hmac.compare_digest(answer, _digest(b"listens", mine, theirs)):
            raise PermissionError("another secret")
    except BaseException:
        connection.close()
        raise
    return connection


def _digest(role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret(), role + first + second, hashlib.sha256).digest()
