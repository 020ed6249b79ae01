"""Finds what the processes of a run listen on: TCP, UDP and Unix sockets, and who can reach them."""

import contextlib
import dataclasses
import ipaddress
import os
import pathlib
import re
import stat

_TCP_LISTENS, _UDP_UNCONNECTED, _UNIX_LISTENS = "0A", "07", 0x10000  # linux/tcp_states.h, linux/net.h
_UNIX_DATAGRAMS = "0002"


@dataclasses.dataclass(frozen=True)
class Listener:
    """A socket that others can send to.

    Attributes:
        pid: of a process that has it.
        process: what that is, in short.
        kind: `"tcp"`, `"udp"` or `"unix"`.
        address: an IP address; or the path of a Unix socket, which begins with @ if it is abstract.
        port: of TCP and UDP.
    """

    pid: int
    process: str
    kind: str
    address: str
    port: int = 0

    @property
    def is_loopback(self) -> bool:
        """Whether other machines cannot reach it."""
        return self.kind == "unix" or ipaddress.ip_address(self.address).is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether it is at every address of the machine."""
        return self.kind != "unix" and ipaddress.ip_address(self.address).is_unspecified

    def __str__(self) -> str:
        where = self.address if self.kind == "unix" else f"{self.address}:{self.port}"
        return f"{self.pid:>8}  {self.process:<40}  {self.kind:<4}  {where}"


def listeners(pids) -> list[Listener]:
    """Returns all sockets of these processes, which are in one network namespace, that others can send to."""
    owners = _owners(pids)
    if not owners:
        return []
    net = pathlib.Path(f"/proc/{next(iter(owners.values()))}/net")
    found = []
    for kind, state in (("tcp", _TCP_LISTENS), ("tcp6", _TCP_LISTENS), ("udp", _UDP_UNCONNECTED),
                        ("udp6", _UDP_UNCONNECTED)):  # fmt: skip
        with contextlib.suppress(FileNotFoundError):  # a machine without IPv6
            for line in (net / kind).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == state and (pid := owners.get(fields[9])) is not None:
                    found.append(Listener(pid, _name(pid), kind[:3], *_address(fields[1])))
    for line in (net / "unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        is_open = int(fields[3], 16) & _UNIX_LISTENS or fields[4] == _UNIX_DATAGRAMS
        if len(fields) == 8 and is_open and (pid := owners.get(fields[6])) is not None:
            found.append(Listener(pid, _name(pid), "unix", _absolute(fields[7], pid)))
    return sorted(found, key=lambda each: (each.pid, each.kind, each.address, each.port))


def shared_memory(pids) -> list[str]:
    """Returns the files in memory that these processes share with others, as far as they have a name."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
            found |= set(re.findall(r"/dev/shm/\S+", maps))
    return sorted(path for path in found if os.path.exists(path))


def table(title: str, pids) -> str:
    """Returns the listeners as lines, and how many processes there are that may have some."""
    lines = [f"  {each}" for each in listeners(pids)] or ["  nothing listens"]
    return "\n".join([f"\n{title}: {len(pids)} processes", *lines])


def reachable_by_others(path: str) -> bool:
    """Whether a user who is neither owner nor of the group can use a Unix socket, or open a file."""
    if path.startswith("@"):
        return True  # abstract: no folder guards it
    try:
        for folder in pathlib.Path(path).parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                return False
        return bool(os.stat(path).st_mode & (stat.S_IWOTH | stat.S_IROTH))
    except FileNotFoundError:
        return False  # it was removed once all had connected


def _owners(pids) -> dict[str, int]:
    """The first process that has each socket, by its inode."""
    owners: dict[str, int] = {}
    for pid in sorted(pids):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{entry}"))
                    if match:
                        owners.setdefault(match[1], pid)
    return owners


def _address(text: str) -> tuple[str, int]:
    """Of /proc/net: words of four bytes, each as the processor has them."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[place : place + 8])[::-1] for place in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)


def _absolute(path: str, pid: int) -> str:
    """A path that the process may have given by one of its folders."""
    if path.startswith(("@", "/")) and not path.startswith("/proc/self/"):
        return path
    own = path.replace("/proc/self/", f"/proc/{pid}/")
    place = os.path.join(f"/proc/{pid}/cwd", own)
    if os.path.exists(place):
        return os.path.realpath(place)
    # Its folder was that one only while it bound the socket.
    for root in {tmpdir_of(pid), "/tmp"}:  # noqa: S108
        for folder, _, files in os.walk(root):
            if os.path.basename(path) in files:
                return os.path.join(folder, os.path.basename(path))
    return path


def tmpdir_of(pid: int) -> str:
    """The folder of temporary files that a process was started with."""
    with contextlib.suppress(OSError):
        for variable in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"TMPDIR="):
                return variable.removeprefix(b"TMPDIR=").decode()
    return "/tmp"  # noqa: S108


def _name(pid: int) -> str:
    words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    for word in words:
        if match := re.search(r"(spawn_main|forkserver|resource_tracker)", word):
            return match[1]
    return " ".join(os.path.basename(word) for word in words[:3])[:40].strip()
