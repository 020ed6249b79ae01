"""Optimizers of Keras on torch, which the kit lets update all weights in one call: the formulas stay Keras'."""

import contextlib

import keras
import numpy as np
import pytest

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("the update is torch's", allow_module_level=True)

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from kerasdp.backends.torch.private import compile_with_inductor  # noqa: E402
from kerasdp.backends.torch.update import updating  # noqa: E402

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adam-amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adam-clipped-averaged": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5, use_ema=True),
    "adam-accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "sgd": lambda: keras.optimizers.SGD(0.1, weight_decay=0.01),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 8), momentum=0.9, nesterov=True
    ),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
}


def trained(make, context):
    """Returns weights and slots after some updates. One weight is not contiguous."""
    random = np.random.RandomState(0)
    shapes = [(3, 4), (5,), (), (2, 3, 4)]
    weights = [keras.Variable(random.normal(size=shape), dtype="float64", name="w") for shape in shapes]
    weights[0].value.data = weights[0].value.data.T.contiguous().T
    optimizer = make()
    optimizer.build(weights)
    if optimizer.weight_decay:
        optimizer.exclude_from_weight_decay([weights[1]])
    for _ in range(6):
        gradients = [torch.from_numpy(np.array(random.normal(size=shape))) for shape in shapes]
        with torch.no_grad(), context(optimizer):
            optimizer.apply(gradients, weights)
    return [keras.ops.convert_to_numpy(each) for each in (*weights, *optimizer.variables)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_as_keras(name):
    keras.config.set_floatx("float64")  # of rates
    try:
        own, expected = (trained(OPTIMIZERS[name], each) for each in (updating, lambda _: contextlib.nullcontext()))
    finally:
        keras.config.set_floatx("float32")
    for one, other in zip(own, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.proof
def test_what_reads_a_weight_before_its_update_reads_the_old_value(monkeypatch):
    # Inductor (torch 2.13) computes `scaled` where it is last used, behind the update.
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)

    def step(weight, momentum, x):
        scaled = x * weight
        rate = torch.tensor(0.1)
        gradients, numbers = [(scaled * 2).sum(0)], [0.9, 0.0]
        torch.ops.kerasdp.update_([weight], gradients, [momentum], [], rate, None, [False], numbers)
        return (scaled.exp().sum(),)

    torch.manual_seed(0)
    inputs = torch.randn(8), torch.zeros(8), torch.randn(5, 8)
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    expected, given = ([each.clone() for each in inputs] for _ in range(2))
    (loss,) = step(*expected)
    (own_loss,) = compile_with_inductor(graph, given, 2, {})(*given)
    torch.testing.assert_close([own_loss, *given], [loss, *expected])
