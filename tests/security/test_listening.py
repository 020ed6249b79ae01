"""What a run of one machine listens on: loopback alone; and no other user opens its sockets and files."""

import contextlib
import glob
import ipaddress
import os
import pathlib
import re
import shutil
import socket
import stat
import sys
import tempfile

import pytest

from tests.helpers import PROGRAMS, all_but, killed_at_the_end, session_members, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
STATES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # that listen, of linux/tcp_states.h


def listeners(pids):
    """IP addresses, and paths of Unix sockets, at which these processes can be sent something."""
    own, found = set(), []
    for path in (path for pid in pids for path in glob.glob(f"/proc/{pid}/fd/*")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            own |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(path)))
    for kind, state in STATES.items():
        with contextlib.suppress(FileNotFoundError):  # a machine without IPv6
            rows = [line.split() for line in pathlib.Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
            found += [address_of(row[1]) for row in rows if row[3] == state and row[9] in own]
    rows = [line.split(maxsplit=7) for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]]
    return found + [row[7] for row in rows if len(row) == 8 and row[6] in own]


def address_of(text):
    """Of /proc/net: words of four bytes, each as the processor has them."""
    digits = text.partition(":")[0]
    words = [bytes.fromhex(digits[place : place + 8])[::-1] for place in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


def is_reachable(place):
    """Whether another machine, or a user who is neither owner nor of the group, can send something, or open a file."""
    if not isinstance(place, str):
        return not place.is_loopback
    if place.startswith("@"):
        return True  # abstract: no folder guards it
    try:
        guards = [folder.stat().st_mode & stat.S_IXOTH for folder in pathlib.Path(place).parents]
        return all(guards) and bool(os.stat(place).st_mode & (stat.S_IWOTH | stat.S_IROTH))
    except FileNotFoundError:
        return False  # it was removed once all had connected


@pytest.fixture
def temporary():
    """A TMPDIR with the rights of /tmp."""
    folder = tempfile.mkdtemp(prefix="kdp-", dir="/tmp")  # noqa: S108
    os.chmod(folder, 0o1777)  # noqa: S103
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@all_but("jax", "tensorflow")
def test_on_one_machine_no_other_machine_and_no_other_user_is_heard(backend, temporary, tmp_path):
    process = start(PROGRAMS / "signalled.py", "script", backend, 2, tmp_path, backend=backend, TMPDIR=temporary)
    with killed_at_the_end(process):
        assert any(line.startswith("READY") for line in process.stdout), process.stderr.read()
        pids = session_members(process.pid)
        assert len(pids) >= (3 if backend == "torch" else 1)
        places = [*listeners(pids), *map(str, pathlib.Path(temporary).rglob("*"))]
        print(f"\n{backend}: {len(pids)} processes, {list(map(str, places))}")
        assert [place for place in places if is_reachable(place)] == []
        assert places or backend != "torch"


def test_what_others_could_reach_is_found(temporary):
    path = f"{temporary}/open"
    with socket.create_server(("0.0.0.0", 0)), socket.socket(socket.AF_UNIX) as unix:  # noqa: S104
        unix.bind(path)
        unix.listen()
        os.chmod(path, 0o777)  # noqa: S103
        found = listeners([os.getpid()])
    assert ipaddress.ip_address("0.0.0.0") in found and path in found  # noqa: S104
    assert is_reachable(path) and is_reachable(ipaddress.ip_address("0.0.0.0"))  # noqa: S104
