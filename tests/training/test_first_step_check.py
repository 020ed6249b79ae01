"""What counts as a difference between a batch and its shards, on made records."""

import numpy as np
from keras import ops

from kerasdp.contract import ShardPass
from kerasdp.step.check import _first_difference


def record(rows, first_row=0, layer=(0.0,), loss=1.0):
    """Of a replica that holds all of its rows; `layer`: what is added to each row's outputs, in turn."""
    outputs = np.arange(4, dtype="float32")[first_row : first_row + rows, None] + np.resize(layer, (rows, 3))
    whole = np.arange(4, dtype="float32")[:, None]
    return ShardPass(
        {"00000 dense": ops.convert_to_tensor(outputs.astype("float32"))},
        [ops.convert_to_tensor(whole)],
        ops.convert_to_tensor(np.float32(loss)),
        first_row=first_row,
        num_rows=rows,
        rows=rows,
    )


def test_what_is_more_than_round_off_is_named():
    _, name, text = _first_difference(record(4), record(2, 2, layer=(0.03,)))
    assert name == "layer dense" and text == "largest value 3 for the whole batch, 3.03 for the split batch"
    assert _first_difference(record(4), record(2, 2, layer=(0.001,)))[2] == ""
    assert _first_difference(record(4), record(2, 2, loss=1.01))[1] == "the loss"


def test_outputs_of_the_replicas_rows_are_compared():
    """Where the loss hardly shows what operations outside of layers do."""

    def with_own_outputs(added):
        outputs = np.arange(4, dtype="float32")[2:, None] + np.float32(added)
        return record(2, 2)._replace(outputs=[ops.convert_to_tensor(outputs)])

    assert _first_difference(record(4), with_own_outputs(0))[2] == ""
    assert _first_difference(record(4), with_own_outputs(0.03))[1] == "the outputs"


def test_what_a_layer_makes_of_round_off_is_no_fault():
    shard = record(2, 2, layer=(0.03,))
    assert _first_difference(record(4), shard, record(4, layer=(0.01,)))[2] == ""
    assert _first_difference(record(4), shard, record(4, layer=(0.0001,)))[2] != ""


def test_whole_numbers_are_compared_exactly_where_round_off_changes_none():
    def record_of(numbers, first_row=0):
        rows = len(numbers)
        made = record(rows, first_row)
        return made._replace(layers={"00000 route": ops.convert_to_tensor(np.array(numbers, "int32"))})

    whole, shard = record_of([[3], [1], [4], [1]]), record_of([[5], [1]], 2)
    assert _first_difference(whole, record_of([[4], [1]], 2))[2] == ""
    assert _first_difference(whole, shard)[1] == "layer route"
    assert _first_difference(whole, shard, whole)[1] == "layer route"
    assert _first_difference(whole, shard, record_of([[3], [1], [4], [2]]))[2] == ""
