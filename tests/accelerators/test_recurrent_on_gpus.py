"""LSTMs that Keras would give to cuDNN's kernel on jax, and must not, are computed step by step."""

import types

import keras
import pytest

from tests.helpers import BACKENDS

pytestmark = pytest.mark.skipif("jax" not in BACKENDS, reason="jax is not installed")

GPU, CPU = types.SimpleNamespace(platform="gpu"), types.SimpleNamespace(platform="cpu")


@pytest.mark.parametrize(
    ("devices", "dtype", "expected"),
    [
        ([GPU], "float32", []),
        ([GPU, GPU], "float32", ["backward_lstm", "forward_lstm", "plain"]),
        ([GPU], "mixed_bfloat16", ["backward_lstm", "forward_lstm", "plain"]),
        ([CPU, CPU], "mixed_bfloat16", []),
    ],
)
def test_where(devices, dtype, expected):
    from kerasdp.backends.jax.data_parallel import DataParallel

    layers = [
        keras.Input((5, 3)),
        keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True, dtype=dtype, name="lstm"), dtype=dtype),
        keras.layers.LSTM(4, name="plain", dtype=dtype, return_sequences=True),
        keras.layers.LSTM(4, name="never", dtype=dtype, use_cudnn=False, return_sequences=True),
        keras.layers.GRU(4, name="gru", dtype=dtype),
    ]
    model = keras.Sequential(layers)
    strategy = DataParallel.__new__(DataParallel)
    strategy.devices = devices
    every = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.LSTM)]
    before = {layer.name: layer.use_cudnn for layer in every}
    with strategy.running(model):
        changed = [layer.name for layer in every if layer.use_cudnn != before[layer.name]]
    assert sorted(changed) == expected
    assert {layer.name: layer.use_cudnn for layer in every} == before
