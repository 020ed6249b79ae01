"""Runs a training loop in plain JAX; see `protocol.py` for how it is asked for repetitions.

    echo | python benchmarks/jax_loop.py --model=resnet18
    echo | python benchmarks/jax_loop.py --model=convnet --devices=2

One jitted step, whose state is donated; several devices share the batch by sharding its indices. All samples are kept
on the devices as bytes; a step picks its batch there.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import protocol
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from loop_models import find_model


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

    def embedding(self, name: str, x: jax.Array, count: int, size: int) -> jax.Array:
        """Looks up rows."""
        return jnp.take(self.table(name, count, size), x, 0)

    def attend(self, qkv: jax.Array) -> jax.Array:
        """Attends to what is before each position; `(batch, length, 3 * width)` becomes `(batch, length, width)`."""
        batch, length, size = qkv.shape
        parts = jnp.split(qkv.reshape(batch, length, 3 * protocol.NUM_HEADS, -1), 3, 2)
        return jax.nn.dot_product_attention(*parts, is_causal=True).reshape(batch, length, size // 3)

    def max_pool(self, x: jax.Array) -> jax.Array:
        """Takes the largest of 3x3 pixels, which halves an image."""
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)])

    def mean(self, x: jax.Array) -> jax.Array:
        """Averages all pixels of an image."""
        return x.mean((1, 2))

    relu = staticmethod(jax.nn.relu)
    gelu = staticmethod(functools.partial(jax.nn.gelu, approximate=False))
    table = kernel


Model = Callable[[Net, jax.Array], jax.Array]


def make_state(model: Model, sample: np.ndarray) -> dict[str, Any]:
    """Makes weights, momentum, moving statistics, and sums for the metrics, on the host."""
    net = Net()
    jax.eval_shape(lambda x: model(net, x), jnp.asarray(sample, jnp.float32 if sample.ndim == 4 else sample.dtype))
    return {
        "weights": net.weights, "momentum": jax.tree.map(np.zeros_like, net.weights), "statistics": net.statistics,
        "totals": np.zeros(2, "float32"), "step": np.int32(0),
    }  # fmt: skip


@functools.partial(jax.jit, static_argnames=("model", "dtype", "groups", "drop"), donate_argnums=0)
def train_step(
    state: dict[str, Any], images: jax.Array, labels: jax.Array, index: jax.Array, *, model: Model, dtype: Any,
    groups: int, drop: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Makes one step of SGD with momentum."""
    x, y = images[index], labels[index]
    if x.ndim == 4:  # images
        x = x.astype(dtype) * dtype(1 / 255)

    def loss_of(weights: Any) -> tuple[jax.Array, Any]:
        key = jax.random.fold_in(jax.random.key(0), state["step"]) if drop else None
        net = Net(weights, state["statistics"], dtype, groups, key)
        logits = model(net, x).astype(jnp.float32)
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
        return losses.mean(), (net.statistics, (logits.argmax(-1) == y).mean())

    (loss, (statistics, accuracy)), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["weights"])
    momentum = jax.tree.map(
        lambda old, gradient: protocol.MOMENTUM * old - protocol.LEARNING_RATE * gradient, state["momentum"], gradients
    )
    return {
        "weights": jax.tree.map(jnp.add, state["weights"], momentum), "momentum": momentum, "statistics": statistics,
        "totals": state["totals"] + jnp.stack([loss, accuracy]), "step": state["step"] + 1,
    }  # fmt: skip


class Loop:
    """Trains on all devices that are asked for."""

    def __init__(self, args: Any):
        if args.device == "cpu":
            jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
        if args.devices > 1:
            # A collective blocks its thread: with a pool of a thread a core several devices may hang.
            os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 16 * args.devices)))
        self.devices = jax.devices("cpu" if args.device == "cpu" else None)[: args.devices]
        if self.devices[0].platform != "cpu" and args.precision != "auto":
            jax.config.update("jax_default_matmul_precision", "float32")
        mesh = Mesh(np.array(self.devices), ("batch",))
        self.split, copied = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
        self.images, self.labels = jax.device_put(protocol.make_data(args), copied)
        model = find_model(args)
        self.state = jax.device_put(make_state(model, np.asarray(self.images[:1])), copied)
        self.num_parameters = sum(weight.size for weight in jax.tree.leaves(self.state["weights"]))
        self.step = functools.partial(
            train_step, model=model, dtype=jnp.bfloat16 if args.precision == "bfloat16" else jnp.float32,
            groups=args.devices if args.batch_norm == "replica" else 1,
        )  # fmt: skip
        self.copied, self.batches = copied, protocol.batches(args.model, args.batch_size)

    def repeat(self, steps: int) -> dict[str, float]:
        """Trains; waits for the end."""
        self.state["totals"] = jax.device_put(np.zeros(2, "float32"), self.copied)
        for _ in range(steps):
            index = jax.device_put(next(self.batches), self.split)
            self.state = self.step(self.state, self.images, self.labels, index)
        loss, accuracy = (np.asarray(self.state["totals"]) / steps).tolist()
        memory = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in self.devices]
        return {"loss": loss, "accuracy": accuracy, "peak_memory_bytes": max(memory) or protocol.peak_memory()}


def main() -> None:
    """Runs one process for all devices."""
    args = protocol.parse(protocol.parser(__doc__))
    traffic = protocol.traffic_of(args, "jax")
    loop = Loop(args)
    device = loop.devices[0]
    name = "cpu" if device.platform == "cpu" else device.device_kind
    protocol.serve(loop.repeat, args.steps, parameters=loop.num_parameters, device=name, traffic=traffic)


if __name__ == "__main__":
    main()
