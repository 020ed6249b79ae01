"""Which of several processes this is: what launchers set, what contradicts itself, and what is half set."""

import pytest

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.runtime.cluster import check_cluster, find_cluster, first_host

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "12345", "SLURM_NTASKS": "5", "SLURM_PROCID": "4", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2", "SLURM_STEP_NODELIST": "gpu[07-08,12]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}  # fmt: skip


def numbers(found):
    return found.process, found.num_processes, found.local_process, found.local_processes, found.coordinator


@pytest.mark.parametrize(
    ("environment", "config", "expected"),
    [
        (TORCHRUN, {}, (3, 4, 1, 2, "node1:29500")),
        (TORCHRUN | SRUN, {}, (3, 4, 1, 2, "node1:29500")),  # torchrun within a job
        (SRUN, {}, (4, 5, 0, 1, "gpu07:22345")),
        (SRUN | {"MASTER_ADDR": "ib07", "MASTER_PORT": "7"}, {}, (4, 5, 0, 1, "ib07:7")),
        (SRUN, {"coordinator": "10.0.0.1:9"}, (4, 5, 0, 1, "10.0.0.1:9")),
        (MPIRUN, {"coordinator": "10.0.0.1:9"}, (2, 4, 0, 2, "10.0.0.1:9")),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, {}, (1, 2, 0, 1, "a:8476")),
        ({}, {"hosts": 2, "host_rank": 1, "coordinator": "a:1"}, (1, 2, 0, 1, "a:1")),
        ({"JOB_COMPLETION_INDEX": "1"}, {"hosts": 2, "coordinator": "a:1"}, (1, 2, 0, 1, "a:1")),
        # What Ray's workers have around them.
        ({"RANK": "0", "WORLD_SIZE": "8"}, {"hosts": 2, "host_rank": 1, "coordinator": "a:1"}, (1, 2, 0, 1, "a:1")),
    ],
)
def test_each_launcher_is_understood(environment, config, expected):
    assert numbers(find_cluster(Config(**config), environment)) == expected


@pytest.mark.parametrize(
    ("environment", "config"),
    [
        ({}, {}),
        (TORCHRUN, {"hosts": 1}),
        ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}, {}),  # the script of sbatch
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, {}),
    ],
)
def test_one_process_is_one(environment, config):
    assert find_cluster(Config(**config), environment) is None


@pytest.mark.parametrize(
    ("environment", "config", "words"),
    [
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "a"}, {}, "RANK=0, without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "a", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, {}, "RANK: expected a whole number"),
        (TORCHRUN | {"RANK": "4"}, {}, "torchrun: expected a process from 0 to 3"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {}, "without OMPI_COMM_WORLD_RANK"),
        (MPIRUN, {}, "mpirun starts 4 processes on several machines, .* add --coordinator=ADDRESS:PORT"),
        ({}, {"hosts": 2}, "add --host_rank=NUMBER and --coordinator=ADDRESS:PORT"),
        ({"JOB_COMPLETION_INDEX": "2"}, {"hosts": 2, "coordinator": "a:1"}, "JOB_COMPLETION_INDEX: expected a number"),
        (TORCHRUN, {"hosts": 3, "host_rank": 0, "coordinator": "a:1"}, "--hosts=3 contradicts WORLD_SIZE=4"),
        (MPIRUN, {"hosts": 3, "host_rank": 0, "coordinator": "a:1"}, "--hosts=3 contradicts OMPI_COMM_WORLD_SIZE=4"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}, "without TPU_WORKER_ID"),
    ],
)
def test_what_is_half_set_is_named(environment, config, words):
    from kerasdp.errors import from_command_line

    with from_command_line(), pytest.raises(UserError, match=words):
        find_cluster(Config(**config), environment)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hosts": "0"}, "hosts: expected a number of machines"),
        ({"hosts": "3:1"}, "hosts: expected a number of machines"),
        ({"hosts": "1:2", "backend": "jax"}, "hosts leave and join with --backend=torch only"),
        ({"host_rank": 0}, "--host_rank says which of several machines this is: add --hosts=NUMBER"),
        ({"hosts": 2, "host_rank": 2}, "--host_rank: expected a number below --hosts=2"),
        ({"coordinator": "10.0.0.1"}, "coordinator: expected the address and port of host 0"),
    ],
)
def test_wrong_choices_are_refused(fields, words):
    with pytest.raises(UserError, match=words):
        Config(**fields)


def test_several_machines_are_for_torch_and_jax():
    with pytest.raises(UserError, match="--hosts=2: there for --backend=torch and jax. Received: tensorflow, where"):
        Config(backend="tensorflow", hosts=2)
    with pytest.raises(UserError, match="several machines: .* Received: tensorflow, in one of the processes of"):
        check_cluster(Config(backend="tensorflow"), find_cluster(Config(), TORCHRUN))


def test_only_data_parallelism_is_there_on_several_machines_of_jax():
    found = find_cluster(Config(), TORCHRUN)
    check_cluster(Config(backend="torch", strategy="pipeline"), found)
    check_cluster(Config(backend="jax", accumulate=2), found)
    with pytest.raises(
        UserError, match="--strategy=tensor: on one machine only. Received: several; use --strategy=data"
    ):
        check_cluster(Config(backend="jax", strategy="tensor"), found)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("a,b", "a"), ("gpu[07-09,12],login1", "gpu07"), ("n[3].cluster,b", "n3.cluster"),
     ("login,gpu[1-2]", "login")],
)  # fmt: skip
def test_the_first_of_slurms_nodes(nodes, first):
    assert first_host(nodes) == first


def test_stages_count_the_devices_of_all_machines():
    job = {"hosts": 2, "host_rank": 0, "coordinator": "a:1", "strategy": "pipeline", "backend": "torch"}
    assert Config(**job, cut_at="a", num_devices=1).num_replicas(2) == 1
    with pytest.raises(UserError, match="--gpus: expected a multiple of the 3 stages, a device each. Received: 4"):
        Config(**job, cut_at="a,b", num_devices=2)
