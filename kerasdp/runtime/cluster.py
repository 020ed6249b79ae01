"""Finds out which of a run's processes this one is, where something else starts them: torchrun, srun, mpirun..."""

import dataclasses
import os
import zlib
from collections.abc import Callable, Mapping

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.runtime import addresses, door

Environment = Mapping[str, str]

# Where a scheduler names no port, one of these is taken by the number of its job, so that two jobs seldom meet.
_FIRST_PORT, _NUM_PORTS = 20000, 10000
# Who starts a process a device, with torch, also where that is one a machine.
OF_RANKS = ("torchrun", "RANK and WORLD_SIZE")
# In the environment of worker processes that were started together: the path of the socket where they meet.
MEETING_PLACE = "KERASDP_MEETING_PLACE"
_TPU_PORT = 8476  # which JAX (0.10.2) takes on Cloud TPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where this process is among those that were started for a run: one a machine, or one a device.

    Args:
        source: who says so: `"torchrun"`, `"--hosts"`, ...
        num_processes: that were started.
        process: number of this one, from 0; those of one machine follow each other.
        local_processes: that were started on this machine.
        local_process: number of this one among them.
        coordinator: where process 0 can listen, as `"10.0.0.1:29500"`.
        fewest: of which the run can begin; as many as there are, but for a range of `--hosts`.
    """

    source: str
    num_processes: int
    process: int
    local_processes: int = 1
    local_process: int = 0
    coordinator: str
    fewest: int | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Returns host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def is_local(self) -> bool:
        """Returns whether all processes are on this machine."""
        return self.local_processes == self.num_processes

    @property
    def is_elastic(self) -> bool:
        """Returns whether processes may leave and join."""
        return self.fewest not in (None, self.num_processes)


def find_cluster(config: Config, environment: Environment = os.environ) -> Cluster | None:
    """Returns which of several processes this is; None if it is the only one.

    Flags count before the environment. There, what starts processes within another's job counts before it: torchrun
    and mpirun within a job of SLURM.

    Args:
        config: `hosts`, `host_rank` and `coordinator` are read.
        environment: of this process.

    Raises:
        UserError: if flags or variables are half set, contradict each other, or ask for what the backend cannot do.
    """
    if config.hosts is not None and config.host_range[1] == 1:
        return None  # as it says
    found = _of_flags(config, environment)
    if found is None:
        found = next(filter(None, (find(environment) for find in _FINDERS)), None)
        if found is not None and config.coordinator:
            found = dataclasses.replace(found, coordinator=config.coordinator)
    if found is None or found.num_processes == 1:
        return None
    if not 0 <= found.process < found.num_processes or not 0 <= found.local_process < found.local_processes:
        raise UserError(
            f"{found.source}: expected a process from 0 to {found.num_processes - 1}, and on this machine to "
            f"{found.local_processes - 1}. Received: {found.process} and {found.local_process}"
        )
    if not found.coordinator:
        raise UserError(
            f"{found.source} starts {found.num_processes} processes on several machines, and says not where the first "
            "one listens: add --coordinator=ADDRESS:PORT, of the machine of process 0"
        )
    return found


def check_cluster(config: Config, cluster: Cluster | None) -> None:
    """Raises `UserError` if the run cannot have several processes that something else starts, or they cannot meet."""
    if cluster is not None and config.backend == "tensorflow":
        raise UserError(
            f"several machines: there for --backend=torch and jax. Received: tensorflow, in one of the processes of "
            f"{cluster.source}; Keras 3 has no strategy of TensorFlow for several machines"
        )
    if cluster is not None and cluster.coordinator and not cluster.is_local:
        if ":" in cluster.address[0]:
            raise UserError(
                f"--coordinator: expected an IPv4 address, or a name that has one. Received: {cluster.coordinator}, of "
                "IPv6, at which torch's and JAX's collectives do not meet"
            )
        door.require_secret(cluster.source)
        if cluster.process == 0:
            addresses.check_name(cluster.address[0])
    if cluster is None or config.backend == "torch" or config.strategy == "data":
        return
    raise UserError(
        f"--strategy={config.strategy}: on one machine only. Received: several; use --strategy=data, with "
        "--shard=weights"
    )


def _of_flags(config: Config, environment: Environment) -> Cluster | None:
    """Where there is one process a machine, as `--hosts` says."""
    if config.hosts is None:
        return None
    fewest, most = config.host_range
    rank, source = config.host_rank, "--host_rank"
    if rank is None and "JOB_COMPLETION_INDEX" in environment:
        rank, source = _number(environment, "JOB_COMPLETION_INDEX"), "JOB_COMPLETION_INDEX"
    if fewest < most:  # whose hosts get their numbers when they come
        rank = 0 if rank is None else rank
    missing = [name for name, value in (("host_rank", rank), ("coordinator", config.coordinator)) if value is None]
    if rank is None or config.coordinator is None:
        raise UserError(
            f"--hosts={config.hosts}: each machine is told its number and where machine 0 listens; add "
            + " and ".join({"host_rank": "--host_rank=NUMBER", "coordinator": "--coordinator=ADDRESS:PORT"}[name]
                           for name in missing)
        )  # fmt: skip
    if rank >= most:
        raise UserError(f"{source}: expected a number below --hosts={config.hosts}. Received: {rank}")
    for variable in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        inner = "LOCAL_WORLD_SIZE" if variable == "WORLD_SIZE" else "OMPI_COMM_WORLD_LOCAL_SIZE"
        if "TORCHELASTIC_RUN_ID" not in environment and variable == "WORLD_SIZE":
            continue  # of what started this process, such as Ray's workers
        if variable in environment:
            given = _number(environment, variable) // max(1, _number(environment, inner))
            raise UserError(
                f"--hosts={config.hosts} contradicts {variable}={environment[variable]} ({given} machines): whoever "
                "starts the processes numbers them; leave --hosts and --host_rank out"
            )
    return Cluster(source="--hosts", num_processes=most, process=rank, coordinator=config.coordinator, fewest=fewest)


def _of_torchrun(environment: Environment) -> Cluster | None:
    """Also of whoever else sets torch's variables: Kubeflow, `torch.distributed.launch`, Ray."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        if "TORCHELASTIC_RUN_ID" in environment or ("MASTER_ADDR" in environment and "RANK" in environment):
            _require(environment, "torchrun", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return None
    _require(environment, "torchrun", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return Cluster(
        source=OF_RANKS[0] if "TORCHELASTIC_RUN_ID" in environment else OF_RANKS[1],
        num_processes=_number(environment, "WORLD_SIZE"),
        process=_number(environment, "RANK"),
        local_processes=_number(environment, "LOCAL_WORLD_SIZE", 1),
        local_process=_number(environment, "LOCAL_RANK", 0),
        coordinator=f"{environment['MASTER_ADDR']}:{_number(environment, 'MASTER_PORT')}",
    )


def _of_mpi(environment: Environment) -> Cluster | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    if not any(name in environment for name in names):
        return None
    _require(environment, "mpirun", *names)
    size, rank, local_size, local_rank = (_number(environment, name) for name in names)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or "0"
    return Cluster(
        source="mpirun",
        num_processes=size,
        process=rank,
        local_processes=local_size,
        local_process=local_rank,
        coordinator=_given(environment)
        or (f"{addresses.LOOPBACK}:{_port(zlib.crc32(job.encode()))}" if local_size == size else ""),
    )


def _of_tpu(environment: Environment) -> Cluster | None:
    names = [name for name in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    if len(names) < 2:
        return None
    _require(environment, "Cloud TPU", "TPU_WORKER_ID")
    return Cluster(
        source="TPU_WORKER_HOSTNAMES",
        num_processes=len(names),
        process=_number(environment, "TPU_WORKER_ID"),
        coordinator=f"{names[0]}:{_TPU_PORT}",
    )


def _of_slurm(environment: Environment) -> Cluster | None:
    """Of a task that srun started. The script of sbatch by itself is one process."""
    if "SLURM_STEP_ID" not in environment or _number(environment, "SLURM_NTASKS", 1) == 1:
        return None
    _require(environment, "srun", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    port = (environment.get("SLURM_STEP_RESV_PORTS") or "").partition("-")[0]
    # Two steps of a job may run side by side.
    port = port or str(_port(_number(environment, "SLURM_JOB_ID") + 101 * _number(environment, "SLURM_STEP_ID")))
    return Cluster(
        source="srun",
        num_processes=_number(environment, "SLURM_NTASKS"),
        process=_number(environment, "SLURM_PROCID"),
        local_processes=_tasks_of_node(environment),
        local_process=_number(environment, "SLURM_LOCALID"),
        coordinator=_given(environment) or f"{first_host(nodes)}:{port}",
    )


def _tasks_of_node(environment: Environment) -> int:
    """Returns how many tasks the step has on this node, of a list such as `2(x3),1`."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "1")
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    node = _number(environment, "SLURM_NODEID")
    return counts[node] if node < len(counts) else counts[-1]


def first_host(nodes: str) -> str:
    """Returns the first machine of a list as SLURM writes it: `gpu[07-09,12],login1` begins with gpu07."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.partition(",")[0]
    within, _, tail = rest.partition("]")
    return head + within.replace("-", ",").partition(",")[0] + tail.partition(",")[0]


def _given(environment: Environment) -> str:
    """Returns the coordinator as torch's two variables name it, which people also set for other launchers."""
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return f"{environment['MASTER_ADDR']}:{_number(environment, 'MASTER_PORT')}"
    return ""


def _port(number: int) -> int:
    return _FIRST_PORT + number % _NUM_PORTS


def _number(environment: Environment, name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UserError(f"{name}: expected a whole number in the environment. Received: {text!r}")
    return int(text)


def _require(environment: Environment, launcher: str, *names: str) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        have = ", ".join(f"{name}={environment[name]}" for name in names if name in environment) or "none of them"
        raise UserError(
            f"{launcher} sets {', '.join(names)} together. Received: {have}, without {', '.join(missing)}; set these, "
            "or --hosts=1 for a run of one process"
        )


def worker_cluster(environment: Environment = os.environ) -> Cluster:
    """Returns which of the ranks this process is that torch's launcher has started."""
    found = _of_torchrun(environment)
    if found is None:
        raise RuntimeError("worker_cluster: expected a process that torch's launcher started. Received: another")
    return found


_FINDERS: tuple[Callable[[Environment], Cluster | None], ...] = (
    _of_torchrun, _of_mpi, _of_tpu, _of_slurm
)  # fmt: skip
