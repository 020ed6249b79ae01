"""Checkpoint files: whole, or not there."""

import dataclasses
import json
import os
import random
import struct

import numpy as np
import pytest

from kerasdp.checkpoint import files as checkpoint
from kerasdp.checkpoint.files import Checkpoint
from kerasdp.errors import CheckpointError, UserError


def some(step=7):
    random = np.random.RandomState(step)
    arrays = {
        "model/0000 dense/kernel": random.randn(7, 5).astype("float32"),
        "model/0001 seed": np.array([3, 2**32 - 1], "uint32"),
        "optimizer/0000 iterations": np.array(step, "int64"),
        "callbacks/EarlyStopping/0/best_weights/0": random.randn(3),
        "metrics/0000 empty": np.zeros((0, 2), "float32"),
    }
    return Checkpoint(
        arrays=arrays,
        state={
            "step": step, "epoch": 1, "best": None, "least": float("inf"), "names": ["a", "ü"],
            "data": {"pass": -1, "rows": 8, "digest": "a", "state": None},  # of a generator
        },
    )  # fmt: skip


def assert_equal(expected, received):
    assert received.state == expected.state
    assert received.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        assert received.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(received.arrays[name], array)


def test_what_is_saved_is_loaded(tmp_path):
    path = checkpoint.path_of(str(tmp_path / "new"), 7)
    checkpoint.save(path, some())
    assert_equal(some(), checkpoint.load(path))
    assert os.listdir(tmp_path / "new") == ["step-00000007.safetensors"]


def test_an_array_that_lies_otherwise_in_memory_is_saved_as_it_reads(tmp_path):
    """As the orthogonal kernels that torch makes; each epoch's file of an LSTM was corrupt."""
    array = np.arange(6.0).reshape(2, 3).T
    saved = dataclasses.replace(some(), arrays={"transposed": array, "every second": np.arange(6)[::2]})
    path = checkpoint.path_of(str(tmp_path / "new"), 7)
    checkpoint.save(path, saved)
    assert_equal(saved, checkpoint.load(path))


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_others_may_read_it_as_the_umask_says(mask, tmp_path):
    before = os.umask(mask)
    try:
        checkpoint.save(str(tmp_path / "some.safetensors"), some())
    finally:
        os.umask(before)
    assert (tmp_path / "some.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.fixture
def content(tmp_path):
    path = tmp_path / "whole.safetensors"
    checkpoint.save(str(path), some())
    return path.read_bytes()


@pytest.mark.parametrize("damage", ["truncated", "bit"])
def test_damage_at_every_place_is_seen(damage, content, tmp_path):
    """At 50 random places, and at each of the first bytes, which say how long the header is."""
    path = tmp_path / "damaged.safetensors"
    chosen = random.Random(0)
    places = {*range(16), *(chosen.randrange(len(content)) for _ in range(50)), len(content) - 1}
    for place in places:
        if damage == "truncated":
            path.write_bytes(content[:place])
        else:
            damaged = bytearray(content)
            damaged[place] ^= 1 << chosen.randrange(8)
            path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="corrupt"):
            checkpoint.load(str(path))


def test_values_that_were_exchanged_are_seen(tmp_path):
    """What a checksum of the numbers alone would let pass: the same bytes under two other names."""
    saved = some()
    path = str(tmp_path / "a.safetensors")
    checkpoint.save(path, saved)
    text = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(text.replace(b"dense/kernel", b"dense/kernal"))
    with pytest.raises(CheckpointError, match="checksum"):
        checkpoint.load(path)


def rewritten(content, change):
    """A checkpoint file of which the header is another one."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


@pytest.mark.parametrize("number", [*range(checkpoint.FORMAT), checkpoint.FORMAT + 1])
def test_another_format_is_refused(number, content, tmp_path):
    """In one line, and the checkpoint before it is not taken instead: the training since then would be lost."""
    checkpoint.save(checkpoint.path_of(str(tmp_path), 7), some())
    path = checkpoint.path_of(str(tmp_path), 8)
    (tmp_path / "step-00000008.safetensors").write_bytes(
        rewritten(content, lambda header: header["__metadata__"].update(format=str(number)))
    )
    told = []
    for load in (lambda: checkpoint.load(path), lambda: checkpoint.load_newest(str(tmp_path), told.append)):
        with pytest.raises(UserError) as caught:
            load()
        assert f"expected a checkpoint of format 4. Received: format {number} in {path}; use" in str(caught.value)
        assert "train again in another --workdir" in str(caught.value) and "\n" not in str(caught.value)
    assert not told


@pytest.mark.parametrize(("kind", "num_bytes"), [("F8_E4M3", 8), ("F8_E5M2", 8), ("BF16", 16), ("odd", 8), ("C64", 64)])
def test_a_type_that_numpy_lacks_is_one_line(kind, num_bytes, tmp_path):
    header = {"x": {"dtype": kind, "shape": [8], "data_offsets": [0, num_bytes]}}
    text = json.dumps(header | {"__metadata__": {"format": "4", "state": "{}", "sha256": ""}}).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    with pytest.raises(CheckpointError, match="corrupt") as caught:
        checkpoint.load(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("state", ["[" * 100_000, "{", '{"step": 1' + 5000 * "0" + "}"])
def test_a_state_that_is_no_json_is_one_line(state, content, tmp_path):
    """With the right checksum: anybody may have written the file."""

    def change(header):
        header["__metadata__"].update(state=state, sha256=checkpoint._checksum(state, some().arrays))

    path = tmp_path / "odd.safetensors"
    path.write_bytes(rewritten(content, change))
    with pytest.raises(CheckpointError, match="corrupt") as caught:
        checkpoint.load(str(path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_none_or_none_that_is_sound(tmp_path):
    assert checkpoint.load_newest(str(tmp_path / "nowhere"), print) is None
    (tmp_path / "step-00000001.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="cannot use any of the 1 checkpoints"):
        checkpoint.load_newest(str(tmp_path), lambda text: None)


def test_what_is_not_finite_is_not_written(tmp_path):
    told = []
    writer = checkpoint.Writer(str(tmp_path), 2, told.append)
    writer.write(some(1))
    spoilt = some(2)
    spoilt.arrays["model/0000 dense/kernel"][0, 0] = np.nan
    writer.write(spoilt)
    writer.close()
    reason = "(model/0000 dense/kernel contains NaN or infinity)"
    last = f"the last good one is {tmp_path}/step-00000001.safetensors"
    assert told == [f"cannot write checkpoints into {tmp_path} {reason}; training continues; {last}"]
    assert writer.unwritten == f"the checkpoint of step 2 {reason}; {last}"
    assert os.listdir(tmp_path) == ["step-00000001.safetensors"]
