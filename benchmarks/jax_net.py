"""Holds what the models of loop_models.py are made of in plain JAX, for `jax_loop.py`."""

import functools
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
        # Flash attention, which jax (0.10) does not choose by itself.
        is_flash = dtype == jnp.bfloat16 and jax.default_backend() == "gpu"
        self.attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn" if is_flash else None)

    def kernel(self, name: str, *shape: int) -> jax.Array:
        """Returns a kernel, made with He's normal distribution."""
        if self.is_new:
            deviation = (2 / np.prod(shape[:-1])) ** 0.5
            self.weights[name] = {"kernel": self.random.standard_normal(shape, "float32") * np.float32(deviation)}
        return self.weights[name]["kernel"].astype(self.dtype)

    def bias(self, name: str, size: int) -> jax.Array:
        """Returns a layer's bias."""
        if self.is_new:
            self.weights[name]["bias"] = np.zeros(size, "float32")
        return self.weights[name]["bias"].astype(self.dtype)

    def conv(
        self, name: str, x: jax.Array, filters: int, size: int, strides: int = 1, bias: bool = True,
        is_padded: bool = True, is_same: bool = False, groups: int = 1,
    ) -> jax.Array:  # fmt: skip
        """Applies a convolution that pads equally on all sides, as Keras' "same" does, or not at all."""
        pad = (size - 1) // 2 if is_padded else 0
        kernel = self.kernel(name, size, size, x.shape[-1] // groups, filters)
        x = lax.conv_general_dilated(
            x, kernel, (strides, strides), "SAME" if is_same else [(pad, pad)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
        )  # fmt: skip
        return x + self.bias(name, filters) if bias else x

    def double(self, name: str, x: jax.Array, filters: int, bias: bool = False) -> jax.Array:
        """Applies a 1x1 convolution that gives 2x2 pixels each."""
        batch, rows, columns, _ = x.shape
        x = self.conv(name, x, 4 * filters, 1, bias=bias).reshape(batch, rows, columns, 2, 2, filters)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, 2 * rows, 2 * columns, filters)

    def dense(self, name: str, x: jax.Array, size: int, bias: bool = True) -> jax.Array:
        """Applies a dense layer."""
        x = x @ self.kernel(name, x.shape[-1], size)
        return x + self.bias(name, size) if bias else x

    def heads(self, x: jax.Array, count: int) -> jax.Array:
        """Makes `(batch, length, heads * size)` `(batch, length, heads, size)`."""
        return x.reshape(*x.shape[:-1], count, -1)

    def adapted(self, name: str, x: jax.Array, heads: int, size: int) -> jax.Array:
        """Applies a dense layer to heads, and adds one of a low rank, whose second part all heads share (LoRA)."""
        low, rank, width = f"{name}_lora", protocol.LORA_RANK, x.shape[-1]
        if self.is_new:
            first = self.random.normal(0, width**-0.5, (width, heads, rank)).astype("float32")
            self.weights[low] = {"a": first, "b": np.zeros((rank, size), "float32")}
        first, second = (self.weights[low][kind].astype(self.dtype) for kind in ("a", "b"))
        added = self.heads(x @ first.reshape(width, -1), heads) @ second
        return self.heads(self.dense(name, x, heads * size, bias=False), heads) + added

    def rms_norm(self, name: str, x: jax.Array) -> jax.Array:
        """Divides by the root of the mean square, in float32."""
        if self.is_new:
            self.weights[name] = {"scale": np.ones(x.shape[-1], "float32")}
        x = x.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        return (x * self.weights[name]["scale"]).astype(self.dtype)

    def rotated(self, x: jax.Array) -> jax.Array:
        """Adds rotary embeddings (arXiv:2104.09864) to `(batch, length, heads, size)`."""
        _, length, _, size = x.shape
        angles = np.arange(length)[:, None] / protocol.LONGEST_WAVE ** (np.arange(0, size, 2) / size)
        angles = np.concatenate([angles, angles], -1)[:, None].astype("float32")
        first, second = jnp.split(x, 2, -1)
        turned = jnp.concatenate([-second, first], -1)
        return x * np.cos(angles).astype(self.dtype) + turned * np.sin(angles).astype(self.dtype)

    def attend_before(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """Attends to what is before each position; `(batch, length, heads, size)` each, fewer heads of keys."""
        attended = self.attention(query, key, value, is_causal=True)
        return attended.reshape(*attended.shape[:2], -1)

    def layer_norm(self, name: str, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
        """Applies layer norm in float32."""
        if self.is_new:
            self.weights[name] = {"gamma": np.ones(x.shape[-1], "float32"), "beta": np.zeros(x.shape[-1], "float32")}
        x = x.astype(jnp.float32)
        x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + epsilon)
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

    def group_norm(self, name: str, x: jax.Array) -> jax.Array:
        """Applies group norm in float32."""
        if self.is_new:
            self.weights[name] = {"gamma": np.ones(x.shape[-1], "float32"), "beta": np.zeros(x.shape[-1], "float32")}
        rows = x.astype(jnp.float32).reshape(x.shape[0], -1, protocol.NUM_GROUPS, x.shape[-1] // protocol.NUM_GROUPS)
        mean, variance = rows.mean((1, 3), keepdims=True), rows.var((1, 3), keepdims=True)
        rows = ((rows - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)
        return (rows * self.weights[name]["gamma"] + self.weights[name]["beta"]).astype(self.dtype)

    def waves(self, timestep: jax.Array, width: int) -> jax.Array:
        """Returns sines and cosines of timesteps; `(batch,)` becomes `(batch, width)`."""
        angles = timestep[:, None] * (protocol.LONGEST_WAVE ** (-np.arange(width // 2) / (width // 2))).astype(
            "float32"
        )
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(self.dtype)

    def pixels(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Makes an image of a sequence."""
        return x.reshape(like.shape)

    def enlarge(self, x: jax.Array) -> jax.Array:
        """Doubles an image by repeating pixels."""
        return x.repeat(2, 1).repeat(2, 2)

    def dropout(self, x: jax.Array, rate: float) -> jax.Array:
        """Drops at random."""
        if self.key is None:
            return x
        return jnp.where(jax.random.bernoulli(self.key, 1 - rate, x.shape), x / (1 - rate), 0)

    def embedding(self, name: str, x: jax.Array, count: int, size: int) -> jax.Array:
        """Looks up rows."""
        return jnp.take(self.table(name, count, size), x, 0)

    def attend(self, qkv: jax.Array, is_causal: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Attends to all positions, or to those before each; `(batch, length, 3 * width)` becomes `(..., width)`.

        `mask`: `(batch, length)`, 0 for padding, which is at the end.
        """
        batch, length, size = qkv.shape
        parts = jnp.split(qkv.reshape(batch, length, 3 * protocol.NUM_HEADS, -1), 3, 2)
        lengths = None if mask is None else mask.sum(-1, dtype="int32")
        attended = self.attention(*parts, key_value_seq_lengths=lengths, is_causal=is_causal)
        return attended.reshape(batch, length, size // 3)

    def with_token(self, name: str, x: jax.Array) -> jax.Array:
        """Puts a token that is trained before all others."""
        batch, _, width = x.shape
        return jnp.concatenate([jnp.broadcast_to(self.kernel(name, 1, 1, width), (batch, 1, width)), x], 1)

    def lstm(self, name: str, x: jax.Array, mask: jax.Array, size: int, is_reverse: bool) -> jax.Array:
        """Applies an LSTM to `(batch, length, width)`, which skips what `mask`, `(batch, length)`, has False."""
        if self.is_new:
            shapes = {"kernel": (x.shape[-1], 4 * size), "recurrent_kernel": (size, 4 * size), "bias": (4 * size,)}
            make = functools.partial(self.random.normal, 0, size**-0.5)
            self.weights[name] = {kind: make(shape).astype("float32") for kind, shape in shapes.items()}
        kernel, recurrent, bias = (
            self.weights[name][kind].astype(self.dtype) for kind in ("kernel", "recurrent_kernel", "bias")
        )

        def step(state: Any, inputs: Any) -> Any:
            (hidden, cell), (projected, is_token) = state, inputs
            in_gate, forget_gate, new, out_gate = jnp.split(projected + hidden @ recurrent, 4, -1)
            next_cell = jax.nn.sigmoid(forget_gate) * cell + jax.nn.sigmoid(in_gate) * jnp.tanh(new)
            next_hidden = jax.nn.sigmoid(out_gate) * jnp.tanh(next_cell)
            state = jnp.where(is_token, next_hidden, hidden), jnp.where(is_token, next_cell, cell)
            return state, state[0]

        zeros = jnp.zeros((x.shape[0], size), self.dtype)
        inputs = (x @ kernel + bias).swapaxes(0, 1), mask.T[..., None]
        return lax.scan(step, (zeros, zeros), inputs, reverse=is_reverse)[1].swapaxes(0, 1)

    def join(self, parts: list[jax.Array]) -> jax.Array:
        """Puts the last axes of tensors one behind the other."""
        return jnp.concatenate(parts, -1)

    def sequence(self, x: jax.Array) -> jax.Array:
        """Makes a sequence of an image's pixels."""
        return x.reshape(x.shape[0], -1, x.shape[-1])

    def max_pool(self, x: jax.Array) -> jax.Array:
        """Takes the largest of 3x3 pixels, which halves an image."""
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)])

    def mean(self, x: jax.Array) -> jax.Array:
        """Averages all pixels of an image."""
        return x.mean((1, 2))

    relu = staticmethod(jax.nn.relu)
    tanh = staticmethod(jnp.tanh)
    swish = staticmethod(jax.nn.silu)
    sigmoid = staticmethod(jax.nn.sigmoid)
    gelu = staticmethod(functools.partial(jax.nn.gelu, approximate=False))
    gelu_by_tanh = staticmethod(jax.nn.gelu)
    table = kernel
