"""Holds what the backends share where processes of several machines are joined."""

import os
from collections.abc import Iterable

from kerasdp.backends.base import SingleProcess
from kerasdp.errors import UserError
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.linked_processes import LinkedProcesses, current_link
from kerasdp.runtime.ranks import Processes


def processes_of(devices: Devices) -> Processes:
    """Returns the processes of a run.

    Raises:
        UserError: if they do not drive equally many devices.
    """
    link = current_link()
    if devices.cluster is None or link is None:
        return SingleProcess()
    counts = link.all_gather_object(devices.of_process)
    if len(set(counts)) > 1:
        words = ", ".join(f"{count} on {name}" for count, name in zip(counts, link.names))
        raise UserError(f"--gpus: expected equally many devices of each process. Received: {words}")
    return LinkedProcesses(link)


def reach_without_proxy(addresses: Iterable[str]) -> None:
    """Lets gRPC (of jaxlib 0.10.2 and TensorFlow 2.21), which heeds a proxy, reach these `HOST:PORT` without one."""
    hosts = (address.rpartition(":")[0].strip("[]") for address in addresses)
    os.environ["no_proxy"] = ",".join(dict.fromkeys(filter(None, [os.environ.get("no_proxy"), *hosts])))
