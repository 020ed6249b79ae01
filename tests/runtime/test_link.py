"""Processes that are linked exchange values, and notice at once when one is gone; threads and processes on loopback."""

import concurrent.futures
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kerasdp.config import Config
from kerasdp.errors import NonFiniteLossError, RunError, UserError
from kerasdp.runtime import addresses, door, link
from kerasdp.runtime.channel import Channel
from kerasdp.runtime.cluster import Cluster, check_cluster
from kerasdp.runtime.door import Door
from kerasdp.runtime.link import Link
from kerasdp.runtime.linked_processes import LinkedProcesses
from tests.helpers import ROOT, environment

# A process of three, which says what it hears, and then waits.
PROGRAM = """
import sys, time
from kerasdp.errors import UserError
from kerasdp.runtime import link, linked_processes
link.SECONDS_OF_SILENCE = 3.0
rank, port = int(sys.argv[1]), int(sys.argv[2])
linked_processes._link = own = link.Link.among(rank, 3, ("127.0.0.1", port), "127.0.0.1")
print(own.all_gather_object(rank), flush=True)
if sys.argv[3:] == ["fails"] and rank == 1:
    try:
        with linked_processes.ending_together(object()):
            raise UserError("no such file")
    except UserError:
        sys.exit(2)
if sys.argv[3:] == ["hands out"]:
    for number in range(10**6):
        if rank == 0:
            for other in (1, 2):
                own.send_part(other, 1, number, bytes(10**8))
        else:
            own.next_part(1, number)
time.sleep(60)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def linked(number, place, own=None):
    """The links of so many ranks, all of this process."""
    with concurrent.futures.ThreadPoolExecutor(number) as threads:
        return list(threads.map(lambda rank: Link.among(rank, number, place, own), range(number)))


@pytest.mark.parametrize("way", ["a socket's path", "a port"])
def test_values_are_exchanged_in_order(way, tmp_path):
    folder = tmp_path / ("a path of more letters than the address of a socket has room for, " * 3)
    folder.mkdir()
    links = linked(3, str(folder / "link") if way == "a socket's path" else ("127.0.0.1", free_port()))
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
    for each in links:
        each.leave()


def test_only_who_knows_the_secret_may_join(monkeypatch, capfd):
    monkeypatch.setenv("KERASDP_SECRET", "one that nobody guesses")
    place = "127.0.0.1", free_port()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        first = threads.submit(Link.among, 0, 2, place, "127.0.0.1")
        time.sleep(0.3)
        call = f"from kerasdp.runtime import door; door.connect({place}, {{}}, 5.0)"
        for other in ({"KERASDP_SECRET": "another"}, {}):
            env = environment(PYTHONPATH=str(ROOT), **other)  # without that of this process
            done = subprocess.run([sys.executable, "-c", call], env=env, capture_output=True, text=True)
            assert f"127.0.0.1:{place[1]} knows another KERASDP_SECRET: set the same one" in done.stderr
        second = Link.among(1, 2, place, "127.0.0.1")
        assert second.names == first.result(20).names
        for each in (second, first.result()):
            each.leave()
    assert capfd.readouterr().err.count("refused a process at 127.0.0.1, which has another KERASDP_SECRET") == 1


class Gadget:
    """What runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_strangers_at_the_door_cost_nothing(tmp_path, monkeypatch):
    """They say nothing, too little, anything, or something that would run; those of the run join meanwhile."""
    monkeypatch.setenv("KERASDP_SECRET", "one that nobody guesses")
    place, strangers = ("127.0.0.1", free_port()), []
    ends = threading.Event()

    def drip(stranger):
        while not ends.wait(0.5):
            stranger.sendall(b"k")

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        first = threads.submit(Link.among, 0, 2, place, "127.0.0.1")
        time.sleep(0.3)
        run = pickle.dumps(Gadget(str(tmp_path / "ran")))
        words = json.dumps({"rank": 1, "num_processes": 2, "name": "host"}).encode()
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(10**4), b"kerasdp 2\n" + bytes(64) + b"\xff" * 4, run,
                     b"kerasdp 2\n" + bytes(64) + len(run).to_bytes(4, "little") + run,
                     b"kerasdp 2\n" + bytes(64) + len(words).to_bytes(4, "little") + words):  # fmt: skip
            strangers.append(socket.create_connection(place))
            strangers[-1].sendall(said)
        strangers += [socket.create_connection(place) for _ in range(300)]  # more than may greet at a time
        threading.Thread(target=drip, args=(strangers[0],), daemon=True).start()
        begin = time.monotonic()
        second = Link.among(1, 2, place, "127.0.0.1")
        seconds = time.monotonic() - begin
        ends.set()
        first.result(20).leave()
        second.leave()
    for stranger in strangers:
        stranger.close()
    print(f"{seconds:.2f} s")
    assert seconds < 3 and not (tmp_path / "ran").exists()


def test_strangers_leave_a_process_files_to_open(monkeypatch):
    """Where it may open few, they would take all of them, and those of the run could not come in."""
    monkeypatch.setenv("KERASDP_SECRET", "one that nobody guesses")
    place = "127.0.0.1", free_port()
    program = (
        "import resource, threading; from kerasdp.runtime.link import Link\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "def look():\n"
        "    try: print(open('/dev/null').name, flush=True)\n"
        "    except OSError as error: print(error, flush=True)\n"
        "threading.Timer(2.0, look).start()\n"
        f"Link.among(0, 2, {place}, '127.0.0.1').leave()"
    )
    env = environment(PYTHONPATH=str(ROOT), KERASDP_SECRET="one that nobody guesses")  # noqa: S106
    first = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True)
    strangers = []
    try:
        while len(strangers) < 200:
            try:
                strangers.append(socket.create_connection(place))
            except ConnectionRefusedError:  # not yet
                assert first.poll() is None
                time.sleep(0.05)
        assert first.stdout.readline() == "/dev/null\n"
        begin = time.monotonic()
        Link.among(1, 2, place, "127.0.0.1").leave()
        # A second or two; it would be minutes if strangers had all the files.
        assert time.monotonic() - begin < 20 and first.wait(20) == 0
    finally:
        first.kill()
        first.communicate()
        for stranger in strangers:
            stranger.close()


def test_a_second_process_of_a_number_is_told(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(link.outcome, "leave_with", ended.append)
    path = str(tmp_path / "link")

    def join():  # waits for values that nobody sends
        with contextlib.suppress(RunError):
            Link.among(1, 3, path)

    for _ in range(2):
        threading.Thread(target=join, daemon=True).start()
    with pytest.raises(RunError, match="two processes have the number 1; give each its own"):
        Link.among(0, 3, path)
    deadline = time.monotonic() + 10
    while len(ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [str(error) for error in ended] == ["two processes have the number 1; give each its own"] * 2


def test_the_last_may_come_late(monkeypatch):
    """Those that are there wait in silence, and nobody is blamed for it."""
    ended = []
    monkeypatch.setattr(link.outcome, "leave_with", ended.append)
    monkeypatch.setattr(link, "SECONDS_OF_SILENCE", 1.0)
    place = "127.0.0.1", free_port()
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        first = [threads.submit(Link.among, rank, 3, place, "127.0.0.1") for rank in (0, 1)]
        time.sleep(2.5)
        links = [each.result(20) for each in (*first, threads.submit(Link.among, 2, 3, place, "127.0.0.1"))]
        time.sleep(2.5)
        found = list(threads.map(lambda each: each.all_gather_object(each.rank), links))
    for each in links:
        each.leave()
    assert ended == [] and found == [[0, 1, 2]] * 3


@pytest.mark.parametrize("leaves", [0, 1])
def test_an_error_that_all_find_leaves_each_time_for_its_own(leaves, tmp_path, monkeypatch):
    """As process 0 needs, which writes its last checkpoint before it names it. Who does not find it is ended."""
    ended = []
    monkeypatch.setattr(link.outcome, "leave_with", ended.append)
    monkeypatch.setattr(link, "_SECONDS_TO_BE_ENDED", 1.0)
    links = linked(2, str(tmp_path / "link"))
    links[leaves].leave(NonFiniteLossError("the loss became nan at step 3", 3))
    time.sleep(0.5)
    other, words = links[1 - leaves], f"rank {leaves} failed: the loss became nan at step 3"
    assert ended == [] and not other.is_failing and str(other.reason(5)) == words
    with pytest.raises(NonFiniteLossError, match=words):
        other.all_gather_object(1)
    time.sleep(1)
    assert [str(error) for error in ended] == [words]


@pytest.mark.parametrize("waits", [0, 1])
def test_nobody_waits_for_one_that_has_left(waits, tmp_path):
    links = linked(2, str(tmp_path / "link"))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        value = threads.submit(links[waits].all_gather_object, 1)
        time.sleep(0.2)
        links[1 - waits].leave()
        with pytest.raises(RunError, match=f"rank {1 - waits} left the run while others wait"):
            value.result(10)
    with pytest.raises(RunError, match="left the run"):
        links[waits].all_gather_object(2)


def test_one_may_leave_as_soon_as_it_has_the_values(tmp_path):
    """Process 0, which hands them out, has its own by then."""
    first, second, third = linked(3, str(tmp_path / "link"))
    for channel in first._channels.values():

        def send_slowly(*message, send=channel.send, **content):
            send(*message, **content)
            time.sleep(0.3)

        channel.send = send_slowly

    def leaves():
        second.all_gather_object("two")
        second.leave()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        value = pool.submit(first.all_gather_object, "one")
        pool.submit(leaves)
        time.sleep(0.2)
        assert third.all_gather_object("three") == value.result(20) == ["one", "two", "three"]


def test_several_machines_need_a_secret(monkeypatch):
    cluster = Cluster(source="--hosts", num_processes=2, process=1, coordinator="10.0.0.1:29500")
    texts = ("", "Received: none"), ("short", "Received: one of 5"), ("of 16 letters ..", None), ("\udcff" * 16, None)
    for value, said in texts:
        monkeypatch.setenv("KERASDP_SECRET", value)
        if said is None:
            check_cluster(Config(backend="jax"), cluster)
            continue
        with pytest.raises(UserError, match=f"--hosts: several machines need a secret.*{said}; make it once, export"):
            check_cluster(Config(backend="jax"), cluster)
    with pytest.raises(UserError, match=r"expected an IPv4 address, .*Received: \[::1\]:29500, of IPv6"):
        check_cluster(Config(), Cluster(source="--hosts", num_processes=2, process=1, coordinator="[::1]:29500"))


def test_nobody_listens():
    port = free_port()
    with pytest.raises(UserError, match=f"nobody listens at 127.0.0.1:{port} for 0 s"):
        door.connect(("127.0.0.1", port), {}, 0.3)
    with Door(("127.0.0.1", port)), pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{port} .Address alr"):
        addresses.listen("127.0.0.1", port)


def test_one_meeting_place_is_for_one_run(tmp_path):
    path = str(tmp_path / "link")
    with Door(path), pytest.raises(UserError, match="another run's processes meet at"):
        Door(path)
    (tmp_path / "link").touch()  # of a run that was killed
    with Door(path):
        assert oct(os.stat(tmp_path).st_mode & 0o777) == oct(0o700)


def test_the_folder_for_sockets_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(door.tempfile, "gettempdir", lambda: str(tmp_path))
    path = door.private_folder()
    assert os.stat(path).st_mode & 0o777 == 0o700 and door.private_folder() == path
    os.chmod(path, 0o755)
    with pytest.raises(UserError, match="to be a folder of this user alone"):
        door.private_folder()


def test_a_name_is_waited_for(monkeypatch, capsys):
    """A pod's name may not be known yet."""
    real, tries = socket.getaddrinfo, []

    def found_later(host, *args, **kwargs):
        tries.append(host)
        if host == "pod-0.pods" and len(tries) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1" if host == "pod-0.pods" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", found_later)
    assert addresses.own_address(("pod-0.pods", 80)) == "127.0.0.1" and len(tries) == 3
    assert capsys.readouterr().err == "waits for the name pod-0.pods (Name or service not known)\n"
    tries.clear()
    with pytest.raises(UserError, match="no way from this machine to pod-0.pods:80 .Name or service not known"):
        addresses.own_address(("pod-0.pods", 80), seconds=0.0)


def test_a_sign_of_life_waits_for_nobody():
    """The other end takes nothing: what is long is on its way, and signs of life are left out."""
    one, other = socket.socketpair()
    channel = Channel(one)
    begin = time.monotonic()
    channel.send(1, content=bytes(10**8))
    for _ in range(5):
        channel.send_sign(0, b"")
    channel.send(2)
    assert time.monotonic() - begin < 1
    receiving = Channel(other)
    assert [receiving.receive()[0] for _ in range(2)] == [1, 2]
    channel.flush(5.0)
    other.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError):
        receiving.receive()


@pytest.mark.parametrize("place", [0, 6, 20, 30, -1])
def test_a_message_that_comes_otherwise_than_it_was_sent_is_refused(place):
    """Whichever byte a faulty switch has changed, of the content or of what stands before it."""
    one, switch = socket.socketpair()
    Channel(one).send(3, channel=1, number=2, content=b"0123456789")
    message = bytearray(switch.recv(1000))
    message[place] ^= 64
    switch.sendall(message)
    with pytest.raises(ValueError, match="a message has another checksum"):
        Channel(one).receive()


def test_the_interface_on_the_way():
    assert addresses.own_address(("127.0.0.1", 80)) == "127.0.0.1" == addresses.address_of_interface("lo")
    assert addresses.interface_of_address("127.0.0.1") == "lo"
    with pytest.raises(UserError, match="interface: expected one with an IPv4 address, of lo.*Received: 'nosuch'"):
        addresses.own_address(("127.0.0.1", 80), "nosuch")


def three(*arguments):
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port), *arguments], text=True,
            env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]  # fmt: skip
    if arguments != ("fails",):
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
    assert time.monotonic() - begin < link.SECONDS_OF_SILENCE
    processes[victim].kill()
    processes[victim].communicate()


@pytest.mark.parametrize("victim", [1, 0])
def test_one_that_is_stopped_behind_large_messages_is_the_one_that_is_named(victim):
    """Process 0 hands out 100 MB at a time: the stopped one takes none of it, the other one is not blamed."""
    processes = three("hands out")
    time.sleep(1.0)
    begin = time.monotonic()
    os.kill(processes[victim].pid, signal.SIGSTOP)
    for rank, process in enumerate(processes):
        if rank != victim:
            _, stderr = process.communicate(timeout=20)
            assert f"process {victim}) has not been heard of" in stderr, stderr
    print(f"{time.monotonic() - begin:.1f} s")
    assert time.monotonic() - begin < 10
    processes[victim].kill()
    processes[victim].communicate()


def test_the_error_of_one_ends_the_others():
    for rank, process in enumerate(three("fails")):
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 2
        assert rank == 1 or "process 1) failed: no such file" in stderr
