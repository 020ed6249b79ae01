"""JAX: joins the processes of several machines, each of which drives its own devices, to one program."""

import atexit

import jax
import numpy as np
from jax.sharding import NamedSharding

from kerasdp.backends.base import Tensor
from kerasdp.backends.hosts import reach_without_proxy
from kerasdp.backends.jax.private import use_address_of_host
from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.runtime import addresses
from kerasdp.runtime.cluster import Cluster
from kerasdp.runtime.devices import AlreadyStartedError
from kerasdp.runtime.link import Link
from kerasdp.runtime.linked_processes import current_link, join

# Longer than any run: who is gone is noticed by the link, which says who, where JAX's heartbeat ends a process by
# SIGABRT. At the end of a program all wait for each other.
_SECONDS_OF_HEARTBEAT, _SECONDS_TO_END = 10**6, 20


def join_hosts(cluster: Cluster, config: Config) -> None:
    """Joins the others; returns when all have come. Call before JAX starts.

    Raises:
        UserError: if they do not come.
    """
    link = join(cluster, config)
    own = link.own or addresses.LOOPBACK
    with addresses.listen(own, 0) as probe:
        port = probe.getsockname()[1]
    address = link.all_gather_object(f"{own}:{port}")[0]
    # SIGTERM is ours: JAX's own service (0.10.2) would keep it.
    jax.config.update("jax_enable_preemption_service", False)
    # Otherwise the end of one process ends the others by SIGABRT, before they can say which it was.
    jax.config.update("jax_enable_recoverability", True)
    use_address_of_host(own)
    # gRPC (of jaxlib 0.10.2) would send what goes to the other machines through a proxy, of which JAX warns.
    jax.config.update("jax_check_proxy_envs", False)
    reach_without_proxy([address])
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=cluster.num_processes,
        process_id=cluster.process,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,
        heartbeat_timeout_seconds=_SECONDS_OF_HEARTBEAT,
        shutdown_timeout_seconds=_SECONDS_TO_END,
    )
    atexit.register(_leave, link)


def _leave(link: Link) -> None:
    """Disconnects from JAX's service, which process 0 takes away with it, before process 0 ends.

    jaxlib (0.10.2) ends a process by SIGABRT that finds it gone; with recoverability it does not wait for the others.
    """
    if link.is_failing:  # and nobody waits for anybody
        return
    if link.rank:
        jax.distributed.shutdown()
    all_left = link.gather_later(None)
    if link.rank == 0:
        all_left()


def check_joined(cluster: Cluster | None) -> None:
    """Raises if JAX has started in this process alone, or was joined with others by somebody else.

    Raises:
        AlreadyStartedError: if only a new process can join the others.
        UserError: if others were joined that the run knows nothing of.
    """
    if cluster is None and jax.process_count() > 1:
        raise UserError(
            f"jax.distributed.initialize has joined {jax.process_count()} processes, but the run is not told of them: "
            "leave that call out, and add --hosts, --host_rank and --coordinator"
        )
    if cluster is not None and current_link() is None:
        raise AlreadyStartedError("JAX has already started in one process")


def put(rows: np.ndarray, sharding: NamedSharding) -> Tensor:
    """Brings to the devices what this process has of an array: its own rows, or, if all have a copy, the whole."""
    if sharding.is_fully_addressable:
        return jax.device_put(rows, sharding)
    # `device_put` would let the processes compare what they have, each time.
    return jax.make_array_from_process_local_data(sharding, rows)
