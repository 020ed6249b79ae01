"""Makes "hosts" of this machine: network namespaces with an address, a hostname and a network card each.

    with netns.network(2) as hosts:
        server = hosts[0].start("python", "server.py")      # subprocess.Popen
        print(hosts[1].run("ping", "-c1", hosts[0].address).stdout)

Host number i is called `host{i}`, has the address 10.77.0.{i + 1} on `eth0`, and its `/etc/hosts` names all of them.
Their cables end in a namespace of its own, the switch. Nothing of it is seen outside, so that any number of programs
can have such hosts at a time; and there is no way out to the internet. Files and process ids are those of the machine.

A process of its own takes everything away when the program ends, however it ends.
"""

import contextlib
import functools
import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

INTERFACE = "eth0"
NO_HOSTS = "needs root and network namespaces: the programs `ip` and `unshare` on Linux"
_FOLDER = pathlib.Path("/etc/netns")


def address_of(number: int) -> str:
    """Returns the address of the host with that number."""
    return f"10.77.0.{number + 1}"


@functools.cache
def hosts_available() -> bool:
    """Returns whether hosts can be made here; `NO_HOSTS` says what it takes."""
    if sys.platform != "linux" or os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        return False
    name = f"kdp-probe-{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    _ip("netns", "del", name)
    return True


class Host:
    """One of the hosts."""

    def __init__(self, number: int, namespace: str, switch: str):
        self.number, self.namespace, self._switch = number, namespace, switch
        self.name, self.address = f"host{number}", address_of(number)

    def command(self, *command: object) -> list[str]:
        """Returns the command that runs another on this host."""
        named = ["unshare", "-u", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.namespace, *named, *map(str, command)]

    def start(self, *command: object, **options) -> subprocess.Popen:
        """Starts a command, in a session of its own; its `pid` is that of the command itself.

        `options`: of `subprocess.Popen`. Without any, its output comes as text by the pipes `stdout` and `stderr`.
        """
        kept = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen(self.command(*command), stdin=subprocess.DEVNULL, **kept | options)

    def run(self, *command: object, timeout: float = 60, **options) -> subprocess.CompletedProcess:
        """Runs a command to its end."""
        kept = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": timeout}
        return subprocess.run(self.command(*command), **kept | options)

    def sent(self) -> tuple[int, int]:
        """Returns how many bytes, all headers included, and packets have gone out by its network card so far."""
        (link,) = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show", INTERFACE))
        return link["stats64"]["tx"]["bytes"], link["stats64"]["tx"]["packets"]

    def set_cable(self, is_in: bool) -> None:
        """Pulls the network cable out, or puts it in again. Nobody is told: packets do not arrive."""
        _ip("-n", self._switch, "link", "set", f"port{self.number}", "up" if is_in else "down")

    def processes(self) -> list[int]:
        """Returns the ids of all processes on this host."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def power_off(self) -> None:
        """Ends the host as a power cut does: its processes are gone, and no packet tells so."""
        self.set_cable(False)
        _kill(self.namespace)


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[list[Host]]:
    """Makes hosts that reach each other; takes them away at the end, with all processes on them."""
    token = f"kdp-{os.getpid()}-{secrets.token_hex(3)}"
    switch, names = f"{token}-switch", [f"{token}-host{number}" for number in range(num_hosts)]
    command = [sys.executable, __file__, switch, *names]
    # In a session of its own, so that Ctrl-C does not end it; it begins when this end of its pipe is closed.
    remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        for number, name in enumerate(names):
            _plug(number, name, switch, num_hosts)
        yield [Host(number, name, switch) for number, name in enumerate(names)]
    finally:
        remover.stdin.close()
        remover.wait(60)


def _plug(number: int, name: str, switch: str, num_hosts: int) -> None:
    folder = _FOLDER / name
    folder.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{address_of(other)} host{other}" for other in range(num_hosts))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "resolv.conf").write_text("")  # names of other machines are not found, at once
    _ip("netns", "add", name)
    card = ["name", INTERFACE, "address", _hardware_address(number), "netns", name]
    port = f"port{number}"
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", *card)
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "address", "add", f"{address_of(number)}/24", "dev", INTERFACE)
    _ip("-n", name, "link", "set", INTERFACE, "up")


def _hardware_address(number: int) -> str:
    return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _kill(namespace: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # a process may start others meanwhile
        found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def _remove(names: list[str]) -> None:
    """Waits until the program that made the hosts has ended, or is done with them, and takes them away."""
    sys.stdin.buffer.read()
    for name in names:
        _kill(name)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(_FOLDER / name, ignore_errors=True)


if __name__ == "__main__":
    _remove(sys.argv[1:])
