"""Measures how the cost of a step grows with the work: kerasdp beside hand-written loops, which do the same.

    python benchmarks/scaling.py --backend=torch --devices=2 --vocabulary=2000,8000,16000,50000
    python benchmarks/scaling.py --backend=jax --devices=1,2,4 --model=segmentation --batch_size=64

All flags may be lists; every combination is a point. At a point kerasdp and the loops of its framework are started and
warmed up, and train in turn, `--steps` steps each, `--rounds` times. Prints for each the median seconds of a step, the
ratio of the loop's median to kerasdp's (above 1 kerasdp is faster), the same of the rounds, lowest and highest, and how
much memory the process that needs most has at most, beyond what it had before its first step.
"""

import argparse
import itertools
import os
import statistics
import sys
from typing import Any

from kerasdp.benchmark.contenders import PEERS, Contender
from kerasdp.benchmark.measure import run
from kerasdp.benchmark.results import Measured, spread

FOLDER = os.path.dirname(os.path.abspath(__file__))
AXES = ("model", "devices", "batch_size", "vocabulary", "width")


def contenders(point: dict[str, Any], peers: list[str], steps: int) -> list[Contender]:
    """Returns kerasdp and its peers at a point, which names the backend and a value for each of `AXES`."""
    flags = [f"--{name}={value}" for name, value in point.items() if name != "backend" and value] + [f"--steps={steps}"]
    programs = {f"kerasdp-{point['backend']}": ["kit_loop.py", f"--backend={point['backend']}"]}
    programs |= {name: [PEERS[name][1], *PEERS[name][2]] for name in peers}
    return [
        Contender(
            name=name, backend=point["backend"], num_devices=point["devices"],
            command=(sys.executable, os.path.join(FOLDER, words[0]), *words[1:], *flags),
        )
        for name, words in programs.items()
    ]  # fmt: skip


def measure(point: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures a point; returns a row for each contender, after printing it."""
    peers = [name for name in PEERS if PEERS[name][0] == point["backend"] and name != "tensorflow-xla"]
    if args.peers is not None:
        peers = [name for name in peers if name in args.peers]
    found = run(contenders(point, peers, args.steps), args.rounds, args.steps, point["batch_size"])
    rows = [point | row_of(one, found[0], args.steps) for one in found]
    print(" ".join(f"{name}={value}" for name, value in point.items() if value is not None))
    for row in rows:
        print(words_of(row), flush=True)
    return rows


def row_of(one: Measured, kit: Measured, steps: int) -> dict[str, Any]:
    """Returns what was measured of a contender."""
    if one.error:
        return {"name": one.name, "error": one.error}
    row = {
        "name": one.name, "seconds_a_step": statistics.median(one.seconds) / steps,
        "growth_bytes": one.last["growth_bytes"], "parameters": one.ready["parameters"],
    }  # fmt: skip
    if one is not kit and not kit.error:
        row["kit_speed"] = statistics.median(one.seconds) / statistics.median(kit.seconds)
        row["kit_speed_of_rounds"] = spread(theirs / ours for theirs, ours in zip(one.seconds, kit.seconds))
        row["kit_memory"] = kit.last["growth_bytes"] / max(one.last["growth_bytes"], 1)
    return row


def words_of(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    if "error" in row:
        return f"  {row['name']:20} {row['error']}"
    words = f"  {row['name']:20} {row['seconds_a_step'] * 1e3:9.1f} ms a step {row['growth_bytes'] / 2**20:8,.0f} MiB"
    if "kit_speed" in row:
        median, low, high = row["kit_speed_of_rounds"].values()
        words += f"   kerasdp: {row['kit_speed']:.2f} of its speed ({median:.2f}, {low:.2f} .. {high:.2f})"
        words += f", {row['kit_memory']:.2f} of its memory"
    return words


def main() -> None:
    """Measures all points."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--backend", default="torch", help="a list of torch, jax, tensorflow")
    flags.add_argument("--model", default="gpt", help="a list of gpt, segmentation")
    flags.add_argument("--devices", default="2", help="a list of numbers; on the CPU they are virtual")
    flags.add_argument("--batch_size", default="32", help="a list of samples a step, over all devices")
    flags.add_argument("--vocabulary", default="16000", help="a list of how many tokens gpt knows")
    flags.add_argument("--width", default="", help="a list of how wide the model is")
    flags.add_argument("--peers", help="a list of torch, torch-compile, jax, tensorflow; default: all of the backend")
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--steps", type=int, default=5, help="training steps a round")
    args = flags.parse_args()
    args.peers = None if args.peers is None else args.peers.split(",")
    axes = {name: [int(word) if word.isdigit() else word for word in getattr(args, name).split(",")] for name in AXES}
    for backend, *values in itertools.product(args.backend.split(","), *axes.values()):
        point = {"backend": backend} | {name: value or None for name, value in zip(axes, values)}
        if point["model"] != "gpt":
            point["vocabulary"] = None
        measure(point, args)


if __name__ == "__main__":
    main()
