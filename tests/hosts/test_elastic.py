"""With torch a machine may leave a run, and another one join it; the loss curve stays."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers import BACKENDS, ROOT, environment, finish
from tests.hosts.together import free_port, started

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif("torch" not in BACKENDS, reason="torch is not installed"),
]
TRAINING = ["--log_every=1", "--batch_size=60", "--model=lenet", "--precision=float64", "--verbose=2", "--device=cpu"]


def start(workdir, *flags):
    return subprocess.Popen(
        [sys.executable, "recipes/train.py", "--backend=torch", *TRAINING, f"--workdir={workdir}", *flags],
        cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def losses(workdir):
    path = workdir / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines}


def wait_for(workdir, step, process):
    deadline = time.monotonic() + 240
    while max(losses(workdir), default=0) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.2)


def replica_batches(output):
    """What each start says: the samples of a replica."""
    return [int(line.partition("(")[2].partition(" a replica")[0].split("(")[-1]) for line in output.splitlines()
            if " a replica)" in line]  # fmt: skip


def test_machines_leave_and_join(tmp_path):
    """Two of one device; one is killed after step 30, and a third one joins the other after step 100."""
    epochs = f"--epochs={os.environ.get('KERASDP_EPOCHS', '40')}"
    place = ["--hosts=1:3", "--gpus=1", f"--coordinator=127.0.0.1:{free_port()}", "--checkpoint_every=10", epochs]
    first, second = (start(tmp_path / "run", *place, f"--host_rank={rank}") for rank in (0, 1))
    wait_for(tmp_path / "run", 30, first)
    os.killpg(second.pid, signal.SIGKILL)
    wait_for(tmp_path / "run", 100, first)
    third = start(tmp_path / "run", *place, "--host_rank=2")
    outputs = [process.communicate(timeout=400)[0] for process in (first, third)]
    print(outputs[0])
    assert first.returncode == third.returncode == 0, outputs
    one = start(tmp_path / "one", "--gpus=1", epochs)
    output = one.communicate(timeout=300)[0]
    assert one.returncode == 0, output
    run, expected = losses(tmp_path / "run"), losses(tmp_path / "one")
    assert run.keys() == expected.keys()
    difference = max(abs(run[step] - expected[step]) for step in expected)
    print(f"{len(run)} steps, on 2, 1 and 2 machines: losses differ from one process's by at most {difference:.1e}")
    assert difference < 1e-9
    assert replica_batches(outputs[0]) == [30, 30]  # those of the first and the last start; alone it has no replicas
    assert "has left" in outputs[0] and outputs[0].count("resumes after step") == 2


GONE = "where all meet, has left; start all again, with resume=True"


@pytest.mark.parametrize(
    ("signaled", "fails", "codes", "words"),
    [
        (1, None, [0, 99], ["1 processes", "stopped by SIGTERM after step"]),  # the first one trains to the end alone
        (0, None, [99, 1], ["stopped by SIGTERM after step", GONE]),
        # Of the second one, and then of the first, which is the last.
        (None, "own", [1, 1], ["ValueError: bad luck"] * 2),
        (None, "memory", [1, 1], ["a device has too little memory"] * 2),
    ],
)
def test_a_machine_goes_that_is_asked_to_or_fails(signaled, fails, codes, words, tmp_path):
    settings = {"backend": "torch", "hosts": "1:3", "num_devices": 1, "workdir": str(tmp_path), "verbose": 2}
    machines = started(2, model="lenet", epochs=60, log_every=1, **settings, **({"fails": fails} if fails else {}))
    if signaled is not None:
        wait_for(tmp_path, 6, machines[0])
        machines[signaled].send_signal(signal.SIGTERM)
    for machine, code, word in zip(machines, codes, words, strict=True):
        done = finish(machine, 240)
        assert done.returncode == code and word in done.stdout + done.stderr, done.stdout + done.stderr
