"""Measures how long the first results take, of kerasdp, plain Keras and the hand-written loops.

    python benchmarks/first_results.py
    python benchmarks/first_results.py --backend=jax --devices=1,2,4 --model=resnet18 --steps=50

Each row is started twice: with an empty cache of compiled programs, and with what the first start has left there. Plain
Keras and the loops get the same folder as kerasdp, where their framework has one (Inductor's, JAX's).

On Linux. Expected: a table in Markdown: seconds from the command to the end of the first step, and of the whole program
with one repetition of `--steps`; first with an empty cache, then with a full one.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from contenders import ONE_DEVICE, PEERS, caches_in

FOLDER = pathlib.Path(__file__).parent


def programs(backend: str, devices: int) -> dict[str, list[str]]:
    """Returns the commands of a backend, by the names of the contenders."""
    # So short a run of torch is not compiled by default.
    found = {f"kerasdp-{backend}": ["kit_loop.py", f"--backend={backend}", "--compile=off"]}
    for name in (backend, f"{backend}-compile"):
        if name in PEERS:
            found[name] = [PEERS[name][1], *PEERS[name][2]]
    if devices == 1:
        found["keras"] = ["keras_fit.py", f"--backend={backend}"]
    if backend == "torch":
        found["kerasdp-torch --compile=on"] = ["kit_loop.py", "--backend=torch"]
    return {name: words for name, words in found.items() if devices == 1 or name not in ONE_DEVICE}


def seconds_of(command: list[str], cache: str) -> tuple[float, float]:
    """Runs a program; returns the seconds to the end of its first step, and of all of it."""
    started = time.time()
    done = subprocess.run(
        [sys.executable, *command],
        input="\n",
        env=os.environ | caches_in(cache),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    whole = time.time() - started
    said: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return next(line["seconds_to_first_step"] for line in said if "ready" in line), whole


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch,jax,tensorflow", help="a list")
    parser.add_argument("--devices", default="1,2", help="a list of numbers")
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--batch_size", default="64")
    parser.add_argument("--steps", default="50", help="of the short run")
    args = parser.parse_args()
    flags = ["--device=cpu", f"--model={args.model}", f"--batch_size={args.batch_size}", f"--steps={args.steps}"]
    print("| | devices | first step, cold | warm | short run, cold | warm |\n|---|---|---|---|---|---|")
    for backend in args.backend.split(","):
        for devices in map(int, args.devices.split(",")):
            for name, words in programs(backend, devices).items():
                command = [str(FOLDER / words[0]), *words[1:], f"--devices={devices}", *flags]
                with tempfile.TemporaryDirectory(prefix="kerasdp-") as cache:
                    (first, whole), (again, whole_again) = (seconds_of(command, cache) for _ in range(2))
                figures = " | ".join(f"{value:.1f} s" for value in (first, again, whole, whole_again))
                print(f"| {name} | {devices} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
