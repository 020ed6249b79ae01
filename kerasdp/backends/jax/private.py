"""Wraps the private functions of JAX that kerasdp uses."""

import os
from typing import Any

from jax._src import clusters, distributed


def joined() -> tuple[int, int]:
    """Returns the index of this process and the number of processes, after `jax.distributed.initialize`.

    JAX 0.10.2: the public `jax.process_index` returns the same index, but it initializes the devices. Afterwards the
    number of virtual devices is fixed.
    """
    return distributed.global_state.process_id, distributed.global_state.num_processes


def key_values() -> Any:
    """Returns the client of the key-value store that all processes share.

    JAX 0.10.2 has no public function for this client.
    """
    return distributed.global_state.client


def detected_cluster() -> dict[str, Any] | None:
    """Detects the cluster of this process as JAX does. Returns the arguments of `Cluster`, or None without a cluster.

    `jax.distributed.initialize` (JAX 0.10.2) uses the same detection, but it also waits for the other processes. JAX
    has no public function that only detects the cluster. In Kubernetes, a pod without the index of an Indexed Job is
    treated as a single process. Otherwise JAX would query Kubernetes for the index, and the pod may not be allowed to
    send this query.
    """
    for kind in clusters.ClusterEnv._cluster_types:
        if kind.opt_in_only_method or (kind is clusters.K8sCluster and "JOB_COMPLETION_INDEX" not in os.environ):
            continue
        if kind.is_env_present():
            return {
                "source": kind.name or kind.__name__,
                "num_processes": kind.get_process_count(),
                "process": kind.get_process_id(),
                "local_process": kind.get_local_process_id() or 0,
            }
    return None
