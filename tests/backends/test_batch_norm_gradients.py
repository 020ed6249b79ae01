"""The batch norms with gradients of their own, beside the formula that the framework differentiates by itself."""

import concurrent.futures
import functools

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run
from tests.step.test_global_batch import Exchange

EPSILON = 1e-3
RANDOM = np.random.RandomState(0)
X, WEIGHTS = 3 + RANDOM.randn(6, 4, 5), RANDOM.randn(6, 4, 5)
SCALE, OFFSET = 1 + RANDOM.rand(4), RANDOM.rand(4)


def by_torch(is_own, is_native=False):
    """`is_native`: as on a GPU."""
    torch = pytest.importorskip("torch")
    from kerasdp.backends.torch.batch_norm import normalize, normalize_natively

    x, scale, offset = (torch.tensor(array, requires_grad=True) for array in (X, SCALE, OFFSET))
    if is_own:
        outputs = (normalize_natively if is_native else normalize)(x, 1, scale, offset, EPSILON)[0]
    else:
        variance, mean = torch.var_mean(x, (0, 2), correction=0, keepdim=True)
        outputs = (x - mean) * torch.rsqrt(variance + EPSILON) * scale[:, None] + offset[:, None]
    loss = (outputs**2 * torch.tensor(WEIGHTS)).sum()
    first = torch.autograd.grad(loss, (x, scale, offset), create_graph=True)
    second = torch.autograd.grad(sum((gradient**3).sum() for gradient in first), (x, scale, offset))
    return [tensor.detach().numpy() for tensor in (outputs, *first, *second)]


def by_tensorflow(is_own, is_image=False, groups=1):
    """`is_image`: in float32 with channels last, by TensorFlow's kernel. `groups`: as on one of several replicas."""
    tf = pytest.importorskip("tensorflow")
    from kerasdp.backends.tensorflow.batch_norm import normalize

    together = () if groups == 1 else (None, lambda own: tf.stack([own] * groups))

    @tf.function
    def compute(*values):
        with tf.GradientTape() as outer:
            outer.watch(values)
            with tf.GradientTape() as inner:
                inner.watch(values)
                x, scale, offset = values
                if is_own and is_image:
                    outputs = normalize(tf.transpose(x, (0, 2, 1))[:, :, None], 3, scale, offset, EPSILON, *together)[0]
                    outputs = tf.transpose(outputs[:, :, 0], (0, 2, 1))
                elif is_own:
                    outputs = normalize(x, 1, scale, offset, EPSILON)[0]
                else:
                    mean = tf.reduce_mean(x, (0, 2), keepdims=True)  # tf.nn.moments stops a gradient in between
                    variance = tf.reduce_mean((x - mean) ** 2, (0, 2), keepdims=True)
                    outputs = (x - mean) * tf.math.rsqrt(variance + EPSILON) * scale[:, None] + offset[:, None]
                loss = tf.reduce_sum(outputs**2 * tf.constant(WEIGHTS, outputs.dtype))
            first = inner.gradient(loss, values)
            total = sum(tf.reduce_sum(gradient**3) for gradient in first)
        return outputs, *first, *outer.gradient(total, values)

    dtype = "float32" if is_image else "float64"
    return [tensor.numpy() for tensor in compute(*(tf.constant(array, dtype) for array in (X, SCALE, OFFSET)))]


NATIVE = functools.partial(by_torch, is_native=True)


@pytest.mark.short("by_torch", "compute1")
@pytest.mark.parametrize("compute", [by_torch, NATIVE, by_tensorflow])
def test_first_and_second_derivatives(compute):
    for own, expected in zip(compute(True), compute(False), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.proof
@pytest.mark.parametrize("groups", [1, 3])
def test_first_and_second_derivatives_of_images(groups):
    for own, expected in zip(by_tensorflow(True, True, groups), by_tensorflow(False), strict=True):
        np.testing.assert_allclose(own, expected, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((6, 5, 4, 3), 3), ((6, 3, 5, 4), 1), ((7, 3), 1), ((6, 5, 3), 2), ((6, 3, 5), 1), ((2, 3, 4, 5, 3), 4)],
)
def test_the_kernel_of_a_gpu_gives_the_same(shape, axis):
    """Outputs, mean and variance, wherever the channels are; in types that are computed in float32, too."""
    torch = pytest.importorskip("torch")
    from kerasdp.backends.torch.batch_norm import normalize, normalize_natively

    x = torch.tensor(3 + np.random.RandomState(0).randn(*shape))
    scale, offset = torch.tensor(SCALE[:3]), torch.tensor(OFFSET[:3])
    for arguments in ((scale, offset), (None, offset), (scale, None)):
        found, expected = (function(x, axis, *arguments, EPSILON) for function in (normalize_natively, normalize))
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    found, expected = (
        function(x.bfloat16(), axis, scale.float(), None, EPSILON) for function in (normalize_natively, normalize)
    )
    assert [each.dtype for each in found] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(found[1:], expected[1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=2e-2)


def test_the_kernel_of_a_gpu_has_a_weight_where_there_is_a_bias(monkeypatch):
    """CUDA's kernel makes the bias' gradient in the shape of the weight."""
    torch = pytest.importorskip("torch")
    from kerasdp.backends.torch.batch_norm import normalize_natively

    taken, kernel = [], torch.native_batch_norm
    monkeypatch.setattr(torch, "native_batch_norm", lambda x, *rest: taken.append(rest[:2]) or kernel(x, *rest))
    x, one = torch.ones((4, 3)), torch.ones(3)
    for scale, offset in ((one, one), (None, one), (one, None), (None, None)):
        normalize_natively(x, 1, scale, offset, EPSILON)
    assert [(weight is None, bias is None) for weight, bias in taken] == [
        (False, False), (False, False), (False, True), (True, True),
    ]  # fmt: skip


def together_by_torch(parts, upstream, num_rows):
    torch = pytest.importorskip("torch")
    from kerasdp.backends.torch.batch_norm import normalize

    exchange = Exchange()

    def run(place):
        gather = lambda own: torch.stack(exchange.all(place, own))  # noqa: E731
        x, scale, offset = (torch.tensor(array, requires_grad=True) for array in (parts[place], SCALE, OFFSET))
        outputs = normalize(x, 1, scale, offset, EPSILON, num_rows[place], gather)
        return *outputs, *torch.autograd.grad((outputs[0] * torch.tensor(upstream[place])).sum(), (x, scale, offset))

    return run


def together_by_tensorflow(parts, upstream, num_rows):
    tf = pytest.importorskip("tensorflow")
    from kerasdp.backends.tensorflow.batch_norm import normalize

    exchange = Exchange()

    def run(place):
        gather = lambda own: tf.stack(exchange.all(place, own))  # noqa: E731
        x, scale, offset = map(tf.constant, (parts[place], SCALE, OFFSET))
        with tf.GradientTape() as tape:
            tape.watch((x, scale, offset))
            outputs = normalize(x, 1, scale, offset, EPSILON, num_rows[place], gather)
            loss = tf.reduce_sum(outputs[0] * upstream[place])
        return *outputs, *tape.gradient(loss, (x, scale, offset))

    return run


@pytest.mark.short("num_rows1-together_by_torch", "num_rows2-together_by_torch")
@pytest.mark.parametrize("start", [together_by_torch, together_by_tensorflow])
@pytest.mark.parametrize("num_rows", [(None,) * 3, (2, 2, 1), (2, 2, 0)])
def test_replicas_have_the_statistics_and_gradients_of_the_whole(start, num_rows):
    """Also where the last ones hold padding, which has numbers, but no gradient."""
    torch = pytest.importorskip("torch")
    from kerasdp.backends.torch.batch_norm import normalize

    rows = sum(2 if own is None else own for own in num_rows)
    upstream = np.concatenate([WEIGHTS[:rows], np.zeros_like(WEIGHTS[rows:])])
    run = start(np.split(X, 3), np.split(upstream, 3), num_rows)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        results = list(threads.map(run, range(3)))
    x, scale, offset = (torch.tensor(array, requires_grad=True) for array in (X[:rows], SCALE, OFFSET))
    outputs, mean, variance = normalize(x, 1, scale, offset, EPSILON)
    expected = torch.autograd.grad((outputs * torch.tensor(WEIGHTS[:rows])).sum(), (x, scale, offset))
    found = [[np.asarray(each.detach() if hasattr(each, "detach") else each) for each in own] for own in results]
    own_outputs, means, variances, for_x, for_scale, for_offset = zip(*found, strict=True)
    padding = np.zeros_like(X[rows:])
    for received, whole in [
        (np.concatenate(own_outputs)[:rows], outputs),
        (np.concatenate(for_x), np.concatenate([expected[0], padding])),
        (sum(for_scale), expected[1]),
        (sum(for_offset), expected[2]),
        *[(own, mean) for own in means],
        *[(own, variance) for own in variances],
    ]:
        whole = whole.detach().numpy() if isinstance(whole, torch.Tensor) else whole
        np.testing.assert_allclose(received, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.proof
@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="the graph is TensorFlow's")
def test_a_deep_net_is_traced_in_time_that_grows_with_its_depth(tmp_path):
    """Not with its square: what TensorFlow looks through for variables is a batch norm, not all layers before it."""
    longest = result_of(run(PROGRAMS / "walks.py", tmp_path, backend="tensorflow"))
    assert longest["6"] == longest["2"] < 100
