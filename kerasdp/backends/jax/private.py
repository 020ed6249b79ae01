"""Holds all private names of JAX in use."""

import os
from typing import Any

from jax._src import clusters, distributed


def joined() -> tuple[int, int]:
    """Returns the number of this process, and of how many, once `jax.distributed.initialize` was called.

    JAX 0.10.2: `jax.process_index` says the same, and starts JAX, which fixes the number of virtual devices.
    """
    return distributed.global_state.process_id, distributed.global_state.num_processes


def key_values() -> Any:
    """Returns the client of the key-value store of the processes. JAX 0.10.2 has no public way to it."""
    return distributed.global_state.client


def detected_cluster() -> dict[str, Any] | None:
    """Returns what JAX's own detection knows of this process, as `Cluster` takes it; None: nothing.

    `jax.distributed.initialize` (JAX 0.10.2) asks the same classes, and waits for the others at once; there is no
    public way to know what it would find. A pod of Kubernetes that no Indexed Job has numbered is alone: there JAX
    would ask Kubernetes for what the pod may not know.
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
