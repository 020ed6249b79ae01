"""Collects all private names of JAX that kerasdp uses."""

import os
from typing import Any

from jax._src import clusters, distributed


def joined() -> tuple[int, int]:
    """Returns the index of this process and the number of processes, after `jax.distributed.initialize`.

    JAX 0.10.2: the public `jax.process_index` returns the same index, but it starts JAX. This fixes the number of
    virtual devices.
    """
    return distributed.global_state.process_id, distributed.global_state.num_processes


def key_values() -> Any:
    """Returns the client of the key-value store that all processes share. JAX 0.10.2 has no public access to it."""
    return distributed.global_state.client


def detected_cluster() -> dict[str, Any] | None:
    """Returns what JAX's cluster detection finds about this process, as arguments of `Cluster`. None: it finds nothing.

    `jax.distributed.initialize` (JAX 0.10.2) asks the same classes, but it also waits for the other processes. No
    public function returns only the result. A Kubernetes pod without a number from an Indexed Job counts as a single
    process. JAX would query Kubernetes for it, and the pod may not be allowed to.
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
