"""Processes that are linked exchange values, and notice at once when one is gone; threads and processes on loopback."""

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from kerasdp.errors import UserError
from kerasdp.runtime import host_link, messages
from kerasdp.runtime.host_link import HostLink
from kerasdp.runtime.linked_processes import LinkedProcesses
from tests.helpers import ROOT, environment

# A process of three, which says what it hears, and then waits.
PROGRAM = """
import sys, time
from kerasdp.errors import UserError
from kerasdp.runtime import host_link, linked_processes
host_link.SECONDS_OF_SILENCE = 3.0
rank, port = int(sys.argv[1]), int(sys.argv[2])
link = host_link.HostLink.among(rank, 3, "127.0.0.1", port, "127.0.0.1")
cluster = object()
linked_processes.use_link(link, cluster)
print(link.all_gather_object(rank), flush=True)
if len(sys.argv) > 3 and rank == 1:
    try:
        with linked_processes.ending_together(cluster):
            raise UserError("no such file")
    except UserError:
        sys.exit(2)
time.sleep(60)
"""


def free_door():
    door = messages.listen("127.0.0.1", 0)
    return door, door.getsockname()[1]


def linked(number, door, port):
    """The links of so many ranks, all of this process."""
    with concurrent.futures.ThreadPoolExecutor(number) as threads:
        return list(threads.map(
            lambda rank: HostLink.among(rank, number, "127.0.0.1", port, "127.0.0.1", None if rank else door),
            range(number),
        ))  # fmt: skip


def test_values_are_exchanged_in_order():
    links = linked(3, *free_door())
    ranks = [LinkedProcesses(link) for link in links]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:

        def exchange(rank):
            found = [rank.all_gather_object({"rank": rank.rank}), rank.broadcast_from_rank0([rank.rank + 0.5])]
            found += [rank.any_rank(rank.rank == 2), rank.any_rank(False)]
            return found + [rank.all_reduce_max_delayed(10 * step + rank.rank) for step in range(3)]

        everyone = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert list(threads.map(exchange, ranks)) == [[everyone, [0.5], True, False, 0, 2, 12]] * 3
        # Parts of several scatters, each with numbers of its own.
        scatters = [[rank.open_scatter(), rank.open_scatter()] for rank in ranks]

        def hand_out(both):
            return [both[channel]([np.full(2, 100 * channel + rank) for rank in range(3)], number).tolist()
                    for number in range(2) for channel in range(2)]  # fmt: skip

        def same_number(both):  # as of the first batch: process 0 is ahead
            if both[0].rank:
                time.sleep(0.3)
            return [both[0]([turn] * 3, 0) for turn in range(3)]

        assert list(threads.map(same_number, scatters)) == [[0, 1, 2]] * 3
        assert list(threads.map(hand_out, scatters)) == [[[rank] * 2, [100 + rank] * 2] * 2 for rank in range(3)]
    for link in links:
        link.leave()


def test_only_who_knows_the_secret_may_join(monkeypatch):
    monkeypatch.setenv("KERASDP_SECRET", "one")
    door, port = free_door()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        first = threads.submit(HostLink.among, 0, 2, "127.0.0.1", port, "127.0.0.1", door)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        call = f"from kerasdp.runtime import messages; messages.connect('127.0.0.1', {port}, b'', 5.0)"
        for other in ({"KERASDP_SECRET": "two"}, {}):
            env = environment(PYTHONPATH=str(ROOT), **other)  # without that of this process
            done = subprocess.run([sys.executable, "-c", call], env=env, capture_output=True, text=True)
            assert f"127.0.0.1:{port} knows another KERASDP_SECRET: set the same one" in done.stderr
        second = HostLink.among(1, 2, "127.0.0.1", port, "127.0.0.1")
        assert second.names == first.result(20).names
        for link in (second, first.result()):
            link.leave()


def test_nobody_listens():
    door, port = free_door()
    door.close()
    with pytest.raises(UserError, match=f"nobody listens at 127.0.0.1:{port} for 0 s"):
        messages.connect("127.0.0.1", port, b"", 0.3)
    taken, port = free_door()
    with taken, pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{port} .Address already in use"):
        messages.listen("127.0.0.1", port)


def test_the_interface_on_the_way():
    assert messages.own_address(("127.0.0.1", 80)) == "127.0.0.1" == messages.address_of_interface("lo")
    assert messages.interface_of_address("127.0.0.1") == "lo"
    with pytest.raises(UserError, match="interface: expected one with an IPv4 address, of lo.*Received: 'nosuch'"):
        messages.own_address(("127.0.0.1", 80), "nosuch")


def three(*arguments):
    door, port = free_door()
    door.close()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port), *arguments], text=True,
            env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]  # fmt: skip
    if not arguments:
        assert [process.stdout.readline() for process in processes] == ["[0, 1, 2]\n"] * 3
    return processes


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "has left"), (signal.SIGSTOP, "not been heard of")])
def test_one_that_is_gone_ends_the_others(victim, number, words):
    processes = three()
    begin = time.monotonic()
    os.kill(processes[victim].pid, number)
    for rank, process in enumerate(processes):
        if rank != victim:
            _, stderr = process.communicate(timeout=20)
            assert process.returncode == 1
            assert f"error: host 127.0.0.1 ({socket.gethostname()}, process {victim}) has" in stderr and words in stderr
    assert time.monotonic() - begin < host_link.SECONDS_OF_SILENCE
    processes[victim].kill()
    processes[victim].communicate()


def test_the_error_of_one_ends_the_others():
    for rank, process in enumerate(three("fails")):
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 2
        assert rank == 1 or "process 1) failed: no such file" in stderr
