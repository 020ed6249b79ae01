"""Computes, on paper, how a data-parallel step scales to 1,024 GPUs: what is sent, how long, and what hides it.

    python benchmarks/scaling_model.py                                   # the table of docs/contributing/scaling.md
    python benchmarks/scaling_model.py --mfu=0.4 --picture=scaling.png

Nothing is measured here. `step_bytes.py` computes the bytes, which a test compares with counted ones; a message
takes alpha + bytes / beta (Thakur et al. 2005, doi:10.1177/1094342005051521); a step's arithmetic takes three forward
passes (Chowdhery et al. 2022, arXiv:2204.02311) at `--mfu` of what an H100 can do in bfloat16 at best. Gradients are
sent in float32 and in buckets of 25 MiB, while the backward pass computes those of earlier layers. Printed is the least
batch a GPU, a power of two, with which a GPU computes in 90% of a step.
"""

import argparse
import dataclasses
import functools
from typing import Any

import numpy as np
from measure import PEAKS

import kerasdp

BUCKET = 25 * 2**20
GPUS_A_HOST = 8
COUNTS = 2 ** np.arange(1, 11)
# Data sets; sizes as published: LeNet's and the convnet's for MNIST, ResNets for ImageNet.
IMAGENET = "synthetic(shape=(224,224,3), num_classes=1000)"
MODELS = {"lenet": "synthetic", "convnet": "synthetic", "resnet18": IMAGENET, "resnet50": IMAGENET}
# The net of benchmarks/keras_models.py with GPT-2's vocabulary and width: 2 blocks, 64 tokens a sample.
GPT = {"vocabulary": 50_257, "width": 768}


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects GPUs: seconds before a message arrives (assumed), and bytes a second in one direction."""

    alpha: float
    beta: float

    def all_reduce(self, num_bytes: Any, count: int) -> Any:
        """Seconds of a sum over so many devices, by the fastest of three algorithms.

        A ring; recursive halving and doubling (Rabenseifner), which counts as the tree; recursive doubling.
        """
        if count == 1:
            return np.zeros_like(num_bytes, float)
        moved, rounds = 2 * (count - 1) / count * num_bytes / self.beta, np.ceil(np.log2(count))
        ring, tree = 2 * (count - 1) * self.alpha + moved, 2 * rounds * self.alpha + moved
        return np.minimum(np.minimum(ring, tree), rounds * (self.alpha + num_bytes / self.beta))

    def all_gather(self, own_bytes: float, count: int) -> float:
        """Seconds until each device has the bytes of all."""
        return float(np.ceil(np.log2(count)) * self.alpha + (count - 1) * own_bytes / self.beta)


# 900 GB/s is NVLink 4 (H100) in both directions together. A DGX H100 has a 400 Gb/s adapter for each GPU.
NVLINK, INFINIBAND, ETHERNET = Link(3e-6, 450e9), Link(5e-6, 400e9 / 8), Link(30e-6, 25e9 / 8)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts of 8 GPUs with NVLink, and what each host has to the others: an adapter a GPU, or one for all."""

    name: str
    outer: Link
    adapters: int

    def all_reduce(self, num_bytes: Any, count: int) -> Any:
        """Seconds of a sum: of a share on each GPU of a host, which is then summed between hosts, and given back."""
        inner = min(count, GPUS_A_HOST)
        between = self.outer.all_reduce(num_bytes / self.adapters, max(1, count // inner))
        return NVLINK.all_reduce(num_bytes, inner) + between

    def all_gather(self, own_bytes: float, count: int) -> float:
        """Seconds until each GPU has the bytes of all, which each host's adapters bring in."""
        inner = min(count, GPUS_A_HOST)
        within = NVLINK.all_gather(own_bytes, inner)
        if count == inner:
            return within
        return within + self.outer.all_gather(own_bytes * inner / self.adapters, count // inner)


CLUSTERS = [
    Cluster("InfiniBand, 400 Gb/s a GPU", INFINIBAND, GPUS_A_HOST),
    Cluster("Ethernet, 25 Gb/s a host", ETHERNET, 1),
]


@dataclasses.dataclass(frozen=True)
class Counted:
    """A model: bytes of each layer's gradients and its operations for a sample, in the order of the forward pass."""

    name: str
    layer_bytes: np.ndarray
    layer_flops: np.ndarray
    gathered: int
    num_gatherings: int


def count(name: str, runner: "kerasdp.Runner") -> dict[str, Any]:
    """Builds a model of `MODELS`, or the GPT, and counts; runs in a worker."""
    import keras
    import keras_models
    from flops import flops_of
    from step_bytes import step_bytes

    from kerasdp.scale.pipeline import Graph

    if name not in MODELS:
        model = keras_models.gpt(**GPT)
    else:
        data = kerasdp.load_data(MODELS[name])
        model = kerasdp.build_model(name, data.input_shape, data.num_classes)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    sent, sizes = step_bytes(kerasdp.portable(model), runner.config, 2), np.array(Graph(model).costs())
    return {
        "layer_bytes": sizes / sizes.sum() * sent.gradients, "layer_flops": np.array(flops_of(model)),
        "gathered": sent.gathered, "num_gatherings": sent.num_gatherings,
    }  # fmt: skip


def counted(name: str, backend: str | None = None) -> Counted:
    """Counts a model of `MODELS`, or `"gpt"`."""
    work = functools.partial(count, name)
    found = kerasdp.launch(work, backend=backend, num_devices=1, device="cpu", verbose=0)
    return Counted(name=name, **found)


def seconds_of_step(
    model: Counted, cluster: Any, gpus: int, batch: int, flops: float, sync: bool
) -> tuple[float, float]:
    """Returns the seconds of a step's arithmetic on a GPU, and of the whole step.

    `cluster` may be a `Link`; `batch`: samples a GPU; `flops`: a second that a GPU really does; `sync`: whether layers
    wait for batch norm's statistics of the global batch.
    """
    forward = model.layer_flops * batch / flops
    compute = 3 * forward.sum()
    if gpus == 1:
        return compute, compute
    waits = 0.0
    if sync and model.num_gatherings:
        waits = model.num_gatherings * cluster.all_gather(model.gathered / model.num_gatherings, gpus)
    ready = forward.sum() + waits / 2 + np.cumsum((2 * forward + waits / 2 * forward / forward.sum())[::-1])
    end, waiting = 0.0, 0.0
    for number, (moment, size) in enumerate(zip(ready, model.layer_bytes[::-1])):
        waiting += size
        if waiting >= BUCKET or number == len(ready) - 1:
            end = max(end, moment) + float(cluster.all_reduce(waiting, gpus))
            waiting = 0.0
    return compute, max(end, compute + waits)


def efficiency(*where: Any) -> float:
    """Returns the share of a step in which a GPU computes; arguments: of `seconds_of_step`."""
    compute, step = seconds_of_step(*where)
    return compute / step


def least_batch(model: Counted, cluster: Any, gpus: int, flops: float, sync: bool) -> str:
    """Returns the least power of two of samples a GPU with which that computes in 90% of a step."""
    enough = (batch for batch in 2 ** np.arange(17) if efficiency(model, cluster, gpus, int(batch), flops, sync) >= 0.9)
    return f"{next(enough, 'more')}"


def draw(models: list[Counted], batch: int, flops: float, path: str) -> None:
    """Draws the efficiency by the number of GPUs, batch norm over the global batch dashed."""
    from kerasdp.reporting.run_files import make_figure

    figure, axes = make_figure(9, 3.6, columns=len(CLUSTERS))
    for axis, cluster in zip(axes, CLUSTERS):
        for model, colour in zip(models, ("#4c78a8", "#f2a541", "#e4572e", "#59a14f", "#7b3fa0")):
            for sync in [False, True] if model.num_gatherings else [False]:
                values = [efficiency(model, cluster, int(gpus), batch, flops, sync) for gpus in COUNTS]
                look = {"linestyle": "--", "alpha": 0.6} if sync else {"label": model.name}
                axis.plot(COUNTS, values, color=colour, **look)
        axis.set(xscale="log", ylim=(0, 1.05), xlabel="GPUs", title=cluster.name)
        axis.set_xticks(COUNTS[::2], [f"{gpus:,}" for gpus in COUNTS[::2]])
        axis.minorticks_off()
    axes[0].set_ylabel("scaling efficiency (modelled)")
    axes[-1].plot([], [], color="black", linestyle="--", alpha=0.6, label="--batch_norm=sync")
    axes[-1].legend(frameon=False)
    figure.suptitle(f"Modelled, not measured: scaling to 1,024 H100 with {batch} samples a GPU", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Prints the table."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--backend", help="that counts; default: the first installed")
    flags.add_argument("--mfu", type=float, default=0.3, help="share of an H100's best that the arithmetic reaches")
    flags.add_argument("--picture", help="file for a picture, of 128 samples a GPU")
    args = flags.parse_args()
    flops, columns = args.mfu * float(PEAKS["H100"][1] or 0), [int(gpus) for gpus in COUNTS[[2, 5, 7, 9]]]
    models = [counted(name, args.backend) for name in (*MODELS, "gpt")]
    for cluster in CLUSTERS:
        print(f"{cluster.name:40}" + "".join(f"{gpus:>8,}" for gpus in columns))
        for model in models:
            for sync in [False, True] if model.num_gatherings else [False]:
                cells = [least_batch(model, cluster, gpus, flops, sync) for gpus in columns]
                name = f"{model.name}{', --batch_norm=sync' if sync else ''}"
                print(f"  {name:38}" + "".join(f"{cell:>8}" for cell in cells))
    if args.picture:
        draw(models, 128, flops, args.picture)


if __name__ == "__main__":
    main()
