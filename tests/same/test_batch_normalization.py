"""The layer's own arithmetic, on parts of a batch in one process, beside Keras' on the whole batch."""

import keras
import numpy as np
import pytest
from keras import ops

from kerasdp.same import layers, replica_context


def numbers(tensor):
    return ops.convert_to_numpy(tensor)


def on_parts(layer, x, mask, sizes):
    """What two replicas give; each is called with the sums of both at hand, as a collective would give them."""
    parts = np.split(x, [sizes[0]])
    masks = (None, None) if mask is None else np.split(mask, [sizes[0]])
    weights = [None if m is None else np.broadcast_to(m[..., None], p.shape) for p, m in zip(parts, masks, strict=True)]
    sums = [
        ops.stack(layer._sums(ops.convert_to_tensor(part), None if w is None else ops.cast(w, "float32")))
        for part, w in zip(parts, weights, strict=True)
    ]
    outputs = []
    for place, (part, part_mask) in enumerate(zip(parts, masks, strict=True)):
        context = replica_context.ReplicaContext(
            num_replicas=2,
            num_rows=len(part),
            rows=len(part),
            gather=lambda own, place=place: ops.stack([own if place == other else sums[other] for other in (0, 1)]),
        )
        with replica_context.use(context):
            outputs.append(numbers(layer(part, training=True, mask=part_mask)))
    return np.concatenate(outputs)


@pytest.mark.parametrize("shape", [(7, 3), (7, 5, 3), (7, 5, 4, 3), (7, 2, 3, 4, 3)])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_parts_are_the_whole(shape, masked):
    if masked and len(shape) == 2:
        mask = np.array([1, 1, 0, 1, 0, 1, 1], bool)
    else:
        mask = np.random.RandomState(1).rand(*shape[:-1]) > 0.3 if masked else None
    x = 5 + np.random.RandomState(0).randn(*shape).astype("float32")
    ours = layers.BatchNormalization(beta_initializer="ones", gamma_initializer=keras.initializers.Constant(2.0))
    theirs = keras.layers.BatchNormalization.from_config(ours.get_config())
    for layer in (ours, theirs):
        layer.build(shape)
    expected = numbers(theirs(x, training=True, mask=mask))
    np.testing.assert_allclose(on_parts(ours, x, mask, (4, 3)), expected, atol=3e-5)
    # The calls above updated the moving statistics twice.
    ours.moving_mean.assign(np.zeros(3))
    ours.moving_variance.assign(np.ones(3))
    context = replica_context.ReplicaContext(num_replicas=1, num_rows=7, rows=7, gather=lambda own: own[None])
    with replica_context.use(context):
        ours(x, training=True, mask=mask)
    np.testing.assert_allclose(numbers(ours.moving_mean), numbers(theirs.moving_mean), atol=1e-6)
    np.testing.assert_allclose(numbers(ours.moving_variance), numbers(theirs.moving_variance), atol=1e-6)


def test_axis_and_replica_statistics():
    x = np.random.RandomState(0).randn(6, 3, 4).astype("float32")
    layer = layers.BatchNormalization(axis=1)
    layer.build(x.shape)
    layer.statistics = "replica"
    outputs = on_parts(layer, x, None, (4, 2))
    for part in (outputs[:4], outputs[4:]):
        np.testing.assert_allclose(part.mean((0, 2)), 0, atol=1e-5)


def test_in_inference_it_is_keras_own():
    x = np.random.RandomState(0).randn(6, 3).astype("float32")
    layer = layers.BatchNormalization()
    context = replica_context.ReplicaContext(num_replicas=2, num_rows=3, rows=3, gather=None)
    with replica_context.use(context):
        np.testing.assert_allclose(numbers(layer(x, training=False)), x / np.sqrt(1.001), rtol=1e-5)


def test_renorm_on_several_devices_is_refused():
    layer = layers.BatchNormalization(renorm=True)
    layer.build((4, 3))
    context = replica_context.ReplicaContext(num_replicas=2, num_rows=4, rows=4, gather=lambda own: own[None])
    with replica_context.use(context), pytest.raises(ValueError, match="renorm"):
        layer(np.ones((4, 3), "float32"), training=True)
