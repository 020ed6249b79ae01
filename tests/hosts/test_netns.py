"""Hosts of this machine are hosts: own address and name, a network that is counted and cut."""

import os
import subprocess
import sys
import time

import pytest

from tests.helpers import ROOT, session_members
from tests.hosts import netns

pytestmark = pytest.mark.skipif(not netns.hosts_available(), reason=netns.NO_HOSTS)

ANSWER = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("listens", flush=True)
while True:
    connection, _ = server.accept()
    while received := connection.recv(1 << 20):
        connection.sendall(b"!" if received.endswith(b"?") else b"")
    connection.close()
"""
# Connects, and prints how long an answer takes once it is connected.
ASK = """
import socket, sys, time
connection = socket.create_connection(("host0", 5000), timeout=float(sys.argv[2]))
connection.sendall(bytes(int(sys.argv[1])))
start = time.perf_counter()
connection.sendall(b"?")
connection.recv(1)
print(time.perf_counter() - start)
"""


@pytest.fixture
def hosts():
    with netns.network(2) as found:
        server = found[0].start(sys.executable, "-c", ANSWER, found[0].address)
        assert server.stdout.readline() == "listens\n", server.communicate()[1]
        yield found
        server.kill()
        server.communicate()


def ask(host, num_bytes=0, timeout=1):
    return host.run(sys.executable, "-c", ASK, num_bytes, timeout)


def ask_until_answered(host):
    """Linux asks for an unanswered address again after a second, and gives up after three: then it is asked anew."""
    assert any(ask(host, timeout=5).returncode == 0 for _ in range(3))


def test_each_has_a_name_and_an_address_and_its_bytes_are_counted(hosts):
    for host in hosts:
        done = host.run("sh", "-c", "hostname && getent hosts $(hostname)")
        assert done.stdout.split() == [host.name, host.address, host.name], done
    (came_in, _), (_, went_out) = hosts[0].traffic(), hosts[1].traffic()
    done = ask(hosts[1], 1_000_000)
    assert done.returncode == 0, done.stderr
    for counted in (hosts[0].traffic()[0] - came_in, hosts[1].traffic()[1] - went_out):
        assert 1_000_000 < counted < 1_100_000
    assert hosts[0].run("ip", "route", "get", "192.0.2.1").returncode  # no way out


def test_a_cable_is_pulled_out_and_put_in(hosts):
    hosts[1].set_cable(False)
    done = ask(hosts[1])
    assert done.returncode and ("timed out" in done.stderr or "No route" in done.stderr), done
    hosts[1].set_cable(True)
    ask_until_answered(hosts[1])


def test_power_off(hosts):
    sleeping = hosts[1].start("sleep", "60")
    assert hosts[1].run("true").returncode == 0 and sleeping.pid in hosts[1].processes()
    hosts[1].power_off()
    assert sleeping.wait(5) == -9 and not hosts[1].processes() and hosts[0].processes()


def test_a_program_that_is_killed_leaves_nothing():
    code = "import sys, time; from tests.hosts import netns\nwith netns.network(2) as hosts:\n"
    code += "  print(hosts[0].namespace, hosts[0].start('sleep', '60').pid, flush=True); time.sleep(60)"
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    namespace, pid = program.stdout.readline().split()
    assert namespace in os.listdir("/run/netns")
    program.kill()
    program.wait()
    deadline = time.monotonic() + 20
    while any(name.startswith(namespace[:-6]) for name in [*os.listdir("/run/netns"), *os.listdir("/etc/netns")]):
        assert time.monotonic() < deadline, "namespaces are left"
        time.sleep(0.05)
    assert not session_members(int(pid))
