"""A job of cluster/slurm.sbatch that is preempted is requeued, resumes, and learns what one process learns."""

import time

import pytest

from tests.helpers import HOST_BACKENDS
from tests.hosts import slurm
from tests.hosts.templates import difference_from_one_process, edited, project, wait_for_steps

pytestmark = [pytest.mark.proof, pytest.mark.skipif(not slurm.slurm_available(), reason=slurm.NO_SLURM)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    env = project(folder)
    with slurm.cluster(2, folder / "cluster", env) as found:
        yield found, folder


class Job:
    def __init__(self, cluster, backend):
        self.slurm, self.folder = cluster
        changes = {"#SBATCH --gres=gpu:4 ": "# ", "--cpus-per-task=4": "--cpus-per-task=1"}
        changes["--ntasks-per-node=4"] = "--ntasks-per-node=1"
        script = self.folder / f"{backend}.sbatch"
        script.write_text(edited("slurm.sbatch", changes, backend=backend))
        self.number = self.slurm.submit(script, cwd=self.folder)
        self.workdir = self.folder / "runs" / str(self.number)

    @property
    def log(self):
        return (self.folder / f"kerasdp-{self.number}.log").read_text()

    def wait_for(self, *states, timeout=300):
        found = self.slurm.wait_for(self.number, *states, "FAILED", timeout=timeout)
        assert found["JobState"] in states, self.log
        return found

    def wait_for_steps(self, number):
        wait_for_steps(
            self.workdir, number, lambda: self.slurm.job(self.number)["JobState"] != "FAILED", lambda: self.log
        )

    def begin_again(self):
        """Soon: SLURM lets a requeued job wait for two minutes; its nodes refuse it in the second in which it ended."""
        time.sleep(2)
        self.slurm.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_a_job_that_is_stopped_is_requeued_and_resumes(cluster, backend):
    job = Job(cluster, backend)
    job.wait_for_steps(30)
    job.slurm.run("scancel", "--signal=TERM", job.number)
    assert job.wait_for("PENDING")["Restarts"] == "1"
    assert "stopped by SIGTERM after step" in job.log and "resumes" not in job.log
    job.begin_again()
    assert job.wait_for("COMPLETED")["ExitCode"] == "0:0"
    assert "resumes after step" in job.log
    assert f"{backend} on 2 virtual CPU devices of 2 processes" in job.log
    seen = difference_from_one_process(job.workdir, backend, job.folder)
    print(f"\n{backend} on 2 nodes: stopped, requeued, resumed: losses {seen:.1e} from one process")
    assert seen < 1e-5


def test_a_job_of_higher_priority_preempts_it(cluster):
    """Once before its first step, when there is nothing to save, and once after some."""
    job = Job(cluster, "torch")
    high = job.folder / "high.sh"
    high.write_text("#!/bin/bash\nsleep 1\n")
    for restarts, steps in ((1, 0), (2, 30)):
        job.wait_for("RUNNING")
        job.wait_for_steps(steps)
        other = job.slurm.submit(high, "--partition=high", "--nodes=2", cwd=job.folder)
        job.slurm.wait_for(other, "COMPLETED", timeout=slurm.GRACE_SECONDS)
        assert job.wait_for("PENDING")["Restarts"] == str(restarts)
        job.begin_again()
    job.wait_for("COMPLETED")
    assert job.log.count("resumes after step") == 1
    assert difference_from_one_process(job.workdir, "torch", job.folder) < 1e-5


def test_a_job_that_is_cancelled_stays_cancelled(cluster):
    job = Job(cluster, "torch")
    job.wait_for_steps(10)
    job.slurm.run("scancel", job.number)
    job.wait_for("CANCELLED", timeout=60)
    deadline = time.monotonic() + 60
    while "stopped by SIGTERM" not in job.log:
        assert time.monotonic() < deadline, job.log
        time.sleep(0.5)
    time.sleep(3)
    found = job.slurm.job(job.number)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")
