"""Runs quick checks in an environment, and writes what came out into docs/matrix.md: what differs, and since when.

    python tests/matrix.py pinned                                          # with this Python
    python tests/matrix.py "Keras' newest" --python=/path/of/an/environment/bin/python

Each check is a row, each backend of an environment a cell: some models trained ten steps in float64 on one and two
devices (`recipes/parity.py`), and the programs of `upstream/`. What came out is kept in docs/matrix.json, of which the
page is made; a verdict that stays keeps its date.
"""

import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE, RECORD = ROOT / "docs" / "matrix.md", ROOT / "docs" / "matrix.json"
BACKENDS = ("torch", "jax", "tensorflow")
MODELS = {"mlp": [], "lenet": [], "convnet": ["--optimizer=adam"]}
_VERSIONS = """
import importlib.metadata, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
names = ("keras", "keras-nightly", "torch", "jax", "tensorflow", "numpy")
print(json.dumps({name: version(name) for name in names if version(name)}))
"""


def output(python: str, *words: object) -> tuple[int, str]:
    """Runs a program; returns its exit code and what it printed."""
    done = subprocess.run([python, *map(str, words)], text=True, capture_output=True, cwd=ROOT, timeout=1800)
    return done.returncode, done.stdout + (done.stderr if done.returncode else "")


def of_models(python: str, backends: list[str]) -> dict[str, dict[str, str]]:
    """Returns the verdicts of models, by backend."""
    found: dict[str, dict[str, str]] = {}
    for model, flags in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
            words = [f"--model={model}", "--precision=float64", "--device_counts=1,2", "--max_steps=10", "--device=cpu"]
            words += [f"--backends={','.join(backends)}", f"--workdir={folder}"]
            _, text = output(python, "recipes/parity.py", *words, *flags)
        rows = re.findall(r"^(torch|jax|tensorflow) x \d float64 +(\(reference\)|\S+) +(\S+)", text, re.M)
        found[f"{model} in float64, on 1 and 2 devices"] = {
            backend: verdict([row[1:] for row in rows if row[0] == backend]) for backend in backends
        }
    return found


def verdict(rows: list[tuple[str, str]]) -> str:
    """Returns it of rows of parity's table: of a backend on one and on two devices."""
    if len(rows) < 2:
        return "**failed**"
    steps = [step for _, step in rows if step != "none"]
    apart = [float(value) for value, _ in rows if value != "(reference)"]
    return f"**differs** from step {steps[0]}" if steps else f"alike (to {max(apart):.0e})"


def of_programs(python: str, backends: list[str]) -> dict[str, dict[str, str]]:
    """Returns the verdicts of the programs in `upstream/`, by backend."""
    _, text = output(python, "upstream/verdicts.py", f"--backends={','.join(backends)}")
    lines = [line[2:-2] for line in text.splitlines() if line.endswith(" |") and "`" in line]
    return {name: dict(zip(backends, cells, strict=True)) for name, *cells in (line.split(" | ") for line in lines)}


def page(record: dict[str, dict]) -> str:
    """Returns docs/matrix.md."""
    lines = ["# What differs, and since when", ""]
    lines += ["What `python tests/matrix.py` found, by environment. An empty cell: not for that backend.", ""]
    for name, found in record.items():
        versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
        backends = found["backends"]
        lines += [f"## {name[0].upper()}{name[1:]}", ""]
        lines += [f"{versions}; {found['date']}, {found['seconds']:.0f} s on two CPU cores.", ""]
        lines += [f"| | {' | '.join(backends)} |", "|---|" + "---|" * len(backends)]
        for check, cells in found["rows"].items():
            said = (cells[backend] for backend in backends)
            lines.append(
                f"| {check} | {' | '.join(f'{what}, since {since}' if what else '' for what, since in said)} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Runs the checks, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the environment")
    parser.add_argument("--python", default=sys.executable, help="of the environment")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="a list")
    args = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    start, today, backends = time.time(), datetime.date.today().isoformat(), args.backends.split(",")
    versions = json.loads(output(args.python, "-c", _VERSIONS)[1].splitlines()[-1])
    rows = of_models(args.python, backends) | of_programs(args.python, backends)
    known = record.get(args.name, {}).get("rows", {})
    for check, cells in rows.items():
        for backend, said in cells.items():
            before = known.get(check, {}).get(backend, ["", today])
            kept = re.split("[(:]", before[0])[0] == re.split("[(:]", said)[0]  # whatever its numbers are
            cells[backend] = [said, before[1] if kept else today]
    record[args.name] = {
        "versions": versions, "date": today, "seconds": time.time() - start, "backends": backends, "rows": rows,
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(record))
    print(f"{PAGE.relative_to(ROOT)} and {RECORD.name}: {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
