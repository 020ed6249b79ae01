"""Measures how the cost of a step grows with the work: kerasdp beside hand-written loops, which do the same.

    python benchmarks/scaling.py --backend=torch --devices=2 --vocabulary=2000,8000,16000,50000
    python benchmarks/scaling.py --backend=jax --devices=1,2,4 --model=segmentation --batch_size=64
    python benchmarks/scaling.py --backend=jax --devices=2,4,8,16 --bytes --workdir=runs/scaling
    python benchmarks/scaling.py --backend=jax --samples=10000,1000000,100000000     # kerasdp alone

All flags may be lists; every combination is a point. At a point kerasdp and the loops of its framework are started and
warmed up, and train in turn, `--steps` steps each, `--rounds` times. Prints for each the median seconds of a step, the
ratio of the loop's median to kerasdp's (above 1 kerasdp is faster), the same of the rounds, lowest and highest, and how
much memory the process that needs most has at most, beyond what it had before its first step. With `--bytes` also what
a device sends in a step (`traffic.py`), beside the least that it can: the bytes of the gradients. With `--workdir` all
of it in scaling.json, and curves, in a picture for each flag with several values.

Batches of `--samples` are computed from their numbers, so what grows with them is kerasdp's order of the samples.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
from typing import Any

import protocol
from contenders import PEERS, Contender
from measure import Measured, run, spread

from kerasdp.config import versions
from kerasdp.reporting.run_files import BACKEND_COLOURS, make_figure

FOLDER = os.path.dirname(os.path.abspath(__file__))
AXES = ("model", "devices", "batch_size", "vocabulary", "width", "samples")


def contenders(point: dict[str, Any], peers: list[str], steps: int, *more: str) -> list[Contender]:
    """Returns kerasdp and its peers at a point, which names the backend and a value for each of `AXES`.

    Args:
        point: names the backend, and a value for each of `AXES`.
        peers: names in `PEERS`.
        steps: of a repetition.
        *more: flags of all.
    """
    flags = [f"--{name}={value}" for name, value in point.items() if name != "backend" and value]
    flags += [f"--steps={steps}", *more]
    programs = {f"kerasdp-{point['backend']}": ["kit_loop.py", f"--backend={point['backend']}"]}
    for name in peers:
        programs[name] = [PEERS[name][1], *PEERS[name][2]]
        if name == "keras":
            programs[name] += [f"--backend={point['backend']}"]
        elif name == "own-loop":
            programs[name] = [*programs[f"kerasdp-{point['backend']}"], "--loop"]
    return [
        Contender(
            name=name, backend=point["backend"], num_devices=point["devices"],
            command=(sys.executable, os.path.join(FOLDER, words[0]), *words[1:], *flags),
        )
        for name, words in programs.items()
    ]  # fmt: skip


def measure(point: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures a point; returns a row for each contender, after printing it."""
    peers = [name for name in PEERS if PEERS[name][0] in (None, point["backend"])]
    peers = [name for name in peers if name in (args.peers or ("torch", "torch-compile", "jax", "tensorflow"))]
    if point["samples"]:
        peers = []
    found = run(contenders(point, peers, args.steps), args.rounds, args.steps, point["batch_size"])
    rows = [point | row_of(one, found[0], args.steps) for one in found]
    if args.bytes and point["devices"] > 1:
        # Programs of their own: what counts takes memory.
        plain = [name for name in peers if name != "torch-compile"]
        sent = {one.name: one.ready for one in run(contenders(point, plain, args.steps, "--traffic"), 0, 1, 1)}
        for row in rows:
            if "bytes_a_step" in sent.get(row["name"], {}):
                row["bytes_a_step"] = sent[row["name"]]["bytes_a_step"]
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
    if "fit_seconds" in one.last:
        row["seconds_beside_steps"] = one.last["fit_seconds"] - one.last["seconds"]
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
    if "bytes_a_step" in row:
        least = 4 * row["parameters"]  # the gradients, in float32
        words += f", sends {row['bytes_a_step']:,} bytes a step: {row['bytes_a_step'] / least:.4f} of the gradients'"
    if row["samples"]:
        words += f", {row['seconds_beside_steps']:.2f} s of a fit beside its steps"
    if "kit_speed" in row:
        median, low, high = row["kit_speed_of_rounds"].values()
        words += f"   kerasdp: {row['kit_speed']:.2f} of its speed ({median:.2f}, {low:.2f} .. {high:.2f})"
        words += f", {row['kit_memory']:.2f} of its memory"
    return words


def write(rows: list[dict[str, Any]], folder: str) -> None:
    """Writes scaling.json, and a picture for each backend, model and flag with several values."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "scaling.json"), "w") as file:
        json.dump({"cores": os.cpu_count(), "versions": versions(), "rows": rows}, file, indent=2)
    done = [row for row in rows if "error" not in row]
    for axis in AXES[1:]:
        for backend, model in sorted({(row["backend"], row["model"]) for row in done}):
            own = [row for row in done if (row["backend"], row["model"]) == (backend, model) and row[axis]]
            if len({row[axis] for row in own}) > 1:
                draw(own, axis, os.path.join(folder, f"{backend}-{model}-{axis}.png"))
    print(f"scaling.json and pictures in {folder}")


def draw(rows: list[dict[str, Any]], axis: str, path: str) -> None:
    """Draws seconds, memory and bytes of a step by one of `AXES`; kerasdp full, its peers dashed."""
    kinds = [
        ("ms a step", lambda row: row["seconds_a_step"] * 1e3),
        ("MiB a process", lambda row: row["growth_bytes"] / 2**20),
        ("MB sent a step", lambda row: row.get("bytes_a_step", math.nan) / 1e6),
    ]
    if not any("bytes_a_step" in row for row in rows):
        kinds = kinds[:2]
    figure, axes = make_figure(4.2 * len(kinds), 3.4, columns=len(kinds))
    for each, (label, value) in zip(axes, kinds):
        for number, name in enumerate({row["name"]: None for row in rows}):
            own = sorted((row for row in rows if row["name"] == name), key=lambda row: row[axis])
            is_kit = name.startswith("kerasdp")
            each.plot(
                [row[axis] for row in own], [value(row) for row in own], label=name, marker="os^D"[number],
                linestyle="-" if is_kit else "--", color=BACKEND_COLOURS[own[0]["backend"]], alpha=1 if is_kit else 0.6,
                markerfacecolor=None if is_kit else "white",
            )  # fmt: skip
        if "sent" in label:
            least = {row[axis]: 4 * row["parameters"] / 1e6 for row in rows}
            each.plot(sorted(least), [least[key] for key in sorted(least)], ":", color="#888888", label="gradients")
        values = sorted({row[axis] for row in rows})
        each.set(xlabel=axis, ylabel=label, xscale="log", ylim=(0, 1.08 * each.get_ylim()[1]))
        each.set_xticks(values, [f"{number:g}" for number in values], minor=False)
        each.minorticks_off()
    axes[-1].legend(frameon=False)
    shared = {name: rows[0][name] for name in AXES if name != axis and len({row[name] for row in rows}) == 1}
    figure.suptitle(", ".join(f"{name} {value}" for name, value in shared.items() if value), fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measures all points."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--backend", default="torch", help="a list of torch, jax, tensorflow")
    flags.add_argument("--model", default="gpt", help=f"a list of {', '.join(protocol.WIDTHS)}")
    flags.add_argument("--devices", default="2", help="a list of numbers; on the CPU they are virtual")
    flags.add_argument("--batch_size", default="32", help="a list of samples a step, over all devices")
    flags.add_argument("--vocabulary", default="16000", help="a list of how many tokens gpt knows")
    flags.add_argument("--width", default="", help="a list of how wide the model is")
    flags.add_argument("--samples", default="", help="a list of how many computed samples there are")
    flags.add_argument("--bytes", action="store_true", help="also count what a device sends; on virtual CPU devices")
    flags.add_argument("--workdir", help="a folder for scaling.json and pictures")
    peers = ("torch", "torch-compile", "jax", "tensorflow", "tensorflow-xla", "own-loop", "keras")
    flags.add_argument("--peers", help=f"a list of {', '.join(peers)}; default: the first four")
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--steps", type=int, default=5, help="training steps a round")
    args = flags.parse_args()
    args.peers = None if args.peers is None else args.peers.split(",")
    axes = {name: [int(word) if word.isdigit() else word for word in getattr(args, name).split(",")] for name in AXES}
    rows: list[dict[str, Any]] = []
    for backend, *values in itertools.product(args.backend.split(","), *axes.values()):
        point = {"backend": backend} | {name: value or None for name, value in zip(axes, values)}
        if point["model"] not in protocol.TEXTS:
            point["vocabulary"] = None
        rows += measure(point, args)
    if args.workdir:
        write(rows, args.workdir)


if __name__ == "__main__":
    main()
