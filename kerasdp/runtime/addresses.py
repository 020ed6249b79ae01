"""Finds the addresses of this machine, and those at which the processes of a run meet."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
import sys
import time

from kerasdp.errors import UserError

LOOPBACK = "127.0.0.1"
SECONDS_TO_JOIN = 900.0
_SECONDS_BETWEEN_TRIES, _SECONDS_BETWEEN_LINES = 0.5, 30.0


class Wait:
    """Waits for something for so many seconds, and says at times for what."""

    def __init__(self, seconds: float, begins_with_line: bool = False):
        """`begins_with_line`: whether it is said at once."""
        self._end = time.monotonic() + seconds
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES * (not begins_with_line)

    def is_over(self, words: str) -> bool:
        """Returns whether it has lasted too long; if not, it may be time to say for what it is."""
        now = time.monotonic()
        if now > self._end:
            return True
        if now >= self._next_line:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            print(words, file=sys.stderr, flush=True)
        return False


def own_address(coordinator: tuple[str, int], interface: str | None = None, seconds: float = SECONDS_TO_JOIN) -> str:
    """Returns this machine's address: that of the interface, or of the one on the way to the coordinator.

    Args:
        coordinator: host and port. A name that is not known yet is waited for.
        interface: name of a network interface; None: any.
        seconds: to wait for the name.

    Raises:
        UserError: if there is no such interface, or no way.
    """
    if interface is not None:
        return address_of_interface(interface)
    host, port = coordinator
    wait = Wait(seconds, begins_with_line=True)
    while True:
        try:
            family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            reason = error.strerror
            # A name may be there later, as that of a pod of Kubernetes that has not started.
            is_late = isinstance(error, socket.gaierror) and error.errno != socket.EAI_FAIL
            if not is_late or wait.is_over(f"waits for the name {host} ({reason})"):
                raise UserError(
                    f"--coordinator: no way from this machine to {host}:{port} ({reason}); check the address"
                ) from error
        time.sleep(_SECONDS_BETWEEN_TRIES)


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
