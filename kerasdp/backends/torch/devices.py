"""Chooses PyTorch devices, starts and joins one process per device, and copies batches to the devices."""

import collections
import dataclasses
import functools
import hashlib
import os
import secrets
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from kerasdp.backends.torch import collectives
from kerasdp.backends.torch.private import leave_process_group
from kerasdp.backends.torch.processes import GlooProcesses
from kerasdp.config import Config
from kerasdp.contract import DeviceBatch, SingleProcess, Strategy, Structure
from kerasdp.data.sampling import CachedRows
from kerasdp.errors import UserError
from kerasdp.processes import outcome
from kerasdp.processes.devices import AlreadyStartedError, Devices, cache_folder, choose_devices
from kerasdp.processes.error_text import lost_process
from kerasdp.processes.ranks import Cluster, Processes, require_same
from kerasdp.processes.watchdog import SECONDS_TO_COMPILE
from kerasdp.processes.workers import run_workers
from kerasdp.step.replica import compared_variables

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch


# Batches of tf.data, and batches from other processes, are in read-only memory. No code writes to them.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")

# By the kind of a run's devices.
_KERAS_DEVICES = {"gpu": "cuda", "cpu": "cpu"}


def make_devices(config: Config, cluster: Cluster | None = None) -> Devices:
    """Chooses the devices of a run. The function does not initialize CUDA, so worker processes can still be started.

    Raises:
        AlreadyStartedError: if the run uses this process, and Keras is already imported with another kind of device.
        UserError: if `num_devices` differs from the number of processes that a launcher started on this machine.
    """
    # `device_count` also counts GPUs of a driver that is too old for torch's CUDA.
    num_found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cluster is not None:  # a rank, which has one device
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if config.num_devices not in (None, num_ranks):
            raise UserError(
                f"--gpus: expected {num_ranks}, one for each process on this machine ({cluster.source}). "
                f"Received: {config.num_devices}; leave out --gpus, and start one process per device"
            )
        num_found = min(num_found, 1)
    devices = choose_devices(config, num_found, cluster=cluster, is_rank=cluster is not None)
    if config.device == "auto" and not devices.is_accelerator and torch.backends.mps.is_available():
        devices = dataclasses.replace(devices, reason="Apple's GPU, mps, is not used: nobody has tried kerasdp on it")
    wanted, known = _KERAS_DEVICES[devices.kind], _keras_device()
    if (cluster or devices.count == 1) and "keras" in sys.modules and wanted != known:
        raise AlreadyStartedError(f"Keras uses device {known}, not {wanted}")
    return devices


def _keras_device() -> str:
    """Returns the kind of torch device that Keras uses: `cuda`, `mps` or `cpu`.

    Keras (3.15) chooses its device once, when Keras is imported.
    """
    found = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return (os.environ.get("KERAS_TORCH_DEVICE") or found).partition(":")[0]


def device_of_process(devices: Devices, config: Config) -> torch.device:
    """Selects this process's device, and makes it the default device of torch and Keras. Returns the device.

    Keras must not be imported yet.
    """
    if config.deterministic:
        # Only algorithms with bit-equal results each time. Where there is none, torch raises an error
        # (docs.pytorch.org/docs/2.13/notes/randomness.html). The order of sums in cuBLAS depends on the size of its
        # workspace, which is read when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        # One folder for all ranks, which compile the same code at the same moment. Inductor (2.13) renames finished
        # files into place, and compiles C++ under a file lock. So no rank reads an unfinished file.
        # By default it runs code from a folder in /tmp that any user may have made.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_folder("torch") or _folder_of_run()
    is_gpu = devices.kind == "gpu"
    os.environ["KERAS_TORCH_DEVICE"] = _KERAS_DEVICES[devices.kind]  # see `_keras_device`
    if not is_gpu:
        return torch.device("cpu")
    # A process may see only its GPU.
    is_alone = devices.count == 1 or torch.cuda.device_count() == 1
    device = torch.device("cuda", 0 if is_alone else int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # TF32 keeps ten bits of a float32. By default torch (2.13) multiplies in it in convolutions alone.
    torch.backends.cudnn.allow_tf32 = config.may_use_tf32
    torch.backends.cuda.matmul.allow_tf32 = config.precision == "tf32"
    # The fastest convolutions by trial, of each shape: not the same ones in each start.
    torch.backends.cudnn.benchmark = not config.deterministic
    return device


@functools.cache  # the folder exists until the process ends
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kerasdp-", ignore_cleanup_errors=True)


def _folder_of_run() -> str:
    """Returns a folder that no other user can access. The folder is deleted when the run ends."""
    worker = outcome.current
    return _temporary_folder().name if worker is None else worker.folder


def timeout_of(config: Config) -> timedelta:
    """Returns the timeout of torch's collectives.

    This timeout is longer than the timeout of the watchdog. So the watchdog fails first, and its error is more
    specific.
    """
    if config.hang_timeout == 0:
        return timedelta(days=365)
    return timedelta(seconds=max(config.hang_timeout or 0, SECONDS_TO_COMPILE) + 600)


def join_processes(devices: Devices, device: torch.device, config: Config) -> Processes:
    """Joins the process group of the run, if the run has several processes. Returns the `Processes` of the run.

    Args:
        devices: the devices of the run.
        device: the device of this process.
        config: the settings of the run.
    """
    if devices.count == 1:
        return SingleProcess()
    is_gpu, is_joined = devices.kind == "gpu", dist.is_initialized()  # by an earlier run of this program, or by Ray
    join = functools.partial(
        dist.init_process_group, "nccl" if is_gpu else "gloo", timeout=timeout_of(config),
        device_id=device if is_gpu else None,
    )  # fmt: skip
    if devices.cluster is not None:
        if not is_joined:
            join()
        processes = GlooProcesses()
        require_same(processes, config)
        return processes
    key = None
    if not is_joined:
        listen_on_loopback()
        worker = outcome.current
        assert worker is not None  # noqa: S101
        # The ranks of one machine find their addresses in a file, in a folder of this user's alone.
        store: Any = dist.FileStore(os.path.join(worker.folder, "store"), devices.count)  # type: ignore[attr-defined]
        rank = int(os.environ["RANK"])
        join(store=store, rank=rank, world_size=devices.count)
        if rank == 0:
            store.set("key", secrets.token_hex())
        key = store.get("key")
    processes = GlooProcesses(key)
    if not is_gpu and not is_joined:
        collectives.connect_sockets(processes)
    return processes


def listen_on_loopback() -> None:
    """Makes Gloo and NCCL listen only on the loopback interface.

    By default, Gloo and NCCL listen on the address of the machine's host name.
    """
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for library in ("GLOO", "NCCL"):
        os.environ[f"{library}_SOCKET_IFNAME"] = loopback


class TorchStrategy(Strategy):
    """Implements the methods that all strategies of the torch backend share.

    Attributes:
        config: the settings of the run.
        device: the device of this process.
        is_gpu: whether the device is a GPU.
    """

    def __init__(self, devices: Devices, config: Config):
        """Joins the process group of the run. Keras must not be imported yet."""
        self.config = config
        self.device = device_of_process(devices, config)
        self.is_gpu = self.device.type == "cuda"
        self.processes = join_processes(devices, self.device, config)
        # Whether each thread is ready to copy batches. This thread trains, and is ready.
        self._threads = threading.local()
        self._threads.is_ready = True

    def put_batch(self, batch: "Batch") -> DeviceBatch:
        """Copies the inputs, targets and sample weights of a batch to the device.

        A thread that reads data selects this process's GPU in its first call. It also selects a separate CUDA stream
        for its copies. Without this selection, the thread would use the first GPU of the host. Pinning memory would
        then initialize CUDA on that GPU, which takes some hundred MB of GPU memory per rank. The copies would also run
        on the stream of the training steps, and would wait for these steps.
        """
        if self.is_gpu and not hasattr(self._threads, "is_ready"):
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))
            self._threads.is_ready = True
        return put_batch(batch, self.device)

    def diverged_variables(self, model: Any, state_only: bool = False) -> list[str]:
        """Returns the paths of all variables, including seeds, that are not bit-equal on all ranks that hold them."""
        return self.differing(compared_variables(model, state_only))

    def differing(self, own: "list[keras.Variable]") -> list[str]:
        """Returns the paths of the variables in `own` that are not bit-equal on all ranks that hold them."""

        def digest(variable: "keras.Variable") -> bytes:
            array = np.ascontiguousarray(variable.value.detach().to("cpu", torch.float64).numpy())
            return hashlib.sha256(array.tobytes()).digest()

        if self.processes.num_processes == 1:
            return []
        found: dict[tuple[str, int], set[bytes]] = {}
        for of_rank in self.processes.all_gather_object([(variable.path, digest(variable)) for variable in own]):
            seen = collections.Counter[str]()
            for path, value in of_rank:  # which several variables may have
                found.setdefault((path, seen[path]), set()).add(value)
                seen[path] += 1
        return [path for (path, _), digests in found.items() if len(digests) > 1]

    def peak_memory_bytes(self) -> int:
        """Returns the peak memory in bytes: of the GPU if the run uses GPUs, otherwise of this process."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else super().peak_memory_bytes()


def put_batch(batch: "Batch", device: torch.device) -> DeviceBatch:
    """Copies the inputs, targets and sample weights of a batch to a device."""
    import keras

    def to_device(leaf: np.ndarray | None) -> torch.Tensor | None:
        if leaf is None:
            return None
        tensor = torch.from_numpy(np.ascontiguousarray(leaf))
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    def put(data: Structure) -> Structure:
        return keras.tree.map_structure(to_device, data)

    def put_once(data: Structure) -> Structure:
        # Not from pinned memory: PyTorch (2.13) rounds its size up to a power of two, and never frees it.
        return keras.tree.map_structure(lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf)).to(device), data)

    inputs = batch.inputs
    if isinstance(inputs, CachedRows):
        rows, kept = to_device(inputs.numbers), inputs.kept.copies(put_once)
        inputs = keras.tree.map_structure(lambda leaf: leaf.index_select(0, rows), kept)
    else:
        inputs = put(inputs)
    found = DeviceBatch(inputs, put(batch.targets), put(batch.sample_weight), batch.indices)
    if device.type == "cuda":
        _hand_over(keras.tree.flatten([found.inputs, found.targets, found.sample_weight]), device)
    return found


def _hand_over(tensors: list[torch.Tensor | None], device: torch.device) -> None:
    """Makes tensors that were copied on a separate CUDA stream safe to use on the default stream, where the steps run.

    The function waits until the copies are complete. It also marks the tensors as used by the default stream. So
    PyTorch reuses their memory only after the steps that read these tensors. On the default stream, the function does
    nothing.
    """
    stream, of_steps = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if stream == of_steps:
        return
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(of_steps)
    stream.synchronize()


# The modules that each process imports, and that take the most time.
_PRELOAD = ["torch", "keras", "kerasdp.training.runner", "kerasdp.backends.torch.data_parallel"]


def start_workers(worker: Callable[..., Any], devices: Devices, settings: Config, train: Callable[..., Any]) -> Any:
    """Calls `worker(devices, settings, train)` in one process per device. Returns the result of rank 0.

    With a single device, `worker` runs in this process. It also runs in this process if torchrun has started this
    process as a rank. In all other cases, this process starts worker processes and watches them.

    Raises:
        UserError: if `train` refers to an object that cannot be sent to other processes.
        RunError: the error of the first worker that failed. All other workers are stopped first.
    """
    if devices.cluster is not None:
        return _started_rank(worker, devices, settings, train)
    num_local = devices.count
    if num_local == 1:
        return worker(devices, settings, train)
    # The processes share the cores. By default torch gives each all cores, and Inductor (2.13) up to 32 processes.
    share = str(max(1, (os.cpu_count() or 1) // num_local))
    threads = {name: os.environ.get(name, share) for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")}
    return run_workers(
        _rank,
        (worker, devices, settings, train),
        names=[f"rank {number}" for number in range(num_local)],
        variables=lambda number: threads | {"RANK": str(number), "LOCAL_RANK": str(number)},
        # Workers are forked from a process that has imported these modules. Not with GPUs, which this process may have
        # looked for, and not on macOS, where torch's libraries may have started threads.
        preload=None if torch.cuda.device_count() or sys.platform != "linux" else _PRELOAD,
    )


@record  # so that torchrun shows the first error of all ranks
def _started_rank(worker: Callable[..., Any], *args: Any) -> Any:
    """Runs `worker` in a process that torchrun or another launcher has started as one rank."""
    try:
        return worker(*args)
    except Exception as error:
        if (lost := lost_process(error)) is None:
            raise
        raise lost from error


def _rank(worker: Callable[..., Any], *args: Any) -> Any:
    """Runs `worker` in a process that `start_workers` has started as one rank."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # which was read where torch was imported
    result = worker(*args)
    leave_process_group()
    return result
