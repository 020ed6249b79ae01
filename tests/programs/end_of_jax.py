"""Joins two processes of JAX, of which one ends later than the other. Arguments: its number, the coordinator."""

import atexit
import sys
import time

from kerasdp.backends.jax.devices import join_hosts
from kerasdp.config import Config
from kerasdp.runtime.cluster import Cluster

process, coordinator = int(sys.argv[1]), sys.argv[2]
join_hosts(Cluster(source="--hosts", num_processes=2, process=process, coordinator=coordinator), Config(backend="jax"))
if process == 1:
    atexit.register(time.sleep, 1.0)  # as where a framework's threads take long to end
