"""Builds the models of kerasdp/models and of keras_models.py in plain JAX, for `jax_loop.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import protocol
from jax import lax


class Net:
    """Weights and moving statistics by layer, and what is done with them.

    Args:
        weights: a dictionary for each layer's name; None makes them as they are asked for.
        statistics: likewise.
        dtype: of the arithmetic.
        groups: the rows of a batch are normalized in so many groups.
        key: of dropout; None: no dropout.
    """

    def __init__(
        self, weights: Any = None, statistics: Any = None, dtype: Any = jnp.float32, groups: int = 1, key: Any = None
    ):
        self.is_new = weights is None
        self.weights, self.statistics = ({}, {}) if self.is_new else (weights, dict(statistics))
        self.dtype, self.groups, self.key = dtype, groups, key
        self.random = np.random.default_rng(0)

    def kernel(self, name: str, *shape: int) -> jax.Array:
        """Returns a kernel, made with He's normal distribution."""
        if self.is_new:
            deviation = (2 / np.prod(shape[:-1])) ** 0.5
            self.weights[name] = {"kernel": self.random.normal(0, deviation, shape).astype("float32")}
        return self.weights[name]["kernel"].astype(self.dtype)

    def bias(self, name: str, size: int) -> jax.Array:
        """Returns a layer's bias."""
        if self.is_new:
            self.weights[name]["bias"] = np.zeros(size, "float32")
        return self.weights[name]["bias"].astype(self.dtype)

    def conv(
        self, name: str, x: jax.Array, filters: int, size: int, strides: int = 1, bias: bool = True,
        is_padded: bool = True,
    ) -> jax.Array:  # fmt: skip
        """Applies a convolution that pads equally on all sides, or not at all."""
        pad = (size - 1) // 2 if is_padded else 0
        kernel = self.kernel(name, size, size, x.shape[-1], filters)
        x = lax.conv_general_dilated(
            x, kernel, (strides, strides), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return x + self.bias(name, filters) if bias else x

    def double(self, name: str, x: jax.Array, filters: int, bias: bool = False) -> jax.Array:
        """Applies a 1x1 convolution that gives 2x2 pixels each."""
        batch, rows, columns, _ = x.shape
        x = self.conv(name, x, 4 * filters, 1, bias=bias).reshape(batch, rows, columns, 2, 2, filters)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, 2 * rows, 2 * columns, filters)

    def dense(self, name: str, x: jax.Array, size: int) -> jax.Array:
        """Applies a dense layer."""
        return x @ self.kernel(name, x.shape[-1], size) + self.bias(name, size)

    def layer_norm(self, name: str, x: jax.Array) -> jax.Array:
        """Applies layer norm in float32."""
        if self.is_new:
            self.weights[name] = {"gamma": np.ones(x.shape[-1], "float32"), "beta": np.zeros(x.shape[-1], "float32")}
        x = x.astype(jnp.float32)
        x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return (x * self.weights[name]["gamma"] + self.weights[name]["beta"]).astype(self.dtype)

    def norm(
        self, name: str, x: jax.Array, scale: bool = True, epsilon: float = 1e-3, momentum: float = 0.99
    ) -> jax.Array:
        """Applies batch norm in float32."""
        size = x.shape[-1]
        if self.is_new:
            self.weights[name] = {"beta": np.zeros(size, "float32")} | (
                {"gamma": np.ones(size, "float32")} if scale else {}
            )
            self.statistics[name] = np.zeros(size, "float32"), np.ones(size, "float32")
        weights, (moving_mean, moving_variance) = self.weights[name], self.statistics[name]
        rows = x.astype(jnp.float32).reshape(self.groups, -1, *x.shape[1:])
        mean = rows.mean((1, 2, 3), keepdims=True)
        variance = jnp.square(rows).mean((1, 2, 3), keepdims=True) - jnp.square(mean)
        if not self.is_new:
            self.statistics[name] = tuple(
                old * momentum + new.mean((0, 1, 2, 3)) * (1 - momentum)
                for old, new in ((moving_mean, mean), (moving_variance, variance))
            )
        factor = lax.rsqrt(variance + epsilon) * weights.get("gamma", 1.0)
        return ((rows - mean) * factor + weights["beta"]).reshape(x.shape).astype(self.dtype)

    def dropout(self, x: jax.Array, rate: float) -> jax.Array:
        """Drops at random."""
        if self.key is None:
            return x
        return jnp.where(jax.random.bernoulli(self.key, 1 - rate, x.shape), x / (1 - rate), 0)


def convnet(net: Net, x: jax.Array) -> jax.Array:
    """Builds what `convnet` of kerasdp/models/classifiers.py builds."""
    x = jax.nn.relu(net.norm("norm1", net.conv("conv1", x, 12, 3, bias=False), scale=False))
    x = jax.nn.relu(net.norm("norm2", net.conv("conv2", x, 24, 6, 2, bias=False, is_padded=False), scale=False))
    x = jax.nn.relu(net.norm("norm3", net.conv("conv3", x, 32, 6, 2), scale=False))
    x = jax.nn.relu(net.dense("dense1", x.mean((1, 2)), 256))
    return net.dense("logits", net.dropout(x, 0.5), protocol.NUM_CLASSES)


def resnet18(net: Net, x: jax.Array) -> jax.Array:
    """Builds what `resnet18` of kerasdp/models/classifiers.py builds."""
    x = jax.nn.relu(net.norm("stem_norm", net.conv("stem_conv", x, 64, 3)))
    for stage, filters in enumerate((64, 128, 256, 512), 1):
        for block in (1, 2):
            name, strides = f"stage{stage}_block{block}", 2 if block == 1 and stage > 1 else 1
            y = jax.nn.relu(net.norm(f"{name}_norm1", net.conv(f"{name}_conv1", x, filters, 3, strides)))
            y = net.norm(f"{name}_norm2", net.conv(f"{name}_conv2", y, filters, 3))
            if strides != 1:
                x = net.conv(f"{name}_shortcut", x, filters, 1, strides)
            x = jax.nn.relu(x + y)
    return net.dense("logits", x.mean((1, 2)), protocol.NUM_CLASSES)


def resnet50(net: Net, x: jax.Array) -> jax.Array:
    """Builds what `resnet50` of kerasdp/models/classifiers.py builds."""

    def conv_norm(name: str, x: jax.Array, filters: int, size: int, strides: int = 1) -> jax.Array:
        x = net.conv(f"{name}_conv", x, filters, size, strides, bias=False)
        return net.norm(f"{name}_norm", x, epsilon=1e-5, momentum=0.9)

    x = jax.nn.relu(conv_norm("stem", x, 64, 7, 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)])
    for stage, (filters, num_blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
        for block in range(1, num_blocks + 1):
            name, strides = f"stage{stage}_block{block}", 2 if block == 1 and stage > 1 else 1
            y = jax.nn.relu(conv_norm(f"{name}_1", x, filters, 1))
            y = jax.nn.relu(conv_norm(f"{name}_2", y, filters, 3, strides))
            y = conv_norm(f"{name}_3", y, 4 * filters, 1)
            if block == 1:
                x = conv_norm(f"{name}_shortcut", x, 4 * filters, 1, strides)
            x = jax.nn.relu(x + y)
    return net.dense("logits", x.mean((1, 2)), protocol.NUM_CLASSES)


def gpt(net: Net, x: jax.Array, vocabulary: int, width: int) -> jax.Array:
    """Builds what keras_models.py builds."""
    batch, length = x.shape
    x = jnp.take(net.kernel("tokens", vocabulary, width), x, 0) + net.kernel("positions", length, width)
    for number in range(1, protocol.NUM_BLOCKS + 1):
        name = f"block{number}"
        qkv = net.dense(f"{name}_qkv", net.layer_norm(f"{name}_norm1", x), 3 * width)
        parts = jnp.split(qkv.reshape(batch, length, 3 * protocol.NUM_HEADS, -1), 3, 2)
        attended = jax.nn.dot_product_attention(*parts, is_causal=True).reshape(x.shape)
        x = x + net.dense(f"{name}_out", attended, width)
        y = net.dense(f"{name}_up", net.layer_norm(f"{name}_norm2", x), 4 * width)
        x = x + net.dense(f"{name}_down", jax.nn.gelu(y, approximate=False), width)
    return net.dense("logits", net.layer_norm("norm", x), vocabulary)


def segmentation(net: Net, x: jax.Array, width: int) -> jax.Array:
    """Builds what keras_models.py builds."""

    def halve(name: str, x: jax.Array, filters: int) -> jax.Array:
        return jax.nn.relu(net.norm(f"{name}_norm", net.conv(name, x, filters, 4, 2, bias=False)))

    def join(name: str, x: jax.Array, other: jax.Array) -> jax.Array:
        return jax.nn.relu(net.norm(f"{name}_norm", net.double(name, x, other.shape[-1])) + other)

    half = halve("down1", x, width)
    quarter = halve("down2", half, 2 * width)
    x = halve("down3", quarter, 4 * width)
    x = join("up2", join("up1", x, quarter), half)
    return net.double("logits", x, protocol.SEGMENTATION_CLASSES, bias=True)
