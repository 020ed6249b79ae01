"""Writes the tables of docs/contributing/real-code.md from the results of `run.py`. The text before them stays.

python -m tests.real_code.table --out=runs/real_code
"""

import argparse
import collections
import importlib.metadata
import pathlib
import re
from collections.abc import Callable, Sequence

from tests.real_code.cases import OTHER_STEPS, REGISTRY, Steps, load_cases
from tests.real_code.run import ROOT, WAYS
from tests.real_code.verdicts import REASONS, Verdict, judge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--unsure", action="store_true", help="print the models that need float64, and write nothing")
    options = parser.parse_args()
    verdicts = judge(options.out, list(load_cases()))
    if options.unsure:
        print(",".join(unsure(verdicts)))
        return
    ends = refusals(verdicts), other_steps()
    write_page("real-code.md", summary(verdicts), verdicts, ("SGD", "Adam"), lambda verdict: [cell(verdict)], ends)


def unsure(verdicts: list[Verdict]) -> list[str]:
    """Models that differ in float32, and were not yet tried in float64."""
    return sorted({verdict.model for verdict in verdicts if verdict.word == "differs"})


def write_page(
    name: str,
    summary: str,
    verdicts: list[Verdict],
    columns: Sequence[str],
    cells_of: Callable[[Verdict], list[str]],
    ends: Sequence[str],
) -> None:
    """Writes a page of docs: its text with new counts and versions, a table for each kind of models, and the ends."""
    page = ROOT / "docs" / "contributing" / name
    head = page.read_text().partition("\n## ")[0]
    head = re.sub(r"\b\d+ models", f"{len({verdict.model for verdict in verdicts})} models", head, count=1)
    head = re.sub(r"^Versions: .*", lambda _: versions(), head, flags=re.M)
    head = re.sub(r"^Of \d+ .*", summary, head, flags=re.M)
    kinds: dict[str, dict[str, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for verdict in verdicts:
        kinds[REGISTRY[verdict.model].kind][verdict.model] += cells_of(verdict)
    parts = [head]
    for kind, rows in kinds.items():
        lines = [f"## {kind}", "", f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for model, cells in rows.items():
            lines.append(f"| {model.removeprefix('hub ').removeprefix('app ')} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    page.write_text("\n".join([*parts, *ends]))
    print(summary)


def versions() -> str:
    names = ("keras", "keras-hub", "torch", "jax", "tensorflow")
    return "Versions: " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names) + "."


def cell(verdict: Verdict) -> str:
    if verdict.word == "alike":
        return f"alike ({verdict.largest('float32'):.0e})"
    if verdict.word == "alike in float64":
        return f"alike in float64 ({verdict.largest('float64'):.0e})"
    if verdict.word == "refused":
        ways = [part.way.replace(":", " x ") for part in verdict.cells["float32"] if part.refusal]
        return "refused: " + ("all" if len(ways) == len(WAYS) else ", ".join(ways))
    return f"**{verdict.word}**"


def summary(verdicts: list[Verdict]) -> str:
    counts = collections.Counter(verdict.word for verdict in verdicts)
    return f"Of {len(verdicts)} rows: " + ", ".join(f"{count} {word}" for word, count in counts.most_common()) + "."


def refusals(verdicts: list[Verdict]) -> str:
    """What is refused, with which words, and why it cannot be."""
    lines = ["## What is refused", ""]
    for model, words in dict.fromkeys((verdict.model, words) for verdict in verdicts for words in verdict.refusals):
        reason = next((why for part, why in REASONS.items() if part in words), "no reason is written down")
        lines.append(f"- {model}: *{words}* {reason}")
    return "\n".join(lines if len(lines) > 2 else [*lines, "Nothing."]) + "\n"


def other_steps() -> str:
    """Which models train with other rates than the rest, and why."""
    lines = ["## Models with other learning rates", ""]
    rates = f"{Steps.sgd:g} (SGD) and {Steps.adam:g} (Adam, epsilon {Steps.epsilon:g})"
    lines.append(f"All models that are not listed here train with learning rates of {rates}.")
    lines.append("")
    for name, steps in OTHER_STEPS.items():
        rates = f"{steps.sgd:g} (SGD), {steps.adam:g} (Adam, epsilon {steps.epsilon:g})"
        lines.append(f"- {name}: {rates}. {steps.why}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
