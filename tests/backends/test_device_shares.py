"""Devices of unequal speed get unequal shards, and learn what one device learns; gradients are added where one says."""

import json

import numpy as np
import pytest

from kerasdp.config import Config
from kerasdp.data.sampling import Split
from kerasdp.errors import UserError
from kerasdp.training.device_shares import fastest, shares_by_time
from tests.helpers import BACKENDS, PROGRAMS, assert_same, result_of, run, train_resumable

ONE, SPLITTING = {"num_devices": 1}, [name for name in ("torch", "tensorflow") if name in BACKENDS]
NUMBERS = ("losses", "history", "evaluate", "predictions", "weights")


def results(backend, *ways, warm=None):
    return result_of(run(PROGRAMS / "device_shares.py", backend, json.dumps(ways), backend=warm, timeout=900))


@pytest.mark.parametrize(
    ("num_rows", "shares", "expected"),
    [
        (64, (3, 1), [(0, 48, 48), (48, 16, 16)]),
        (13, (3, 1), [(0, 10, 10), (10, 3, 3)]),
        (1, (3, 1), [(0, 1, 1), (1, 0, 1)]),
        (1, (1, 100), [(0, 0, 1), (0, 1, 1)]),
        (10, (1, 2, 2), [(0, 2, 2), (2, 4, 4), (6, 4, 4)]),
        (7, None, [(0, 4, 4), (4, 3, 4)]),
    ],
)
def test_which_rows_each_replica_has(num_rows, shares, expected):
    split = Split(len(expected), shares)
    assert [tuple(each) for each in split.replicas(num_rows)] == expected


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 9, 64])
def test_the_processes_have_each_row_once_and_in_order(num_rows, num_processes):
    split = Split(4, (5, 1, 1, 2))
    own = [split.rows_of_process(num_rows, (rank, num_processes)) for rank in range(num_processes)]
    of_replicas = np.split(np.concatenate(own), np.cumsum([each.size for each in split.replicas(num_rows)])[:-1])
    real = [rows[: each.num_rows] for rows, each in zip(of_replicas, split.replicas(num_rows), strict=True)]
    assert np.concatenate(real).tolist() == list(range(num_rows))


def test_shares_by_time():
    # Three times as fast; with 10 s of its own for each pass; and one that gets its one row.
    assert shares_by_time([(32, 32.0), (32, 96.0)], [(48, 48.0), (16, 48.0)], 64) == (48, 16)
    assert shares_by_time([(32, 42.0), (32, 106.0)], [(46, 56.0), (18, 64.0)], 64) == (48, 16)
    assert shares_by_time([(2, 1.0), (2, 1000.0)], [(3, 1.5), (1, 500.0)], 4) == (3, 1)


def test_devices_that_are_alike_keep_equal_shards():
    equal = [(7, 0.0101), (6, 0.0060)]
    assert fastest([equal, [(5, 0.0095), (8, 0.0070)], [(1, 0.0099), (12, 0.0093)]], 13) == (7, 6)
    assert fastest([equal, [(5, 0.0080), (8, 0.0070)], [(1, 0.0099), (12, 0.0093)]], 13) == (5, 8)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device_shares": "3,1", "backend": "jax"}, "XLA gives each device equally many rows"),
        ({"device_shares": "3,1", "num_devices": 3}, "expected 3 numbers, one for each device. Received: 2, 3,1"),
        ({"device_shares": "3,1", "num_devices": 1}, "one device has all of the batch"),
        ({"device_shares": "3,0"}, "--device_shares: expected auto, or a whole number of at least 1 for each device"),
        ({"device_shares": "half"}, "--device_shares: expected auto, or a whole number"),
        ({"device_shares": "99,1", "num_devices": 2}, "of a batch of 64 samples a device would get less than one"),
        ({"device_shares": "3,1", "accumulate": 2}, "not together with --accumulate=2"),
        ({"device_shares": "auto", "strategy": "pipeline"}, "not together with --strategy=pipeline"),
        ({"device_shares": "3,1", "hosts": "1:2"}, "with which devices leave and join"),
        ({"device_shares": "3,1", "dry_run": True}, "a dry run tells of equal shares"),
        ({"reduce": "gpu"}, "--reduce: expected one of device, host. Received"),
        ({"reduce": "host", "backend": "jax"}, "where XLA adds up the gradients on the devices"),
        ({"reduce": "host", "compile": "on"}, "not together with --compile=on"),
        ({"reduce": "host", "strategy": "tensor"}, "not together with --strategy=tensor"),
        ({"reduce": "device", "num_devices": 1}, "one device adds no gradients"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(fields, words):
    with pytest.raises(UserError) as caught:
        Config(**fields)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.proof
@pytest.mark.parametrize("way", ["shares", "host"])
@pytest.mark.parametrize("backend", SPLITTING)
def test_unequal_shards_and_sums_in_host_memory_teach_the_same(backend, way):
    """A penalty, a loss that a layer adds, batch norm, dropout, weights; evaluation and prediction; uneven batches."""
    settings = {"shares": {"device_shares": "3,1"}, "host": {"reduce": "host"}}[way]
    # On two devices first: a worker that is forked after a training would have the locks of its threads.
    found, one = results(backend, {"num_devices": 2} | settings, ONE, warm=backend)
    assert way == "host" or found["first"] == [11, 4]
    assert len(one["losses"]) == 9
    for name in NUMBERS:
        assert_same(one[name], found[name], 1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("backend", SPLITTING)
def test_in_float64_nothing_else_differs(backend):
    ways = [
        {"num_devices": 3, "device_shares": "5,1,2"},
        {"num_devices": 2, "device_shares": "1,14"},  # of the 9 rows that end an evaluation one has 1
        {"num_devices": 2, "device_shares": "14,1", "batch_norm": "sync"},
        {"num_devices": 2, "reduce": "device"},
    ]
    one, *found = results(backend, *({"precision": "float64"} | way for way in (ONE, *ways)))
    for result in found:
        for name in NUMBERS:
            assert_same(one[name], result[name], 1e-12)


@pytest.mark.proof
@pytest.mark.parametrize("backend", SPLITTING)
def test_steps_of_ones_own(backend):
    one, shares, host = results(
        backend,
        ONE | {"own_step": True},
        {"num_devices": 2, "device_shares": "3,1", "own_step": True},
        {"num_devices": 2, "reduce": "host", "own_step": True},
    )
    for name in ("losses", "history", "weights"):
        if one[name]:
            assert_same(one[name], shares[name], 1e-5)
            assert_same(one[name], host[name], 1e-5)


@pytest.mark.proof
@pytest.mark.skipif("torch" not in BACKENDS, reason="compiled steps are torch's")
def test_compiled_steps_of_unequal_shards():
    one, shares = results(
        "torch", ONE | {"compile": "on"}, {"num_devices": 2, "device_shares": "3,1", "compile": "on"}
    )  # fmt: skip
    for name in NUMBERS:
        assert_same(one[name], shares[name], 1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("shares", ["3,1", "auto"])
@pytest.mark.parametrize("backend", SPLITTING)
def test_a_resumed_run_keeps_its_shares_and_is_bit_equal(backend, shares, tmp_path):
    stopped = train_resumable(tmp_path / "run", backend, 2, device_shares=shares, max_steps=15, verbose=2)
    result_of(stopped)
    resumed = train_resumable(tmp_path / "run", backend, 2, device_shares=shares, resume=True, verbose=2)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    taken = ",".join(map(str, report["device_shares"]))
    if shares == "auto":
        assert "samples/s" in stopped.stdout
        assert f"device shares: {taken}, as in the checkpoint" in resumed.stdout
    whole = train_resumable(tmp_path / "whole", backend, 2, device_shares=taken)
    assert result_of(resumed)["weights"] == result_of(whole)["weights"]
