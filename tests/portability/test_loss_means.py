"""What surely is a mean over the rows, and what is not: that is computed of the whole batch, which is always right."""

import keras
import pytest
from keras import ops

from kerasdp.portability.layer_calls import hook_layers
from kerasdp.portability.reduction import is_mean_over_rows
from kerasdp.portability.replica_context import FIRST, RowAxes, RowAxis


@pytest.fixture(autouse=True)
def hooked():
    hook_layers()


class Adding(keras.layers.Layer):
    def __init__(self, loss_of):
        super().__init__()
        self.loss_of = loss_of
        self.factor = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3))

    def call(self, x):
        self.add_loss(self.loss_of(self, ops.matmul(x, self.kernel)))
        return x


def balance(layer, x):
    chances = ops.softmax(x)
    return ops.sum(ops.mean(chances, 0) * ops.mean(ops.one_hot(ops.argmax(chances, -1), 3), 0))


MEANS = {
    "mean": lambda layer, x: ops.mean(ops.square(x)),
    "several": lambda layer, x: [ops.mean(ops.abs(x)), 3 * ops.mean(ops.sum(ops.exp(x), axis=1))],
}
OTHERS = {
    "sum": lambda layer, x: ops.sum(ops.square(x)),
    "balance": balance,
    "square of a mean": lambda layer, x: ops.square(ops.mean(x)),
    "one of several": lambda layer, x: [ops.mean(ops.abs(x)), ops.max(x)],
    "variance": lambda layer, x: ops.var(x),
    "nothing yet": lambda layer, x: layer.factor * ops.mean(x),
    "of no row": lambda layer, x: ops.sum(ops.square(layer.kernel)),
    "not a number": lambda layer, x: ops.mean(ops.sqrt(x)),
    "of what is not zero": lambda layer, x: ops.sum(x) / (1 + ops.sum(ops.cast(x != 0, x.dtype))),
    "two rows": lambda layer, x: ops.mean(x[0] - x[-1]),
    "sometimes nothing": lambda layer, x: [ops.mean(ops.abs(x))] if x.shape[0] < 32 else [],
}


@pytest.mark.parametrize("case", [*MEANS, *OTHERS])
def test_sure_means(case):
    layer = Adding((MEANS | OTHERS)[case])
    rows = keras.random.normal((4, 5), seed=1)
    layer(rows)
    axes = RowAxes()
    axes.add(("arguments", id(layer)), FIRST)
    assert is_mean_over_rows(layer, ((rows,), {}), axes) == (case in MEANS)


@pytest.mark.parametrize("dtype", ["bool", "int32", "float32"])
def test_padding_that_the_sample_does_not_have(dtype):
    class OfReal(Adding):
        def call(self, x, mask):
            real = ops.cast(mask, x.dtype)
            self.add_loss(ops.sum(real * ops.mean(ops.square(x), axis=1)) / ops.sum(real))
            return x

    layer, rows, mask = OfReal(None), keras.random.normal((4, 5), seed=1), ops.ones((4,), dtype)
    layer(rows, mask=mask)
    axes = RowAxes()
    axes.add(("arguments", id(layer)), FIRST)
    axes.add(("arguments", id(layer)), FIRST)
    assert not is_mean_over_rows(layer, ((rows,), {"mask": mask}), axes)


def test_rows_elsewhere():
    layer = Adding(MEANS["mean"])
    rows = keras.random.normal((4, 5), seed=1)
    layer(rows)
    axes = RowAxes()
    axes.add(("arguments", id(layer)), RowAxis(1))
    assert not is_mean_over_rows(layer, ((rows,), {}), axes)
