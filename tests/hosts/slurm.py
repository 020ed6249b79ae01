"""Makes a SLURM cluster of this machine, on the hosts of `netns`: a node on each, and the controller on the first.

Needs Debian's packages slurmctld, slurmd and slurm-client. There are no accounts and no munge; partition `high`
preempts partition `low`, whose jobs are requeued and have some seconds to end.
"""

import contextlib
import pathlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator

from tests.hosts import netns

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NO_SLURM = f"needs {', '.join(PROGRAMS)}; and {netns.NO_HOSTS}"
GRACE_SECONDS = 90

_CONFIG = """
ClusterName=kerasdp
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
SchedulerParameters=sched_interval=5,bf_interval=5
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace} MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def slurm_available() -> bool:
    """Returns whether a cluster can be made here; `NO_SLURM` says what it takes."""
    return all(map(shutil.which, PROGRAMS)) and netns.hosts_available()


class Slurm:
    """A cluster that runs."""

    def __init__(self, hosts: list[netns.Host], folder: pathlib.Path, env: dict[str, str]):
        self.hosts, self.folder = hosts, folder
        self._env = env | {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: object, **options) -> str:
        """Runs one of its programs on the first host, and returns what it prints."""
        done = self.hosts[0].run(*command, env=self._env, **options)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, script: pathlib.Path, *options: str, cwd: pathlib.Path) -> int:
        """Submits a job script, and returns the job's number."""
        return int(self.run("sbatch", "--parsable", *options, script, cwd=cwd))

    def job(self, number: int) -> dict[str, str]:
        """Returns what the controller says of a job: `JobState`, `Restarts`, `ExitCode`, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait_for(self, number: int, *states: str, timeout: float) -> dict[str, str]:
        """Waits until a job is in one of these states, and returns what the controller says of it."""
        deadline = time.monotonic() + timeout
        while (job := self.job(number))["JobState"] not in states:
            if time.monotonic() > deadline:
                raise RuntimeError(f"job {number} is {job['JobState']} ({job['Reason']}), not {states}; {self.logs()}")
            time.sleep(0.3)
        return job

    def logs(self) -> str:
        """Returns the ends of the cluster's log files."""
        return "".join(f"\n{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def cluster(num_nodes: int, folder: pathlib.Path, env: dict[str, str], cpus: int = 1) -> Iterator[Slurm]:
    """Starts a cluster.

    Args:
        num_nodes: of the cluster, each a host.
        folder: of its files.
        env: environment variables of the daemons, and of the programs that submit jobs.
        cpus: which each node has.
    """
    (folder / "state").mkdir(parents=True)
    with netns.network(num_nodes) as hosts:
        nodes = ",".join(host.name for host in hosts)
        text = _CONFIG.format(controller=hosts[0].name, nodes=nodes, cpus=cpus, folder=folder, grace=GRACE_SECONDS)
        (folder / "slurm.conf").write_text(text)
        # The default is to look at /sys/fs/cgroup, which a network namespace has not.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        slurm = Slurm(hosts, folder, env)
        daemons = [(hosts[0], "slurmctld", "-D", "-i"), *((host, "slurmd", "-D", "-N", host.name) for host in hosts)]
        with open(folder / "daemons.log", "w") as output:
            options = {"stdout": output, "stderr": subprocess.STDOUT, "env": slurm._env}
            for host, *command in daemons:
                host.start(*command, **options)
        deadline = time.monotonic() + 60
        while True:
            states = ""
            with contextlib.suppress(RuntimeError):  # the controller does not answer yet
                states = slurm.run("sinfo", "-h", "-p", "low", "-N", "-o", "%t")
            if states.split() == ["idle"] * num_nodes:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"SLURM's nodes are not up: {states} {slurm.logs()}")
            time.sleep(0.2)
        yield slurm
