"""A network that changes what it carries, and hosts with different versions: the same losses, or a line; no hang."""

import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.helpers import HOST_BACKENDS, ROOT, session_members
from tests.hosts import netns
from tests.hosts.test_hosts import command_on, on_hosts
from tests.hosts.together import alone, results_of

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not netns.hosts_available(), reason=netns.NO_HOSTS),
]
SETTINGS = {"model": "mlp", "epochs": 2, "num_samples": 122}
NUM_CORRUPT = int(os.environ.get("KERASDP_CORRUPT_RUNS", "5"))
# Within which a run of two hosts ends, however it ends; undisturbed it takes a quarter of that.
SECONDS = float(os.environ.get("KERASDP_SECONDS_ON_HOSTS", "180"))
OTHER_KERAS = "3.15.0"


def ends_of(processes, seconds):
    """Exit code, last line and output of each; the code of one that does not end is None, and it is killed."""
    found, deadline = [], time.monotonic() + seconds
    for process in processes:
        try:
            stdout, stderr = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            code = process.returncode
        except subprocess.TimeoutExpired:
            for left in session_members(process.pid):
                os.kill(left, signal.SIGKILL)
            (stdout, stderr), code = process.communicate(), None
        found.append((code, (stderr.strip().splitlines() or [""])[-1], stdout, stderr))
    return found


@pytest.mark.parametrize("backend", HOST_BACKENDS)
@pytest.mark.parametrize("corruption", [0.01, 0.1])
def test_packets_with_wrong_checksums_are_sent_again(backend, corruption):
    """As on a bad cable. The run is slower, and learns bit by bit what it learns otherwise."""
    with netns.network(2) as hosts:
        expected = results_of(on_hosts(hosts, devices=1, backend=backend, **SETTINGS))[0]
        with hosts.slowed(corruption=corruption):
            begin = time.monotonic()
            found = next(
                filter(None, results_of(on_hosts(hosts, devices=1, backend=backend, **SETTINGS), timeout=SECONDS))
            )
        num_dropped = sum(host.wrong_checksums() for host in hosts)
    print(f"\n{backend}: {corruption:.0%} of packets: {num_dropped} dropped, {time.monotonic() - begin:.0f} s")
    assert num_dropped > 0
    assert found["losses"] == expected["losses"] and found["weights"] == expected["weights"]


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_data_that_arrive_changed_never_hang_a_run(backend):
    """As by a switch with faulty memory. TCP sees nothing of it: the run may learn otherwise, or end with an error."""
    expected, rows, hung = alone(backend=backend, **SETTINGS), [], []
    for seed in range(NUM_CORRUPT):
        corruption = (0.002, 0.01, 0.05)[seed % 3]
        with netns.network(2) as hosts, hosts.slowed(corruption=corruption, is_mended=True, seed=seed):
            begin = time.monotonic()
            processes = on_hosts(hosts, devices=1, backend=backend, hang_timeout=30, **SETTINGS)
            ends = ends_of(processes, SECONDS)
        seconds = time.monotonic() - begin
        outcome = "; ".join(f"{code}: {line[:150]}" for code, line, *_ in ends)
        if all(code == 0 for code, *_ in ends):
            losses = [loss for loss in map(losses_in, ends) if loss]
            outcome = f"0, 0: losses off by {max(np.abs(np.subtract(one, expected['losses'])).max() for one in losses)}"
        rows.append(f"{backend}: seed {seed}, {corruption:.1%}: {seconds:.0f} s: {outcome}")
        print("\n" + rows[-1], flush=True)
        for code, _, _, stderr in ends:
            if code is None:
                hung.append(rows[-1])
                print(stderr[-1500:])
    assert not hung


def losses_in(end):
    """Those of a process that told them."""
    lines = [line for line in end[2].splitlines() if line.startswith("RESULT ")]
    result = json.loads(lines[0].removeprefix("RESULT ")) if lines else None
    return result and result["losses"]  # a rank of torch that is not the first tells nothing


@pytest.fixture(scope="module")
def other_keras(tmp_path_factory):
    """A folder with another release of Keras."""
    folder = os.environ.get("KERASDP_OTHER_KERAS")
    if folder is None:
        folder = str(tmp_path_factory.mktemp("keras"))
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
        if subprocess.run([*install, f"keras=={OTHER_KERAS}"], capture_output=True, timeout=300).returncode:
            pytest.skip(f"Keras {OTHER_KERAS} cannot be installed; set KERASDP_OTHER_KERAS to a folder that has it")
    if importlib.metadata.version("keras") == OTHER_KERAS:
        pytest.skip(f"Keras {OTHER_KERAS} is the one that is installed")
    return folder


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_hosts_with_different_versions_of_keras_say_so(backend, other_keras, tmp_path):
    """One line on each, with both versions, before the first step."""
    flags = [f"--backend={backend}", "--device=cpu", "--model=mlp", "--max_steps=8", f"--workdir={tmp_path}/run"]
    begin, processes = time.monotonic(), []
    with netns.network(2) as hosts:
        for host in hosts:
            command, env = command_on(host, hosts, backend, "recipes/train.py", *flags)
            env["PYTHONPATH"] = os.pathsep.join([other_keras] * host.number + [str(ROOT)])
            processes.append(host.start(*command, env=env, cwd=ROOT))
        ends = ends_of(processes, SECONDS)
    for number, (code, line, *_) in enumerate(ends):
        print(f"\n{backend}: host {number}: {code}, {time.monotonic() - begin:.0f} s: {line}")
    for code, _, _, stderr in ends:
        (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert code, stderr[-2000:]
        assert OTHER_KERAS in line and importlib.metadata.version("keras") in line, line
    assert not list(pathlib.Path(tmp_path).glob("run/steps.jsonl"))
