"""Finds the place of this process in the run, and compares what the processes of several machines were given."""

import dataclasses
import os
import socket
from collections.abc import Mapping

from kerasdp.config import Config
from kerasdp.config.choices import choices_of
from kerasdp.config.validation import versions
from kerasdp.errors import UserError
from kerasdp.runtime.ranks import Processes

Environment = Mapping[str, str]

# How many processes somebody else has started, of whom torch knows nothing; in a script of sbatch srun has not, yet.
_OF_TASKS = {"srun": ("SLURM_STEP_ID", "SLURM_NTASKS"), "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")}
_PAGE = "docs/many-machines.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where this process is among those that were started for a run.

    Args:
        source: what says so: `"torchrun"`, `"slurm"`, ...
        num_processes: that were started.
        process: number of this one, from 0.
        local_process: number of this process on its machine.
    """

    source: str
    num_processes: int
    process: int
    local_process: int = 0


def find_ranks(backend: str, environment: Environment = os.environ) -> Cluster | None:
    """Returns which rank of torch this process is, as torchrun and others say in the environment; None: the only one.

    Raises:
        UserError: if several processes were started, and each would train alone.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        source = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "RANK and WORLD_SIZE"
        number, rank, local = (number_in(environment, name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
        found = Cluster(source=source, num_processes=number, process=rank, local_process=local)
    else:
        of_tasks = ((source, names) for source, names in _OF_TASKS.items() if names[0] in environment)
        source, (_, name) = next(of_tasks, ("", ("", "")))
        found = Cluster(source=source, num_processes=number_in(environment, name, 1), process=0)
    if found.num_processes == 1:
        return None
    if backend != "torch":
        words = "Keras 3 has no strategy of TensorFlow for several machines; use --backend=torch or jax"
        if backend == "jax":
            words = f"JAX takes its place from SLURM, Kubernetes, Cloud TPU or JAX_COORDINATOR_ADDRESS: {_PAGE}"
        raise UserError(
            f"{found.source} starts {found.num_processes} processes. Received: --backend={backend}; {words}"
        )
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise UserError(
            f"{found.source} starts {found.num_processes} processes, and each would train alone: torch takes its place "
            f"from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Received: no {missing[0]}; start them by "
            f"torchrun, or set these: {_PAGE}"
        )
    return found


def number_in(environment: Environment, name: str, default: int = 0) -> int:
    """Returns a number of the environment. Raises `UserError` if it is none."""
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"{name}: expected a whole number in the environment. Received: {text!r}")
    return int(text)


def require_same(processes: Processes, config: Config) -> None:
    """Raises the same `UserError` on all processes if they differ in a choice or a version."""
    used = ("python", "kerasdp", "keras", "numpy", config.backend)
    packages = {name: version for name, version in versions().items() if name in used}
    fields, known = config.as_dict(), choices_of(Config)
    choices = {f"--{each.flags[-1]}": fields[name] for name, each in known.items() if not each.of_host}
    given = processes.all_gather_object((f"{socket.gethostname()}, process {processes.rank}", choices | packages))
    (first, expected), *others = given
    for name, received in others:
        for what in expected | received:
            one, two = expected.get(what), received.get(what)
            if one != two:
                raise UserError(
                    f"{what}: expected the same on all hosts. Received: {one} on {first}, {two} on {name}; give each "
                    "the same"
                )
