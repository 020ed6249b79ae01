"""Makes "hosts" of this machine: network namespaces with an address, a hostname and a network card each.

    with netns.network(2) as hosts:
        server = hosts[0].start("python", "server.py")      # subprocess.Popen
        print(hosts[1].run("ping", "-c1", hosts[0].address).stdout)

Host number i is called `host{i}`, has the address 10.77.0.{i + 1} on `eth0`, and its `/etc/hosts` names all of them.
Their cables end in a namespace of its own, the switch. Nothing of it is seen outside, so that any number of programs
can have such hosts at a time; and there is no way out to the internet. Files and process ids are those of the machine.

A process of its own takes everything away when the program ends, however it ends.
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import pathlib
import random
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

INTERFACE = "eth0"
NO_HOSTS = "needs root and network namespaces: the programs `ip` and `unshare` on Linux"
_FOLDER = pathlib.Path("/etc/netns")
# Of linux/if_packet.h and linux/if_ether.h, which Python's socket does not name.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING, _ETH_P_ALL = 263, 15, 23, 3
_VNET_HDR_BYTES = 10


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

    def traffic(self) -> tuple[int, int]:
        """Returns how many bytes have come in and gone out by its network card so far, all headers included."""
        (link,) = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show", INTERFACE))
        return link["stats64"]["rx"]["bytes"], link["stats64"]["tx"]["bytes"]

    def packets_sent(self) -> int:
        """Returns how many packets have gone out by its network card so far."""
        (link,) = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show", INTERFACE))
        return int(link["stats64"]["tx"]["packets"])

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


class Hosts(list[Host]):
    """The hosts of a network."""

    def __init__(self, hosts: list[Host], switch: str):
        super().__init__(hosts)
        self._switch = switch

    @contextlib.contextmanager
    def slowed(
        self,
        *,
        delay: float = 0.0,
        loss: float = 0.0,
        bandwidth: float | None = None,
    ) -> Iterator[None]:
        """Makes the network slow within the context.

        The switch is a program meanwhile, since not all kernels have `netem`: packets of TCP come through it as they
        leave the sender, up to 64 KiB long.

        Args:
            delay: of each packet, in seconds.
            loss: which share of the packets is lost, from 0 to 1.
            bandwidth: of each network card, in bytes a second.
        """
        ports = [f"port{host.number}" for host in self]
        for port in ports:
            _ip("-n", self._switch, "link", "set", port, "nomaster")
        arguments = [str(len(self)), f"--delay={delay}", f"--loss={loss}", f"--bandwidth={bandwidth or 0}"]
        command = ["ip", "netns", "exec", self._switch, sys.executable, __file__, "forward", *arguments]
        forwarding = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        try:
            if forwarding.stdout.readline() != "ready\n":
                raise RuntimeError("the program that slows the network has ended")
            yield
        finally:
            forwarding.kill()
            forwarding.wait()
            forwarding.stdout.close()
            for port in ports:
                _ip("-n", self._switch, "link", "set", port, "master", "bridge")


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[Hosts]:
    """Makes hosts that reach each other; takes them away at the end, with all processes on them."""
    token = f"kdp-{os.getpid()}-{secrets.token_hex(3)}"
    switch, names = f"{token}-switch", [f"{token}-host{number}" for number in range(num_hosts)]
    command = [sys.executable, __file__, "remove", switch, *names]
    # In a session of its own, so that Ctrl-C does not end it; it begins when this end of its pipe is closed.
    remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        for number, name in enumerate(names):
            _plug(number, name, switch, num_hosts)
        yield Hosts([Host(number, name, switch) for number, name in enumerate(names)], switch)
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


def _forward(chosen: argparse.Namespace) -> None:
    """Carries packets between the ports of the switch until it is killed."""
    num_hosts, delay, loss, bandwidth = chosen.num_hosts, chosen.delay, chosen.loss, chosen.bandwidth
    ports = [_open_port(number) for number in range(num_hosts)]
    drawn = random.Random(0)
    # Due times rise in each queue, since all packets have the same delay.
    queues: list[collections.deque] = [collections.deque() for _ in ports]
    free_at = [0.0] * num_hosts
    print("ready", flush=True)
    while True:
        due = min((queue[0][0] for queue in queues if queue), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        for port in select.select(ports, [], [], wait)[0]:
            packet, now = port.recv(_VNET_HDR_BYTES + 65536 + 64), time.monotonic()
            target = packet[_VNET_HDR_BYTES : _VNET_HDR_BYTES + 6]
            others = [number for number, other in enumerate(ports) if other is not port]
            number = int.from_bytes(target[4:])
            for to in others if target[0] & 1 else [number] * (number in others):
                if drawn.random() >= loss:
                    if bandwidth:
                        free_at[to] = max(now, free_at[to]) + len(packet) / bandwidth
                    queues[to].append((max(now, free_at[to]) + delay, packet))
        for port, queue in zip(ports, queues, strict=True):
            while queue and queue[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # its cable is out
                    port.send(queue.popleft()[1])


def _open_port(number: int) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # A header before each packet says what the sender left to its network card: checksums, and cutting into frames.
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE: as much as comes within a pause
    port.bind((f"port{number}", _ETH_P_ALL))
    return port


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("remove").add_argument("names", nargs="+")
    forward = commands.add_parser("forward")
    forward.add_argument("num_hosts", type=int)
    for option in ("--delay", "--loss", "--bandwidth"):
        forward.add_argument(option, type=float)
    chosen = parser.parse_args()
    if chosen.command == "remove":
        _remove(chosen.names)
    else:
        _forward(chosen)
