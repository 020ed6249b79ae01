"""Writes docs/strangers.md from the results of `tests.real_code.run --gallery=strangers`.

python -m tests.strangers.table --out=runs/strangers
"""

import argparse
import collections
import math
import pathlib

from tests.real_code.cases import BATCH, EPOCHS, ROWS, load_cases
from tests.real_code.run import ROOT
from tests.real_code.verdicts import FLOAT32, LEARNED, Cell, Verdict, judge

DOCUMENT = ROOT / "docs" / "strangers.md"
REQUIREMENTS = ROOT / "tests" / "strangers" / "requirements.txt"
# What makes more than that of round-off: a deep net with batch norm over nine rows (seen 1.5e-4; 2e-8 in float64), and
# flows (seen 2e-5).
ROUND_OFF = {"kimm LCNet035": 2e-4, "bayesflow CouplingFlow": 5e-5}
LIMITS = ", ".join(f"{name}: {limit:g}" for name, limit in ROUND_OFF.items())
STEPS = EPOCHS * math.ceil(ROWS / BATCH)

HEAD = f"""# Packages, and code that keeps state

{{models}} models: layers and networks of packages from PyPI; layers, losses and metrics that keep something between the
batches; callbacks, data sets, optimizers and wrappers. Each is trained for {STEPS} steps of {BATCH} rows by Keras' own
`fit`, and by kerasdp on one and on two virtual CPU devices, on torch, jax and tensorflow, from the same weights.

**alike**: the logs of all steps, metrics too, are within {FLOAT32:g} ({LIMITS}) of those of
Keras' own `fit` on that backend,
relative, and the way that the weights went is the same within {LEARNED["float32"]:.0%}. What draws random numbers is
compared with kerasdp on one device of torch: Keras draws others on each backend, and takes the first batch of a
PyDataset, and the end of an epoch, once more than there are. **refused**: the run ends with a line,
at the end of this page, before its first step; what trains without that check (`check="off"`) is said there.
**differs**, **error**: a fault, of this project or of the model. **-**: Keras' own `fit` cannot train it on this
backend, or kerasdp was not tried.

{{summary}}

    python -m pip install --no-deps -r tests/strangers/requirements.txt    # in an environment of its own
    python -m tests.real_code.run --gallery=strangers --out=runs/strangers
    python -m tests.strangers.table --out=runs/strangers                   # writes this page

The packages: {{packages}}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    verdicts = judged(options.out)
    DOCUMENT.write_text(document(verdicts))
    print(summary(verdicts))


def judged(out: pathlib.Path) -> list[Verdict]:
    cases = load_cases("strangers")
    draws = frozenset(name for name, each in cases.items() if each.draws)
    verdicts = judge(out, list(cases), "strangers", draws)
    for verdict in verdicts:
        for cell in verdict.cells["float32"]:
            cell.limit = ROUND_OFF.get(verdict.model, FLOAT32)
    return verdicts


def tried(verdict: Verdict) -> list[Cell]:
    """The ways in which it was trained, or would not be."""
    return [cell for cell in verdict.cells["float32"] if cell.result]


def word(cell: Cell) -> str:
    if cell.refusal:
        return "refused"
    if cell.error:
        return "error"
    return "alike" if cell.alike else "differs"


def document(verdicts: list[Verdict]) -> str:
    cases, ways = load_cases("strangers"), ["torch:1", "torch:2", "jax:1", "jax:2", "tensorflow:1", "tensorflow:2"]
    packages = ", ".join(REQUIREMENTS.read_text().split())
    parts = [HEAD.format(models=len(verdicts), summary=summary(verdicts), packages=packages)]
    by_kind: dict[str, list[Verdict]] = collections.defaultdict(list)
    for verdict in verdicts:
        by_kind[cases[verdict.model].kind].append(verdict)
    for kind, group in by_kind.items():
        lines = [f"## {kind}", "", f"| model | {' | '.join(way.replace(':', ' x ') for way in ways)} |"]
        lines.append("|---" * (len(ways) + 1) + "|")
        for verdict in group:
            words = {cell.way: word(cell) for cell in tried(verdict)}
            lines.append(f"| {verdict.model} | {' | '.join(words.get(way, '-') for way in ways)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, reasons(verdicts)])


def summary(verdicts: list[Verdict]) -> str:
    counts = collections.Counter(word(cell) for verdict in verdicts for cell in tried(verdict))
    words = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return f"Of {counts.total()} trainings by kerasdp: {words}."


def reasons(verdicts: list[Verdict]) -> str:
    """What is refused or fails, with which words, and what is trained without the check."""
    lines = ["## What is not alike", ""]
    for verdict in verdicts:
        for cell in tried(verdict):
            if word(cell) != "alike":
                lines.append(f"- {verdict.model}, {cell.way.replace(':', ' x ')}: {reason(cell)}")
    return "\n".join(lines if len(lines) > 2 else [*lines, "Nothing."]) + "\n"


def reason(cell: Cell) -> str:
    if cell.error:
        return f"*{cell.error}*"
    apart = f"logs {cell.losses:.0e} apart, weights {cell.learned:.0e}"
    if not cell.refusal:
        return apart if cell.same_start else f"{apart}, from other initial weights"
    if not cell.unchecked:
        return f"*{cell.refusal}* Without the check it was not tried."
    if "losses" not in cell.unchecked:
        return f"*{cell.refusal}* Without the check: *{cell.unchecked.get('refused') or cell.unchecked['error']}*"
    if cell.alike:
        return f"*{cell.refusal}* **Without the check it trains alike.**"
    return f"*{cell.refusal}* Without the check: {apart}."


if __name__ == "__main__":
    main()
