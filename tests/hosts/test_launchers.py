"""The templates for mpirun, torchrun and Kubernetes: stopped or failing, resumed, and the losses of one process."""

import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from kerasdp.errors import PreemptedError
from tests.helpers import BACKENDS, HOST_BACKENDS
from tests.hosts import netns
from tests.hosts.templates import difference_from_one_process, edited, num_steps, project, wait_for_steps

pytestmark = [pytest.mark.proof, pytest.mark.skipif(not netns.hosts_available(), reason=netns.NO_HOSTS)]
NEEDS_TORCH = pytest.mark.skipif("torch" not in BACKENDS, reason="torchrun comes with torch")
SAVED = PreemptedError.exit_code


class Started:
    """Commands on hosts, in the folder of a project; their output is kept in a file for each host."""

    def __init__(self, folder):
        self.folder, self.env = folder, project(folder)
        self.workdir = folder / "runs" / "mine"

    def __call__(self, host, *command, **variables):
        with open(self.folder / f"{host.name}.log", "a") as log:
            options = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": self.folder, "env": self.env | variables}
            return host.start(*command, **options)

    def logs(self):
        return "".join(f"\n{log.name}:\n{log.read_text()[-5000:]}" for log in sorted(self.folder.glob("*.log")))

    def end(self, *programs, timeout=280):
        """The exit codes of programs that end by themselves."""
        try:
            return [program.wait(timeout) for program in programs]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.logs()) from None

    def wait_for_steps(self, number, *programs):
        wait_for_steps(self.workdir, number, lambda: all(program.poll() is None for program in programs), self.logs)

    def check_losses(self, backend, what):
        seen = difference_from_one_process(self.workdir, backend, self.folder)
        print(f"\n{backend}: {what}: losses {seen:.1e} from one process")
        assert seen < 1e-5


@pytest.fixture
def started(tmp_path):
    return Started(tmp_path)


def agent_of(hosts, path):
    """A program that Open MPI calls as it does ssh: with a host's name, and a command for its shell."""
    cases = "\n".join(f'{host.name}) exec {shlex.join(host.command("sh", "-c"))} "$*";;' for host in hosts)
    path.write_text(f'#!/bin/sh\nname=$1; shift\ncase "$name" in\n{cases}\nesac\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs mpirun (Debian: openmpi-bin)")
@pytest.mark.skipif("jax" not in BACKENDS, reason="mpirun is for jax")
def test_mpirun_stops_by_sigusr1_and_resumes(started):
    backend, number = "jax", 3
    hosts_of_template = {"node0:1,node1:1": ",".join(f"host{rank}:1" for rank in range(number)), "node0:2": "host0:2"}
    (started.folder / "mpirun.sh").write_text(edited("mpirun.sh", hosts_of_template, backend=backend))
    with netns.network(number) as hosts:
        variables = {
            "OMPI_MCA_plm_rsh_agent": agent_of(hosts, started.folder / "agent"),
            # Of programs that are root alone.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        script = started(hosts[0], "bash", "mpirun.sh", **variables)
        started.wait_for_steps(20, script)
        found = subprocess.run(["pgrep", "-x", "mpirun", "-P", str(script.pid)], capture_output=True, text=True)
        os.kill(int(found.stdout), signal.SIGUSR1)
        assert started.end(script) == [SAVED], started.logs()
        assert num_steps(started.workdir) < 100 and "stopped by SIGUSR1" in started.logs()
        assert started.end(started(hosts[0], "bash", "mpirun.sh", **variables)) == [0], started.logs()
    assert f"on {number} virtual CPU devices of {number} processes" in started.logs()
    started.check_losses(backend, f"mpirun on {number} hosts, stopped and resumed")


def torchrun(started, hosts, machines, devices):
    changes = {"devices=gpu ": f"devices={devices} ", "node0:": "host0:", "machines=2 ": f"machines={machines} "}
    changes["--gpus=1"] = "--hang_timeout=20"
    (started.folder / "torchrun.sh").write_text(edited("torchrun.sh", changes, backend="torch"))
    return [started(host, "bash", "torchrun.sh") for host in hosts]


def rank_on(host):
    """A rank that torchrun has started on a host."""
    return next(pid for pid in host.processes() if b"train.py" in argument_of(pid, 2))


def argument_of(pid, number):
    with contextlib.suppress(OSError, IndexError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[number]
    return b""


@NEEDS_TORCH
def test_torchrun_restarts_when_a_worker_dies(started):
    with netns.network(2) as hosts:
        programs = torchrun(started, hosts, 2, 2)
        started.wait_for_steps(45, *programs)
        os.kill(rank_on(hosts[1]), signal.SIGKILL)
        assert started.end(*programs) == [0, 0], started.logs()
    assert "resumes after step" in started.logs()
    assert "on 4 virtual CPU devices of 4 processes" in started.logs()
    started.check_losses("torch", "torchrun on 2 hosts of 2 devices, a worker killed")


@NEEDS_TORCH
def test_torchrun_continues_with_the_machines_that_are_left(started):
    """A machine is without power; comes back, and is taken in again."""
    with netns.network(2) as hosts:
        programs = torchrun(started, hosts, "1:2", 1)
        started.wait_for_steps(25, *programs)
        hosts[1].power_off()
        started.wait_for_steps(num_steps(started.workdir) + 20, programs[0])
        hosts[1].set_cable(True)
        again = started(hosts[1], "bash", "torchrun.sh")
        assert started.end(programs[0], again) == [0, 0], started.logs()
    told = (started.folder / "host0.log").read_text()
    assert "torch on 1 virtual CPU device" in told and told.count("resumes after step") == 2, told
    started.check_losses("torch", "torchrun on 1 to 2 hosts, one without power and back")


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_pods_of_kubernetes_stop_together_and_resume(started, backend):
    """What Kubernetes does with its pods is done by hand: one of two gets SIGTERM, both are started again."""
    yaml = pytest.importorskip("yaml")
    changes = {"python\n": f"{sys.executable}\n", "kerasdp-0.kerasdp": "host0", "/runs/mine": str(started.workdir)}
    text = edited("kubernetes-job.yaml", changes, backend=backend)
    *_, job = yaml.safe_load_all(text)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = [word for line in container["command"] for word in line.split()]
    places = {entry["name"]: entry.get("value") for entry in container["env"] if entry["name"] not in ("HOME", "USER")}
    with netns.network(job["spec"]["completions"]) as hosts:
        for expected in (SAVED, 0):
            pods = [
                started(host, *command, **{name: value or str(host.number) for name, value in places.items()})
                for host in hosts
            ]
            if expected:
                started.wait_for_steps(30, *pods)
                pods[1].send_signal(signal.SIGTERM)
            assert started.end(*pods) == [expected, expected], started.logs()
    assert "resumes after step" in started.logs()
    started.check_losses(backend, "pods of Kubernetes, one evicted, resumed")
