"""Measures a GAN with a gradient penalty, trained by `Runner.step` and by the loop of each framework's guides, in turn.

    python benchmarks/wgan.py --backend=torch
    python benchmarks/wgan.py --backend=jax --rounds=9

One device. A step updates the critic, by gradients of gradients, then the generator. On jax and tensorflow the guide's
loop is one compiled function. On torch it is uncompiled: `torch.compile` (2.13) cannot take gradients of gradients.

Expected: steps a second of both, medians of the rounds, and their ratio.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import kerasdp

NOISE, ROWS, STEPS = 32, 64, 20


def build() -> tuple[Any, Any, Any, Any]:
    """Returns critic, generator, and an optimizer for each, built."""
    import keras
    from keras import layers

    critic = keras.Sequential(
        [keras.Input((28, 28, 1)), layers.Conv2D(16, 5, 2, "same"), layers.LeakyReLU(0.2),
         layers.Conv2D(32, 5, 2, "same"), layers.LeakyReLU(0.2), layers.Flatten(), layers.Dense(1)]
    )  # fmt: skip
    generator = keras.Sequential(
        [keras.Input((NOISE,)), layers.Dense(7 * 7 * 32, "relu"), layers.Reshape((7, 7, 32)),
         layers.Conv2DTranspose(16, 4, 2, "same", activation="relu"),
         layers.Conv2DTranspose(1, 4, 2, "same", activation="tanh")]
    )  # fmt: skip
    optimizers = [keras.optimizers.Adam(1e-4, beta_1=0.5) for _ in range(2)]
    for optimizer, model in zip(optimizers, (critic, generator), strict=True):
        optimizer.build(model.trainable_variables)
    return critic, generator, *optimizers


def penalized(judged: Any, made: Any, slope: Any) -> Any:
    """Returns the critic's loss, of what it says of real and made images, and of its slope between them."""
    from keras import ops

    steepness = ops.sqrt(ops.sum(ops.square(slope), axis=(1, 2, 3)) + 1e-12)
    return ops.mean(made) - ops.mean(judged) + 10.0 * ops.mean(ops.square(steepness - 1))


def of_kerasdp(runner: "kerasdp.Runner") -> Callable[[Any], Any]:
    """Returns a step by `value_and_grad`."""
    from keras import ops

    with runner.scope():
        critic, generator, for_critic, for_generator = build()

    @runner.step
    def step(batch: Any) -> Any:
        real, noise, share = batch["real"], batch["noise"], batch["share"]
        made = ops.stop_gradient(generator(noise))

        def of_critic() -> Any:
            slope_of = kerasdp.value_and_grad(lambda mixed: ops.sum(critic(mixed)))
            _, slope = slope_of(share * real + (1 - share) * made)
            return penalized(critic(real), critic(made), slope)

        loss, gradients = kerasdp.value_and_grad(of_critic, critic.trainable_variables)()
        for_critic.apply(gradients, critic.trainable_variables)
        weights = generator.trainable_variables
        _, gradients = kerasdp.value_and_grad(lambda: -ops.mean(critic(generator(noise))), weights)()
        for_generator.apply(gradients, weights)
        return loss

    return step


def of_torch() -> Callable[[Any], Any]:
    """Returns a step of PyTorch's own modules."""
    import torch
    from torch import nn

    class Shape(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1, 32, 7, 7)

    critic = nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, 2), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 5, 2, 2), nn.LeakyReLU(0.2), nn.Flatten(),
        nn.Linear(7 * 7 * 32, 1),
    )  # fmt: skip
    generator = nn.Sequential(
        nn.Linear(NOISE, 7 * 7 * 32), nn.ReLU(), Shape(), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    both = critic, generator
    for_critic, for_generator = (torch.optim.Adam(each.parameters(), 1e-4, (0.5, 0.999)) for each in both)

    def step(batch: Any) -> Any:
        real, noise, share = (torch.from_numpy(batch[name]) for name in ("real", "noise", "share"))
        real, share = real.permute(0, 3, 1, 2), share.permute(0, 3, 1, 2)
        made = generator(noise).detach()
        mixed = (share * real + (1 - share) * made).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        steepness = (slope.square().sum((1, 2, 3)) + 1e-12).sqrt()
        loss = critic(made).mean() - critic(real).mean() + 10.0 * (steepness - 1).square().mean()
        for_critic.zero_grad()
        loss.backward()
        for_critic.step()
        for_generator.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        for_generator.step()
        return loss.detach()

    return step


def of_jax() -> Callable[[Any], Any]:
    """Returns a step as a function of a state, of Keras' layers, as in its guide."""
    import jax
    import jax.numpy as jnp

    parts = critic, generator, for_critic, for_generator = build()

    def call(model: Any, weights: Any, x: Any) -> Any:
        return model.stateless_call(weights, [], x)[0]

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: Any, batch: Any) -> Any:
        judge, maker, slots, others = state
        real, noise, share = batch["real"], batch["noise"], batch["share"]
        made = call(generator, maker, noise)

        def of_critic(judge: Any) -> Any:
            mixed = share * real + (1 - share) * made
            slope = jax.grad(lambda mixed: jnp.sum(call(critic, judge, mixed)))(mixed)
            return penalized(call(critic, judge, real), call(critic, judge, made), slope)

        loss, gradients = jax.value_and_grad(of_critic)(judge)
        judge, slots = for_critic.stateless_apply(slots, gradients, judge)
        gradients = jax.grad(lambda maker: -jnp.mean(call(critic, judge, call(generator, maker, noise))))(maker)
        maker, others = for_generator.stateless_apply(others, gradients, maker)
        return loss, (judge, maker, slots, others)

    state = [[variable.value for variable in part.variables] for part in parts]

    def step(batch: Any) -> Any:
        nonlocal state
        loss, state = train(state, batch)
        return loss

    return step


def of_tensorflow() -> Callable[[Any], Any]:
    """Returns a step by `tf.GradientTape`, of Keras' layers, as in its guide, compiled by XLA."""
    import tensorflow as tf

    critic, generator, for_critic, for_generator = build()

    @tf.function(jit_compile=True)
    def train(real: Any, noise: Any, share: Any) -> Any:
        made = generator(noise)
        with tf.GradientTape() as tape:
            mixed = share * real + (1 - share) * made
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                judged = critic(mixed)
            loss = penalized(critic(real), critic(made), inner.gradient(judged, mixed))
        weights = critic.trainable_variables
        for_critic.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            made_loss = -tf.reduce_mean(critic(generator(noise)))
        weights = generator.trainable_variables
        for_generator.apply_gradients(zip(tape.gradient(made_loss, weights), weights, strict=True))
        return loss

    return lambda batch: train(*(tf.constant(batch[name]) for name in ("real", "noise", "share")))


def measure(rounds: int, runner: "kerasdp.Runner") -> None:
    """Trains by both in turn, and prints what came."""
    backend, random = runner.config.backend, np.random.RandomState(0)
    batch = {
        "real": random.rand(ROWS, 28, 28, 1), "noise": random.normal(size=(ROWS, NOISE)),
        "share": random.rand(ROWS, 1, 1, 1),
    }  # fmt: skip
    batch = {name: values.astype("float32") for name, values in batch.items()}
    guide = {"torch": of_torch, "jax": of_jax, "tensorflow": of_tensorflow}[backend]
    steps = {"kerasdp": of_kerasdp(runner), backend: guide()}
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            for _ in range(STEPS):
                loss = step(batch)
            float(loss)
            if number:  # the first round compiles
                rates[name].append(STEPS / (time.perf_counter() - begin))
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found):.1f} steps/s ({min(found):.1f} .. {max(found):.1f})")
    ratios = [own / other for own, other in zip(*rates.values(), strict=True)]
    print(f"kerasdp / {backend}: {statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")


def main() -> None:
    """Starts the run."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--backend", required=True, choices=["torch", "jax", "tensorflow"])
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--compile", default="on", choices=["on", "off"], help="of kerasdp on torch")
    args = flags.parse_args()
    more = {"compile": args.compile} if args.backend == "torch" else {}
    kerasdp.launch(
        functools.partial(measure, args.rounds), backend=args.backend, num_devices=1, device="cpu", verbose=0, **more
    )


if __name__ == "__main__":
    main()
