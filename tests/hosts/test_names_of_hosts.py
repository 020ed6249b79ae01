"""A machine that knows its own name as 127.0.1.1 is told so; otherwise all would wait for each other."""

import os
import pathlib
import sys

import pytest

from kerasdp.config import Config
from kerasdp.runtime.cluster import check_cluster, find_cluster
from tests.helpers import ROOT
from tests.hosts import netns

START = """
import sys
from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.runtime.cluster import check_cluster, find_cluster
config = Config(backend="jax", hosts="2", host_rank=0, coordinator=sys.argv[1])
try:
    check_cluster(config, find_cluster(config, {}))
except UserError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(not netns.hosts_available(), reason=netns.NO_HOSTS)
def test_a_name_that_is_127_0_1_1_is_refused_with_the_addresses_there_are():
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with netns.network(1) as hosts:
        assert hosts[0].run(sys.executable, "-c", START, "host0:29500", env=env).returncode == 0
        names = pathlib.Path("/etc/netns") / hosts[0].namespace / "hosts"
        names.write_text("127.0.0.1 localhost\n127.0.1.1 host0\n")
        done = hosts[0].run(sys.executable, "-c", START, "host0:29500", env=env)
        assert done.returncode == 1
        assert "host0, which is 127.0.1.1 on its own machine" in done.stderr and ": 10.77.0.1 (eth0)" in done.stderr
        assert hosts[0].run(sys.executable, "-c", START, "10.77.0.1:29500", env=env).returncode == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "a-machine-that-is-not-there.invalid"])
def test_processes_of_one_machine_meet_at_loopback(address):
    config = Config(backend="jax", hosts="2", host_rank=0, coordinator=f"{address}:29500")
    check_cluster(config, find_cluster(config, {}))
