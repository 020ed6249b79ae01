"""What a step records of every layer for a comparison."""

import keras
import numpy as np
import pytest
from keras import ops

from kerasdp.run_state import Detail
from kerasdp.same.replica_context import ReplicaContext, use
from kerasdp.step.observer import record_forward_pass

X = np.arange(12, dtype="float32").reshape(3, 4)


@pytest.fixture
def model():
    inputs = keras.Input((4,))
    shared = keras.layers.Dense(4, name="shared")
    block = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, "relu", name="inner")], name="block")
    return keras.Model(inputs, block(shared(shared(inputs))))


def recorded(model, detail, x=X):
    with record_forward_pass(detail, model, ops.convert_to_tensor(x)) as found:
        outputs = model(x)
    return found, ops.convert_to_numpy(outputs)


def test_every_layer_in_the_order_of_the_calls(model):
    found, outputs = recorded(model, Detail.EVERYTHING)
    names = ["00000 inputs", "00001 shared", "00002 shared (2)", "00003 block/inner"]
    assert list(found) == names
    values = [ops.convert_to_numpy(value) for value in found.values()]
    once = ops.convert_to_numpy(model.get_layer("shared")(X))
    np.testing.assert_array_equal(values[0], X)
    np.testing.assert_array_equal(values[1], once)
    np.testing.assert_array_equal(values[2], ops.convert_to_numpy(model.get_layer("shared")(once)))
    np.testing.assert_array_equal(values[3], outputs)


def test_a_layer_of_a_backbone_and_of_its_head_is_recorded_once_a_call():
    """As the embedding of a language model, which gives its logits, too."""
    backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="both")], name="backbone")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, backbone.layers[0](backbone(inputs)))
    for _ in range(2):  # the layers are as before afterwards
        found, _ = recorded(model, Detail.EVERYTHING)
        names = [name[6:] for name in found]
        assert len(names) == 3 and len({name.removesuffix(" (2)") for name in names[1:]}) == 1


def test_a_replica_records_the_rows_of_all(model):
    def gather_rows(tensor):  # as if the other replica had computed the same rows
        return ops.concatenate([tensor, tensor[:2]])

    with use(ReplicaContext(num_replicas=2, num_rows=3, rows=3, gather_rows=gather_rows)):
        found, outputs = recorded(model, Detail.EVERYTHING)
    assert {tuple(value.shape)[0] for value in found.values()} == {3 + 2}
    whole = ops.convert_to_numpy(found["00003 block/inner"])
    np.testing.assert_array_equal(whole, np.concatenate([outputs, outputs[:2]]))
