"""What a run of one machine listens on: loopback alone; and no other user opens its sockets, files and memory."""

import pytest

from tests.helpers import BACKENDS
from tests.hosts import netns
from tests.security.listeners import listeners, reachable_by_others, shared_memory, table
from tests.security.runs import Run

pytestmark = pytest.mark.skipif(not netns.hosts_available(), reason=netns.NO_HOSTS)
# Backend, devices, and whether the programs start as a user starts them.
CASES = [
    pytest.param(
        backend,
        devices,
        is_cold,
        marks=[pytest.mark.proof] * (devices == 1 or is_cold or backend == "tensorflow"),
        id=f"{backend}-{devices}{'-cold' * is_cold}",
    )
    for backend in BACKENDS
    for devices in (2, 1)
    for is_cold in (False, True)
]


@pytest.mark.parametrize(("backend", "devices", "is_cold"), CASES)
def test_on_one_machine_no_other_machine_and_no_other_user_is_heard(backend, devices, is_cold):
    """With processes that read data: two that decode, or a DataLoader's."""
    settings = {"num_devices": devices, "data": "loader"}
    with netns.network(1) as hosts, Run(hosts[0], backend, is_cold=is_cold, **settings) as run:
        num_ranks = devices if backend == "torch" else 1
        run.wait_for("middle", num_ranks, 120)
        pids = hosts[0].processes()
        print(table(f"{backend} on {devices} devices of one machine", pids))
        assert len(pids) >= num_ranks + 2  # those that read data are among them
        for each in listeners(pids):
            assert each.is_loopback, f"other machines reach it: {each}"
            assert each.kind != "unix" or not reachable_by_others(each.address), f"other users reach it: {each}"
        for path in [*map(str, run.temporary.rglob("*")), *shared_memory(pids)]:
            assert not reachable_by_others(path), f"other users open it: {path}"
        assert len(run.losses()) == 40
