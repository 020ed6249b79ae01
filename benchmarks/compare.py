"""Measures kerasdp, hand-written training loops and plain Keras `fit` side by side, on this machine.

    python benchmarks/compare.py                                               # convnet, all installed backends
    python benchmarks/compare.py --model=resnet18 --batch_size=256 --precision=bfloat16 --backends=torch,jax
    python benchmarks/compare.py --device_counts=1,2,4 --backends=jax --peers=jax
    python benchmarks/compare.py --model=my_model.py:build --dataset=digits    # which backend is fastest for my model?

Each contender is a separate program: kerasdp; --peers, hand-written loops in this folder that train convnet, resnet18
and resnet50 with the same arithmetic, and Keras' own `fit` (`keras`). All are started and warmed up; then they train in
turn, --steps_per_round steps each, --rounds times, so that whatever else the machine does affects all of them.

Expected: a table with images a second (the median of the rounds, the lowest and the highest), the time to the first
step, which compiles, and the peak memory; the ratio of kerasdp to each peer; which backend is fastest. With --workdir
the same is in benchmark.json and in charts. On GPUs and TPUs also the model FLOPs utilization (MFU): the operations
that the model needs over what the chip could do in that time.

All train with SGD, random images, and, on several devices, batch norm on each device's shard of a batch, as the
frameworks do by default; --batch_norm=sync is for those that can, and measures kerasdp against itself without it (the
peer `replica-norm`). Virtual CPU devices share the cores: expect no gain from more of them. Run nothing else meanwhile.

Of the flags of training these are taken, too: --model, --dataset, --data_dir, --batch_size, --precision, --device,
--compile, --batch_norm, --deterministic, --seed, --workdir.
"""

import argparse
import sys

from contenders import PEERS, SHAPES
from measure import compare

import kerasdp
from kerasdp.cli.main import Recipe, ending_with_a_line, read
from kerasdp.processes.devices import choose_backend

TAKEN = Recipe(
    takes=["model", "dataset", "data_dir", "batch_size", "precision", "device", "compile",
           "batch_norm", "deterministic", "seed", "workdir"],
    # What all contenders can train; and what the frameworks do by themselves.
    defaults={"model": "convnet", "batch_norm": "replica"},
)  # fmt: skip


def parsed(arguments: list[str]) -> tuple[kerasdp.Config, list[str] | None, list[int], list[str] | None, int, int]:
    """Returns what `measure.compare` gets. `arguments`: of the command line, without the program's name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--backends", help="comma-separated; default: all that are installed")
    parser.add_argument("--device_counts", default="1", help="numbers of devices, comma-separated")
    parser.add_argument("--peers", help=f"some of {', '.join(PEERS)}; or none; default: all that can train the same")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turn")
    parser.add_argument("--steps_per_round", type=int, default=20, help="training steps of each round")
    own, others = parser.parse_known_args(arguments)
    given = read([sys.argv[0], *others], TAKEN)
    if given["model"] in SHAPES and "dataset" in given:
        raise kerasdp.UserError(f"--dataset has no effect here: {given['model']} is measured on random images")
    counts = own.device_counts.split(",")
    if not all(text.strip().isdecimal() and int(text) for text in counts) or min(own.rounds, own.steps_per_round) < 1:
        parser.error("--device_counts, --rounds, --steps_per_round: expected numbers of at least 1")
    backends = [choose_backend(name.strip()) for name in own.backends.split(",")] if own.backends else None
    peers = None if own.peers is None else [name.strip() for name in own.peers.split(",") if name.strip() != "none"]
    return kerasdp.Config(**given), backends, [int(text) for text in counts], peers, own.rounds, own.steps_per_round


if __name__ == "__main__":
    with ending_with_a_line():
        compare(*parsed(sys.argv[1:]))
