"""The batch norms with gradients of their own, beside the formula that the framework differentiates by itself."""

import numpy as np
import pytest

EPSILON = 1e-3
RANDOM = np.random.RandomState(0)
X, WEIGHTS = 3 + RANDOM.randn(6, 4, 5), RANDOM.randn(6, 4, 5)
SCALE, OFFSET = 1 + RANDOM.rand(4), RANDOM.rand(4)


def by_torch(is_own):
    torch = pytest.importorskip("torch")
    from kerasdp.layers.torch_batch_norm import normalize

    x, scale, offset = (torch.tensor(array, requires_grad=True) for array in (X, SCALE, OFFSET))
    if is_own:
        outputs = normalize(x, 1, scale, offset, EPSILON)[0]
    else:
        variance, mean = torch.var_mean(x, (0, 2), correction=0, keepdim=True)
        outputs = (x - mean) * torch.rsqrt(variance + EPSILON) * scale[:, None] + offset[:, None]
    loss = (outputs**2 * torch.tensor(WEIGHTS)).sum()
    first = torch.autograd.grad(loss, (x, scale, offset), create_graph=True)
    second = torch.autograd.grad(sum((gradient**3).sum() for gradient in first), (x, scale, offset))
    return [tensor.detach().numpy() for tensor in (outputs, *first, *second)]


def by_tensorflow(is_own):
    tf = pytest.importorskip("tensorflow")
    from kerasdp.layers.tf_batch_norm import normalize

    @tf.function
    def compute(*values):
        with tf.GradientTape() as outer:
            outer.watch(values)
            with tf.GradientTape() as inner:
                inner.watch(values)
                x, scale, offset = values
                if is_own:
                    outputs = normalize(x, 1, scale, offset, EPSILON)[0]
                else:
                    mean = tf.reduce_mean(x, (0, 2), keepdims=True)  # tf.nn.moments stops a gradient in between
                    variance = tf.reduce_mean((x - mean) ** 2, (0, 2), keepdims=True)
                    outputs = (x - mean) * tf.math.rsqrt(variance + EPSILON) * scale[:, None] + offset[:, None]
                loss = tf.reduce_sum(outputs**2 * WEIGHTS)
            first = inner.gradient(loss, values)
            total = sum(tf.reduce_sum(gradient**3) for gradient in first)
        return outputs, *first, *outer.gradient(total, values)

    return [tensor.numpy() for tensor in compute(*map(tf.constant, (X, SCALE, OFFSET)))]


@pytest.mark.parametrize("compute", [by_torch, by_tensorflow])
def test_first_and_second_derivatives(compute):
    for own, expected in zip(compute(True), compute(False), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-9, atol=1e-9)
