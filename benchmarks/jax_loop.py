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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_net import Net
from loop_models import find_model, is_trained

Model = Callable[[Net, Any], jax.Array]
Score = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def find_score(model: str) -> Score:
    """Returns what gives loss and accuracy of a model's outputs and labels."""
    return {"tagger": tags_score, "unet": noise_score}.get(model, class_score)


def class_score(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean crossentropy, and the accuracy."""
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return losses.mean(), (logits.argmax(-1) == labels).mean()


def noise_score(outputs: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean squared error, and no accuracy."""
    return jnp.square(outputs - noise).mean(), jnp.zeros(())


def tags_score(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean crossentropy of tokens, and their accuracy."""
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    is_token = labels != protocol.NO_TAG
    is_right = is_token & (logits.argmax(-1) == labels)
    return jnp.where(is_token, losses, 0).sum() / is_token.sum(), is_right.sum() / is_token.sum()


def scaled(x: Any, dtype: Any) -> Any:
    """Returns images as numbers from 0 to 1, other numbers with a fraction in this type, and integers as they are."""
    if isinstance(x, dict):
        is_float = {name: jnp.issubdtype(part.dtype, jnp.floating) for name, part in x.items()}
        return {name: part.astype(dtype) if is_float[name] else part for name, part in x.items()}
    return x.astype(dtype) * dtype(1 / 255) if x.ndim == 4 else x


def make_state(model: Model, sample: Any, name: str) -> dict[str, Any]:
    """Makes weights, momentum, moving statistics, and sums for the metrics, on the host. `name`: of the model."""
    net = Net()
    jax.eval_shape(lambda x: model(net, scaled(x, jnp.float32)), sample)
    trained = {layer: weights for layer, weights in net.weights.items() if is_trained(layer, name)}
    frozen = {layer: weights for layer, weights in net.weights.items() if layer not in trained}
    return {
        "weights": trained, "frozen": frozen, "momentum": jax.tree.map(np.zeros_like, trained),
        "statistics": net.statistics, "totals": np.zeros(2, "float32"), "step": np.int32(0),
    }  # fmt: skip


@functools.partial(jax.jit, static_argnames=("model", "score", "dtype", "groups", "drop"), donate_argnums=0)
def train_step(
    state: dict[str, Any], inputs: Any, labels: jax.Array, index: jax.Array, *, model: Model, score: Score, dtype: Any,
    groups: int, drop: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Makes one step of SGD with momentum."""
    x, y = scaled(protocol.map_inputs(lambda array: array[index], inputs), dtype), labels[index]

    def loss_of(weights: Any) -> tuple[jax.Array, Any]:
        key = jax.random.fold_in(jax.random.key(0), state["step"]) if drop else None
        net = Net(state["frozen"] | weights, state["statistics"], dtype, groups, key)
        loss, accuracy = score(model(net, x).astype(jnp.float32), y)
        return loss, (net.statistics, accuracy)

    (loss, (statistics, accuracy)), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["weights"])
    momentum = jax.tree.map(
        lambda old, gradient: protocol.MOMENTUM * old - protocol.LEARNING_RATE * gradient, state["momentum"], gradients
    )
    return state | {
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
        self.inputs, self.labels = jax.device_put(protocol.make_data(args), copied)
        model, sample = find_model(args), protocol.map_inputs(lambda array: array[:1], self.inputs)
        self.state = jax.device_put(make_state(model, sample, args.model), copied)
        self.num_parameters = sum(weight.size for weight in jax.tree.leaves(self.state["weights"]))
        self.step = functools.partial(
            train_step, model=model, score=find_score(args.model),
            dtype=jnp.bfloat16 if args.precision == "bfloat16" else jnp.float32,
            groups=args.devices if args.batch_norm == "replica" else 1,
        )  # fmt: skip
        self.copied, self.batches = copied, protocol.batches(args.model, args.batch_size)

    def repeat(self, steps: int) -> dict[str, float]:
        """Trains; waits for the end."""
        self.state["totals"] = jax.device_put(np.zeros(2, "float32"), self.copied)
        for _ in range(steps):
            index = jax.device_put(next(self.batches), self.split)
            self.state = self.step(self.state, self.inputs, self.labels, index)
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
    protocol.serve(
        loop.repeat, args.steps, first_steps=args.first_steps, parameters=loop.num_parameters, device=name,
        traffic=traffic,
    )  # fmt: skip


if __name__ == "__main__":
    main()
