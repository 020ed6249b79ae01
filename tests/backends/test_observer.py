"""What a step records for a comparison: of every layer, of the inputs, of the gradients."""

import keras
import numpy as np
import pytest
from keras import ops

from kerasdp.backends.observer import Observer, forward_pass, observed
from kerasdp.portability.replica_context import ReplicaContext, use
from kerasdp.runtime.run_state import Detail

X = np.arange(12, dtype="float32").reshape(3, 4)


@pytest.fixture
def model():
    inputs = keras.Input((4,))
    shared = keras.layers.Dense(4, name="shared")
    block = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, "relu", name="inner")], name="block")
    return keras.Model(inputs, block(shared(shared(inputs))))


def recorded(model, detail, x=X):
    with forward_pass(detail, model, ops.convert_to_tensor(x)) as found:
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


def test_layers_are_as_before_afterwards(model):
    layer = model.get_layer("shared")
    bound = layer.call  # as a user may have bound it
    object.__setattr__(layer, "call", bound)
    recorded(model, Detail.EVERYTHING)
    assert vars(layer)["call"] is bound
    assert "call" not in vars(model.get_layer("block").layers[0])


@pytest.mark.parametrize("detail", [Detail.NOTHING, Detail.SUMMARY])
def test_less_detail(model, detail):
    assert recorded(model, detail)[0] == {}


def test_a_replica_records_the_rows_of_all(model):
    def gather_rows(tensor):  # as if the other replica had computed the same rows
        return ops.concatenate([tensor, tensor[:2]])

    with use(ReplicaContext(num_replicas=2, num_rows=3, rows=3, gather_rows=gather_rows)):
        found, outputs = recorded(model, Detail.EVERYTHING)
    assert {tuple(value.shape)[0] for value in found.values()} == {3 + 2}
    whole = ops.convert_to_numpy(found["00003 block/inner"])
    np.testing.assert_array_equal(whole, np.concatenate([outputs, outputs[:2]]))


def test_gradients_and_their_norm():
    gradients = [ops.convert_to_tensor([3.0]), None, ops.convert_to_tensor([[0.0, 4.0]])]
    outputs = {"00000 inputs": 2}
    assert observed(Detail.NOTHING, gradients, outputs) == {}
    summary = observed(Detail.SUMMARY, gradients, {})
    assert float(summary.pop("gradient_norm")) == 5.0 and summary == {}
    everything = observed(Detail.EVERYTHING, gradients, outputs)
    assert everything["gradients"] is gradients and everything["outputs"] is outputs


def test_an_observer_keeps_what_it_is_told_of():
    observer = Observer(Detail.EVERYTHING)
    outputs = {"00001 dense": ops.ones((2,), "bfloat16"), "00000 inputs": ops.zeros((2,))}
    observer.on_step(0.1, [0], {"gradient_norm": 0.5, "gradients": [None, ops.ones((1,))], "outputs": outputs})
    assert (observer.losses, observer.gradient_norms, observer.samples) == ([0.1], [0.5], [[0]])
    assert list(observer.outputs) == ["inputs", "dense"]
    assert observer.outputs["dense"].dtype == "float32"
    assert observer.gradients[0] is None and observer.gradients[1].tolist() == [1.0]
