"""PyTorch: the devices of a run, a process each, and what each process does with its own."""

import os
import sys
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from kerasdp.backends.base import DeviceBatch, SingleProcess, Structure
from kerasdp.backends.torch import sockets
from kerasdp.backends.torch.launcher import start_workers
from kerasdp.backends.torch.processes import ProcessGroup
from kerasdp.config import Config
from kerasdp.data.device_cache import CachedRows
from kerasdp.errors import UserError
from kerasdp.runtime import messages
from kerasdp.runtime.cluster import OF_RANKS, Cluster, worker_cluster
from kerasdp.runtime.devices import AlreadyStartedError, Devices, cache_folder, choose_devices, devices_of_process
from kerasdp.runtime.host_link import HostLink
from kerasdp.runtime.linked_processes import use_link
from kerasdp.runtime.processes import peak_memory_of_process
from kerasdp.runtime.ranks import Processes
from kerasdp.runtime.watch import SECONDS_TO_COMPILE

if TYPE_CHECKING:
    from kerasdp.data.batch import Batch

# Batches of tf.data and what is sent to another process lie in memory that nobody may write, and nobody does.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")

_LOOPBACK = "127.0.0.1"
# By the kind of a run's devices.
_KERAS_DEVICES = {"gpu": "cuda", "cpu": "cpu"}

__all__ = [
    "begin_thread", "device_name", "device_of_process", "join_processes", "make_devices", "peak_memory_bytes",
    "put_batch", "start_workers", "timeout_of",
]  # fmt: skip


def make_devices(config: Config, cluster: Cluster | None = None) -> Devices:
    """Chooses the devices; does not start CUDA, so processes may be started afterwards.

    Raises:
        AlreadyStartedError: if the run is this process's, and Keras makes its tensors on another kind of device.
    """
    num_found = torch.cuda.device_count()
    # A process that was started is one rank, with one device, or the launcher of a machine.
    is_rank = cluster is not None and (cluster.local_processes > 1 or cluster.source in OF_RANKS)
    if cluster is not None and is_rank:
        if devices_of_process(config, cluster) not in (None, 1):
            raise UserError(
                f"--gpus={config.num_devices}: {cluster.source} starts {cluster.local_processes} processes on each "
                "machine, of which each has one device with torch: let it start as many as there are devices"
            )
        num_found = min(num_found, 1)
    devices = choose_devices(config, num_found, cluster=cluster, is_rank=is_rank)
    wanted, known = _KERAS_DEVICES[devices.kind], _keras_device()
    if devices.of_process == 1 and "keras" in sys.modules and wanted != known:
        raise AlreadyStartedError(f"Keras is already imported, and works on torch's device {known}")
    return devices


def _keras_device() -> str:
    """Returns on which device of torch Keras works: it (3.15) asks once, at import."""
    found = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return (os.environ.get("KERAS_TORCH_DEVICE") or found).partition(":")[0]


def device_of_process(devices: Devices, config: Config) -> torch.device:
    """Returns this process's device. Makes it the default of torch and Keras: call before Keras is imported."""
    if config.deterministic:
        _make_deterministic()
    if (folder := cache_folder("torch")) is not None:
        # One for all ranks, which compile the same at the same moment: Inductor (2.13) renames finished files into
        # place, and compiles C++ under a file lock, so that a rank waits for another one's instead of reading half.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
    is_gpu = devices.kind == "gpu"
    os.environ["KERAS_TORCH_DEVICE"] = _KERAS_DEVICES[devices.kind]  # see `_keras_device`
    if not is_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", _number_of_gpu(devices))
    torch.cuda.set_device(device)
    # float32 means float32: TF32 keeps ten bits of it. Use --precision=bfloat16 for speed.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    # The fastest convolutions by trial, of each shape: not the same ones in each start.
    torch.backends.cudnn.benchmark = not config.deterministic
    return device


def _make_deterministic() -> None:
    """Lets torch use algorithms alone that give the same bits each time, and raise where there is none.

    docs.pytorch.org/docs/2.13/notes/randomness.html. Of cuDNN's algorithms torch (2.13) then takes those that are
    deterministic.
    """
    # cuBLAS sums in a workspace whose size says how; read when CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def timeout_of(config: Config) -> timedelta:
    """Returns how long torch waits in a collective: longer than whoever watches over the ranks, who knows more."""
    if config.hang_timeout == 0:
        return timedelta(days=365)
    return timedelta(seconds=max(config.hang_timeout or 0, SECONDS_TO_COMPILE) + 600)


def join_processes(
    devices: Devices, device: torch.device, timeout: timedelta, interface: str | None = None
) -> Processes:
    """Joins the process group of the run, where it has several processes.

    Args:
        devices: of the run.
        device: of this process.
        timeout: see `timeout_of`.
        interface: `Config.interface`.
    """
    if devices.count == 1:
        return SingleProcess()
    is_gpu, own, is_local = devices.kind == "gpu", _LOOPBACK, True
    if devices.cluster is not None:
        rank = worker_cluster()
        is_local = rank.is_local
        own = own if is_local else messages.own_address(rank.address, interface)
        if (name := messages.interface_of_address(own)) is not None:
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)
    if not dist.is_initialized():  # by an earlier run of this program, which something else has started as a rank
        dist.init_process_group("nccl" if is_gpu else "gloo", timeout=timeout, device_id=device if is_gpu else None)
        if devices.cluster is not None:
            _link_ranks(own)
        if not is_gpu:
            sockets.connect(None if is_local else own)
    local = (int(os.environ["LOCAL_RANK"]), devices.of_process) if devices.of_process > 1 else (0, 1)
    return ProcessGroup(dist.get_rank(), devices.count, device, timeout, local)


def _link_ranks(own: str) -> None:
    """Links the ranks, which then notice when one is gone, at a port that process 0 finds."""
    rank, door = worker_cluster(), None
    places: list[Any] = [None]
    if rank.process == 0:
        door = messages.listen(own, 0)
        places = [door.getsockname()[:2]]
    dist.broadcast_object_list(places)
    host, port = places[0]
    use_link(HostLink.among(rank.process, rank.num_processes, host, port, own, door), rank)


def put_batch(batch: "Batch", device: torch.device) -> DeviceBatch:
    """Brings inputs, targets and sample weights to a device."""
    import keras

    def to_device(leaf: np.ndarray | None) -> torch.Tensor | None:
        if leaf is None:
            return None
        tensor = torch.from_numpy(np.ascontiguousarray(leaf))
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    def put(data: Structure) -> Structure:
        return keras.tree.map_structure(to_device, data)

    def put_once(data: Structure) -> Structure:
        # Not from pinned memory, of which PyTorch (2.13) takes the next power of two, and gives nothing back.
        return keras.tree.map_structure(lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf)).to(device), data)

    inputs = batch.inputs
    if isinstance(inputs, CachedRows):
        rows, kept = to_device(inputs.numbers), inputs.kept.copies(put_once)
        inputs = keras.tree.map_structure(lambda leaf: leaf.index_select(0, rows), kept)
    else:
        inputs = put(inputs)
    return DeviceBatch(inputs, put(batch.targets), put(batch.sample_weight), batch.indices)


def begin_thread(device: torch.device) -> None:
    """Makes this process's GPU that of the running thread, too: a new thread's is the first GPU of the host.

    What it pins would start CUDA there, which takes some hundred MB of that GPU's memory for each rank.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most bytes that a device (on the CPU: this process) has used."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory_of_process()


def _number_of_gpu(devices: Devices) -> int:
    """Returns which of the GPUs that this process sees is its own."""
    if devices.count == 1:
        return 0
    number = int(os.environ["LOCAL_RANK"])
    return 0 if torch.cuda.device_count() == 1 else number  # each process may see its own alone


def device_name() -> str:
    """Returns the name of the first GPU or TPU, as its maker has it."""
    return torch.cuda.get_device_name()
