"""Whoever knocks at a run's ports without its secret neither delays it, nor changes it, nor runs code in it."""

import contextlib
import functools
import json
import sys
import time

import pytest

from tests.helpers import BACKENDS, PROGRAMS, all_but, finish
from tests.hosts import netns
from tests.security.listeners import listeners
from tests.security.runs import PORT, SECRET, Run, start_on
from tests.security.stranger import KINDS

pytestmark = pytest.mark.skipif(not netns.hosts_available(), reason=netns.NO_HOSTS)


def allowed(seconds):
    """Within which a start has to be done that takes so many seconds alone: 3 more, or twice that on a busy machine."""
    return max(seconds + 3.0, 2 * seconds)


STRANGER = PROGRAMS.parent / "security" / "stranger.py"
RECORD = STRANGER.with_name("record.py")


def wait_for_port(host, port=PORT, seconds=60.0):
    """Until somebody listens at that port of a host."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any(each.port == port for each in listeners(host.processes())):
            return
        time.sleep(0.05)
    raise AssertionError(f"nobody listens at port {port} of {host.name}")


def places(hosts):
    """What other hosts reach of these."""
    return [
        (host.address, each.port)
        for host in hosts
        for each in listeners(host.processes())
        if each.kind == "tcp" and not each.is_loopback
    ]


@contextlib.contextmanager
def knocking(host, kinds, at, marker, recorded=""):
    """Lets strangers on a host knock within the context; returns once they have begun."""
    settings = {"kinds": list(kinds), "places": at, "marker": str(marker), "recorded": str(recorded)}
    program = host.start(sys.executable, STRANGER, json.dumps(settings))
    try:
        words = program.stdout.readline().split()
        assert words and (int(words[1]) > 0 or kinds == ["half_open"]), program.stderr.read()
        yield program
    finally:
        program.kill()
        program.communicate()


@functools.cache
def undisturbed(backend):
    """The losses, how long process 1 takes to join, and what it has sent to the other host."""
    with netns.network(2) as hosts, Run(hosts, backend, variables={"KERASDP_SECRET": SECRET}) as run:
        recorded = run.folder / "recorded"
        recorder = hosts[0].start(sys.executable, RECORD, hosts[1].address, hosts[0].address, recorded)
        assert recorder.stdout.readline() == "records\n"
        run.start(0)
        wait_for_port(hosts[0])
        time.sleep(1)
        run.start(1)
        seconds = run.wait_for("begun", 2)
        run.wait_for("middle", 2)
        losses = run.results()[0]
        recorder.terminate()
        recorder.wait(20)
        assert len(losses) == 40 and json.loads(recorded.read_text())
        return losses, seconds, recorded.read_text()


def check(backend, kinds):
    """They come before process 1 does, and again in the middle of the training, to whatever listens then."""
    losses, seconds, text = undisturbed(backend)
    with netns.network(3) as hosts, Run(hosts[:2], backend, variables={"KERASDP_SECRET": SECRET}) as run:
        marker, recorded = run.folder / "marker", run.folder / "recorded"
        recorded.write_text(text)
        run.start(0)
        wait_for_port(hosts[0])
        with knocking(hosts[2], kinds, [(hosts[0].address, PORT)], marker, recorded):
            time.sleep(0.5)
            run.start(1)
            delay = run.wait_for("begun", 2, allowed(seconds)) - seconds
            run.wait_for("middle", 2)
        with knocking(hosts[2], kinds, places(hosts[:2]), marker, recorded):
            time.sleep(3)
            found = run.results()[0]
        print(f"\n{backend}, {', '.join(kinds)}: {delay:+.1f} s to join")
        assert not marker.exists(), "a stranger's code was run"
        assert found == losses


@all_but("jax", "tensorflow")
def test_all_kinds_of_strangers_at_a_time(backend):
    check(backend, list(KINDS))


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_kind_of_stranger(backend, kind):
    check(backend, [kind])


@pytest.mark.skipif("torch" not in BACKENDS, reason="needs torch")
@pytest.mark.proof  # that nothing is unpickled of who has no secret: test_all_kinds_of_strangers_at_a_time
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_nothing_is_unpickled_of_torchs_stores(num_hosts):
    """Its elastic launcher unpickles what is at a key of a store that asks nobody who he is."""
    variables = {"KERASDP_SECRET": SECRET} if num_hosts > 1 else {}
    with netns.network(num_hosts + 1) as hosts, contextlib.ExitStack() as stack:
        run = stack.enter_context(Run(hosts[:num_hosts], "torch", num_devices=2, variables=variables))
        for number in range(num_hosts):
            run.start(number)
        run.wait_for("middle", 2 * num_hosts)
        ports = {each.port for each in listeners(hosts[0].processes()) if each.kind == "tcp"}
        marker, program = run.folder / "marker", PROGRAMS / "stores.py"
        # Another machine, and, of the first one itself, another user.
        for host, addresses in ((hosts[-1], [hosts[0].address]), (hosts[0], ["127.0.0.1", hosts[0].address])):
            given = [f"{address}:{port}" for address in addresses for port in ports]
            print(finish(start_on(host, program, marker, *given, backend="torch"), 60).stdout)
        time.sleep(6)  # the launcher looks every 5 s
        assert not marker.exists(), "code was run"
        assert len(run.results()[0]) == 40


def one_line(done, code):
    """The only error of a program that has ended with this code."""
    text = done.stdout + done.stderr
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert done.returncode == code and len(errors) == 1 and "Traceback" not in text, text
    return errors[0]


@all_but("torch", "tensorflow")
def test_hosts_without_a_secret_do_not_start(backend):
    with netns.network(2) as hosts, Run(hosts, backend) as run:
        for number in (0, 1):
            run.start(number, KERASDP_SECRET="")
        for number in (0, 1):
            assert "KERASDP_SECRET" in one_line(finish(run.programs[number], 30), 2)


@all_but("torch", "tensorflow")
def test_hosts_with_different_secrets_name_each_other(backend):
    """The one that listens continues to wait for the right one, which then comes."""
    with netns.network(3) as hosts, Run(hosts[:2], backend) as run:
        run.start(0, KERASDP_SECRET=SECRET)
        wait_for_port(hosts[0])
        given = {"hosts": "2", "host_rank": 1, "coordinator": f"{hosts[0].address}:{PORT}"}
        wrong = run.start_as("wrong", hosts[2], run.settings | given, KERASDP_SECRET="another one, as long")  # noqa: S106
        assert "KERASDP_SECRET" in one_line(finish(wrong, 30), 2)
        del run.programs["wrong"]
        run.start(1, KERASDP_SECRET=SECRET)
        run.wait_for("middle", 2)
        (run.folder / "continue").touch()
        done = [finish(run.programs[number], 60) for number in (0, 1)]
        assert [each.returncode for each in done] == [0, 0], done
        told = [line for line in done[0].stderr.splitlines() if hosts[2].address in line]
        assert told and "KERASDP_SECRET" in told[0], done[0].stderr
