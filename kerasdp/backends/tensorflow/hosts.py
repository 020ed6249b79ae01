"""TensorFlow: joins the processes of several machines, each of which drives its own devices, in sums and gathers."""

import hashlib
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdp.backends.hosts import reach_without_proxy
from kerasdp.backends.tensorflow import private
from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.runtime import addresses
from kerasdp.runtime.cluster import Cluster
from kerasdp.runtime.devices import AlreadyStartedError
from kerasdp.runtime.linked_processes import current_link, join
from kerasdp.runtime.ranks import Processes

if TYPE_CHECKING:
    import keras

# Of the processes. The groups of a host's own devices have small numbers.
_GROUP = 2**30
# Numbers the collectives of this program: each is made by all processes, in the same order.
_keys = itertools.count(1)
_groups: weakref.WeakKeyDictionary[tf.distribute.Strategy, "HostGroup"] = weakref.WeakKeyDictionary()


def join_hosts(cluster: Cluster, config: Config, kind: str) -> None:
    """Joins the others; returns when all have come. Call before TensorFlow starts.

    Args:
        cluster: which of the processes this is.
        config: the choices of the run.
        kind: of the devices.

    Raises:
        UserError: if they do not come.
        AlreadyStartedError: if TensorFlow has started without them.
    """
    if private.has_started():
        if current_link() is None:
            raise AlreadyStartedError("TensorFlow has already started without other processes")
        join(cluster, config)  # says if it is another cluster
        return
    link = join(cluster, config)
    own = link.own or addresses.LOOPBACK
    with addresses.listen(own, 0) as probe:
        port = probe.getsockname()[1]
    places = link.all_gather_object(f"{own}:{port}")
    reach_without_proxy(places)
    private.serve_collectives(places, cluster.process, use_nccl=kind == "gpu")


class HostGroup:
    """Sums and gathers tensors over the processes, each of which brings one, on its first device.

    Args:
        processes: of the run.
        device: the first one of this process.
    """

    def __init__(self, processes: Processes, device: str):
        self.rank, self.num_processes = processes.rank, processes.num_processes
        with tf.device(device):
            # Lets the collectives of a graph begin in the order in which they were made: NCCL's would wait for each
            # other for ever, if two processes began two of them in different orders.
            self._order = tf.Variable(0.0, trainable=False)

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums a tensor over the processes: each sends 2 (P - 1) / P of its bytes, in a ring."""
        return tf.raw_ops.CollectiveReduceV2(input=tensor, merge_op="Add", final_op="Id", **self._options())

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Concatenates the rows of all processes, which have equally many, in the order of the processes."""
        whole = tf.raw_ops.CollectiveGatherV2(input=rows, **self._options())
        return tf.ensure_shape(whole, (self.num_processes * rows.shape[0], *rows.shape[1:]))

    def _options(self) -> dict[str, Any]:
        # A key is of the operation, not of its runs: all processes build the same graphs in the same order, and the
        # first process is asked about a key only once.
        return {
            "group_size": self.num_processes,
            "group_key": _GROUP,
            "instance_key": next(_keys),
            "ordering_token": [self._order.handle],
        }


def mirrored_strategy(devices: list[str], processes: Processes, reduce: str | None = None) -> tf.distribute.Strategy:
    """Makes a `MirroredStrategy` on this process's devices; the collectives of its replicas go over all processes.

    Args:
        devices: of this process.
        processes: of the run.
        reduce: where sums are made: see `kerasdp.config.Config`.

    Raises:
        UserError: if they cannot be made there.
    """
    if reduce == "host" and processes.num_processes > 1:
        raise UserError(
            f"--reduce=host: there for one machine with tensorflow. Received: {processes.num_processes}, whose sums "
            "go from device to device; use --backend=torch, or leave it out"
        )
    strategy = private.mirrored_strategy(devices, processes.rank, reduce)
    if processes.num_processes > 1:
        _groups[strategy] = HostGroup(processes, devices[0])
    return strategy


def group_of(strategy: tf.distribute.Strategy) -> HostGroup | None:
    """Returns the group of the processes; None where there is one process."""
    return _groups.get(strategy)


def differing_variables(
    variables: "list[keras.Variable]", strategy: tf.distribute.Strategy, processes: Processes
) -> list[str]:
    """Returns the paths of variables that are not bit-equal on all replicas of all processes."""

    def digests(variable: "keras.Variable") -> set[bytes]:
        copies = strategy.experimental_local_results(variable.value)
        return {hashlib.sha256(copy.numpy().tobytes()).digest() for copy in copies}

    gathered = processes.all_gather_object([digests(variable) for variable in variables])
    return [
        variable.path for variable, *copies in zip(variables, *gathered, strict=True) if len(set().union(*copies)) > 1
    ]
