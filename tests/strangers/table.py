"""Writes the tables of docs/contributing/strangers.md from the results of `tests.real_code.run --gallery=strangers`.

python -m tests.strangers.table --out=runs/strangers
"""

import argparse
import collections
import pathlib

from tests.real_code.cases import load_cases
from tests.real_code.table import write_page
from tests.real_code.verdicts import FLOAT32, Cell, Verdict, judge

# What makes more than that of round-off: a deep net with batch norm over nine rows (seen 1.5e-4; 2e-8 in float64), and
# flows (seen 2e-5).
ROUND_OFF = {"kimm LCNet035": 2e-4, "bayesflow CouplingFlow": 5e-5}
WAYS = ("torch:1", "torch:2", "jax:1", "jax:2", "tensorflow:1", "tensorflow:2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    verdicts = judged(parser.parse_args().out)
    columns = [way.replace(":", " x ") for way in WAYS]
    write_page("strangers.md", summary(verdicts), verdicts, columns, words_of, [reasons(verdicts)])


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


def words_of(verdict: Verdict) -> list[str]:
    words = {cell.way: word(cell) for cell in tried(verdict)}
    return [words.get(way, "-") for way in WAYS]


def summary(verdicts: list[Verdict]) -> str:
    counts = collections.Counter(word(cell) for verdict in verdicts for cell in tried(verdict))
    words = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return f"Of {counts.total()} trainings by kerasdp: {words}."


def reasons(verdicts: list[Verdict]) -> str:
    """What is refused or fails, with which words, and what is trained without the check."""
    lines, ways = ["## What is refused", ""], collections.defaultdict(list)
    for verdict in verdicts:
        for cell in tried(verdict):
            if word(cell) != "alike":
                ways[verdict.model, reason(cell)].append(cell.way.replace(":", " x "))
    lines += [f"- {model}, {', '.join(names)}: {text}" for (model, text), names in ways.items()]
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
