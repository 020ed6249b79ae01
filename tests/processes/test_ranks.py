"""Which of several processes this is: what launchers set, what contradicts itself, and what is half set."""

import pytest

from kerasdp.config import Config
from kerasdp.config.choices import choices_of
from kerasdp.errors import UserError
from kerasdp.processes.ranks import find_ranks, require_same
from tests.helpers import BACKENDS

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "12345", "SLURM_NTASKS": "5", "SLURM_PROCID": "4", "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08,12]",
}  # fmt: skip
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
JAX = {"JAX_COORDINATOR_ADDRESS": "node0:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


def numbers(found):
    return found.source, found.num_processes, found.process, found.local_process


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, ("torchrun", 4, 3, 1)),
        (TORCHRUN | SRUN, ("torchrun", 4, 3, 1)),  # torchrun within a job
        (without(TORCHRUN, "TORCHELASTIC_RUN_ID", "LOCAL_RANK"), ("RANK and WORLD_SIZE", 4, 3, 0)),
    ],
)
def test_ranks_of_torch(environment, expected):
    assert numbers(find_ranks("torch", environment)) == expected


@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
@pytest.mark.parametrize(
    "environment",
    [
        {},
        without(SRUN, "SLURM_STEP_ID"),  # the script of sbatch
        SRUN | {"SLURM_NTASKS": "1"},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
    ],
)
def test_one_process_is_one(backend, environment):
    assert find_ranks(backend, environment) is None


@pytest.mark.parametrize(
    ("backend", "environment", "words"),
    [
        ("torch", SRUN, "srun starts 5 processes, and each would train alone with --backend=torch: .*with torchrun"),
        ("torch", MPIRUN, "mpirun starts 4 processes, and each would train alone"),
        ("jax", TORCHRUN, "torchrun starts 4 processes, .* --backend=jax: start the program with SLURM"),
        ("tensorflow", TORCHRUN, "--backend=tensorflow: Keras 3 cannot train on several"),
    ],
)
def test_processes_that_would_train_alone_are_refused(backend, environment, words):
    with pytest.raises(UserError, match=words):
        find_ranks(backend, environment)


NEEDS_JAX = pytest.mark.skipif("jax" not in BACKENDS, reason="needs jax")


@NEEDS_JAX
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (JAX, ("JAX_COORDINATOR_ADDRESS", 3, 2, 0)),
        (SRUN, ("slurm", 5, 4, 0)),
        (SRUN | JAX, ("JAX_COORDINATOR_ADDRESS", 3, 2, 0)),
        ({"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"} | MPIRUN,
         ("ompi", 4, 2, 1)),
        (JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod by itself
    ],
)  # fmt: skip
def test_processes_of_jax(environment, expected, monkeypatch):
    from kerasdp.backends.jax.processes import find_cluster

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = find_cluster()
    assert (found and numbers(found)) == expected


@NEEDS_JAX
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (without(JAX, "JAX_PROCESS_ID"), "expected all three. Received: no JAX_PROCESS_ID"),
        (without(JAX, "JAX_COORDINATOR_ADDRESS"), "expected all three. Received: no JAX_COORDINATOR_ADDRESS"),
        (JAX | {"JAX_PROCESS_ID": "3"}, "JAX_PROCESS_ID: expected 0 to 2. Received: 3"),
    ],
)
def test_what_is_half_set_for_jax_is_named(environment, words):
    from kerasdp.backends.jax.processes import find_cluster

    with pytest.raises(UserError, match=words):
        find_cluster(environment)


class Two:
    """Processes, of which the other one has given something."""

    rank = 0

    def __init__(self, other):
        self.other = other

    num_processes = 2

    def all_gather_object(self, value):
        other = {name: {"shown": shown} for name, shown in self.other.items()}
        return [value, value | {"host": "node1", "arguments": value["arguments"] | other}]


def test_hosts_that_differ_are_named():
    config = Config(backend="torch")
    require_same(Two({}), config)
    with pytest.raises(UserError) as caught:
        require_same(Two({"--batch_size": "7"}), config)
    assert ": expected the same --batch_size on all ranks. Received: 64 on rank 0 of " in str(caught.value)
    assert str(caught.value).endswith(", 7 on rank 1 of node1; pass the same value on every rank")
    with pytest.raises(UserError, match="expected the same numpy on all ranks. Received: .*, 9.8.7 on rank 1 of node1"):
        require_same(Two({"numpy": "9.8.7"}), config)


def test_what_is_a_hosts_own_is_not_compared():
    own = {name for name, choice in choices_of(Config).items() if choice.of_host}
    assert own - {"data_dir"} == {"workdir", "checkpoint_dir", "verbose", "tracker", "resume"}
    given = []
    processes = Two({})
    processes.all_gather_object = lambda value: given.append(value) or [value]
    require_same(processes, Config(workdir="mine", verbose=0))
    assert not {f"--{name}" for name in own} & set(given[0]["arguments"])
