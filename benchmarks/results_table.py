"""Trains the models of the results table on each backend, and prints the table: accuracy, seconds, command.

    python benchmarks/results_table.py                                        # all rows on all backends: hours
    python benchmarks/results_table.py --rows=text,lenet --backends=jax --workdir=runs/results
    python benchmarks/results_table.py --workdir=runs/results --only_table    # of what is finished there

A row that is finished in the workdir is not trained again; one that was stopped is resumed. The table is written to
table.md in the workdir, too.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys

RECIPES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "recipes")
FASHION = "train.py --dataset=fashion_mnist --batch_size=128"
# Name in the table, and the command without backend and workdir. Real Fashion-MNIST: 60,000 images, 10,000 held out.
ROWS = {
    "lenet": (
        "LeNet, Fashion-MNIST, 3 epochs",
        f"{FASHION} \"--model=lenet(activation='relu')\" --epochs=3 --optimizer=adam",
    ),
    "convnet": ("convnet, Fashion-MNIST, 1 epoch", f"{FASHION} --model=convnet --epochs=1 --optimizer=adam"),
    "resnet18": (
        "ResNet-18, Fashion-MNIST, shortened to 60 steps",
        f"{FASHION} --model=resnet18 --max_steps=60 --optimizer=adam",
    ),
    "text": ("transformer, characters of Python's manual, 2 of 8 epochs", "text.py --epochs=2"),
}


def main() -> int:
    """Trains what is asked for; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--backends", default="torch,jax,tensorflow")
    parser.add_argument("--workdir", default="runs/results")
    parser.add_argument("--only_table", action="store_true")
    arguments = parser.parse_args()
    names, backends = arguments.rows.split(","), arguments.backends.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows: expected some of {', '.join(ROWS)}. Received: {unknown[0]!r}")
    failed = False
    for name in () if arguments.only_table else names:
        for backend in backends:
            failed |= not trained(name, backend, folder_of(arguments.workdir, name, backend))
    lines = table(names, backends, arguments.workdir)
    os.makedirs(arguments.workdir, exist_ok=True)
    with open(os.path.join(arguments.workdir, "table.md"), "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(failed)


def folder_of(workdir: str, name: str, backend: str) -> str:
    """Returns the workdir of a run."""
    return os.path.join(workdir, f"{name}-{backend}")


def trained(name: str, backend: str, folder: str) -> bool:
    """Trains what is not finished; returns whether that went well."""
    if report_of(folder) is not None:
        return True
    recipe, *flags = shlex.split(ROWS[name][1])
    command = [sys.executable, os.path.join(RECIPES, recipe), *flags, f"--backend={backend}", f"--workdir={folder}"]
    print(" ".join(command[1:]), flush=True)
    return subprocess.run([*command, "--resume", "--verbose=2"]).returncode == 0


def report_of(folder: str) -> dict | None:
    """Returns the report of a run that has come to its end."""
    try:
        with open(os.path.join(folder, "report.json")) as file:
            return json.load(file)
    except OSError:
        return None


def table(names: list[str], backends: list[str], workdir: str) -> list[str]:
    """Returns the lines of the table, in Markdown."""
    lines = [f"| | {' | '.join(backends)} | command |", "|---|" + "---|" * (len(backends) + 1)]
    for name in names:
        cells = [ROWS[name][0]]
        for backend in backends:
            report = report_of(folder_of(workdir, name, backend))
            if report is None:
                cells.append("not run")
            else:
                seconds = report["seconds_per_epoch"] * report["epochs"]
                cells.append(f"{report['final']['val_accuracy']:.3f}, {seconds:,.0f} s")
        lines.append(f"| {' | '.join(cells)} | `python recipes/{ROWS[name][1]}` |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
