"""What a run listens on: on one machine loopback alone, and on several the address of the run besides."""

import pytest

from tests.helpers import BACKENDS
from tests.hosts import netns
from tests.security.listeners import listeners, reachable_by_others, table
from tests.security.runs import ON_ONE_MACHINE, SECRET, Run

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
# What may listen at every address of a machine, with the reason why nothing else can be done.
WILDCARDS_ALLOWED = {"tensorflow": (1, "TensorFlow's server (2.21) cannot be given an address to listen at")}


@pytest.mark.parametrize(("backend", "devices", "is_cold"), CASES)
def test_on_one_machine_no_other_machine_and_no_other_user_is_heard(backend, devices, is_cold):
    """With processes that read data: two that decode, or a DataLoader's."""
    settings = {"num_devices": devices, "data": ON_ONE_MACHINE[backend]}
    with netns.network(1) as hosts, Run(hosts, backend, is_cold=is_cold, **settings) as run:
        run.start(0)
        num_ranks = devices if backend == "torch" else 1
        run.wait_for("middle", num_ranks, 120)
        pids = hosts[0].processes()
        print(table(f"{backend} on {devices} devices of one machine", pids))
        assert len(pids) >= num_ranks + 2  # those that read data are among them
        for each in listeners(pids):
            assert each.is_loopback, f"other machines reach it: {each}"
            assert each.kind != "unix" or not reachable_by_others(each.address), f"other users reach it: {each}"
        assert len(run.results()[0]) == 40


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_several_machines_the_address_of_the_run_is_the_only_one(backend):
    """Of each host; here it has no other one, so that listening everywhere is what is looked for."""
    with netns.network(2) as hosts, Run(hosts, backend, variables={"KERASDP_SECRET": SECRET}) as run:
        for host in hosts:
            run.start(host.number)
        run.wait_for("middle", 2)
        for host in hosts:
            pids = host.processes()
            print(table(f"{backend} on {host.name}, {host.address}, of two", pids))
            num_allowed, reason = WILDCARDS_ALLOWED.get(backend, (0, "nothing may"))
            everywhere = [each for each in listeners(pids) if each.is_wildcard]
            assert len(everywhere) <= num_allowed, f"{reason}: {list(map(str, everywhere))}"
            for each in listeners(pids):
                assert each.is_wildcard or each.is_loopback or each.address == host.address, str(each)
                assert each.kind != "unix" or not reachable_by_others(each.address), f"other users reach it: {each}"
        run.results()
