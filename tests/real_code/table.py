"""Writes docs/real-code.md from the results of `run.py`.

python -m tests.real_code.table --out=runs/real_code
"""

import argparse
import collections
import importlib.metadata
import math
import pathlib

from tests.real_code.cases import BATCH, EPOCHS, OTHER_STEPS, ROWS, Steps, load_cases
from tests.real_code.run import ROOT, WAYS
from tests.real_code.verdicts import FLOAT32, FLOAT64, LEARNED, REASONS, Verdict, judge

DOCUMENT = ROOT / "docs" / "real-code.md"
STEPS = EPOCHS * math.ceil(ROWS / BATCH)

HEAD = f"""# Code that nobody here wrote

Do models that people have train alike? {{models}} models: KerasHub's, tiny and without weights; every family of
keras.applications; and models in the manner of keras.io's examples. Each is trained for {STEPS} steps of {BATCH} rows,
which two devices cannot share evenly, with dropout on, by SGD with momentum and by Adam: on torch, jax and tensorflow,
each on one and on two virtual CPU devices. Torch on one device is what the others are compared with.

{{versions}}

**alike**: initial weights are equal bit by bit, all losses are within {FLOAT32:g} of the reference's, relative, and the
way that the weights went is the same within {LEARNED["float32"]:.0%}; so is that of batch norm's statistics.
**alike in float64**: round-off grew beyond that (batch norm over nine rows, Adam's division); in float64, where only a
mistake is left, the losses are within {FLOAT64:g}, and the ways within {LEARNED["float64"]:g}. **refused**: the run
ends before its first step, with the words at the end of this page.

{{summary}}

    pip install --no-deps keras-hub==0.32.0 && pip install kagglehub regex sentencepiece tokenizers
    python -m tests.real_code.run --out=runs/real_code        # all ways, two processes at a time
    unsure="$(python -m tests.real_code.table --out=runs/real_code --unsure)"
    python -m tests.real_code.run --out=runs/real_code --precision=float64 --models="$unsure"
    python -m tests.real_code.table --out=runs/real_code      # writes this page

Tokenizers, and the preprocessors that need them, are not part of this: with `--no-deps` KerasHub comes without
tensorflow-text. This page is generated; `python -m pytest -m proof -n 0 tests/real_code` runs all of it and judges.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--unsure", action="store_true", help="print the models that need float64, and write nothing")
    options = parser.parse_args()
    verdicts = judge(options.out, list(load_cases()))
    if options.unsure:
        print(",".join(unsure(verdicts)))
        return
    DOCUMENT.write_text(document(verdicts))
    print(summary(verdicts))


def unsure(verdicts: list[Verdict]) -> list[str]:
    """Models that differ in float32, and were not yet tried in float64."""
    return sorted({verdict.model for verdict in verdicts if verdict.word == "differs"})


def document(verdicts: list[Verdict]) -> str:
    names = ("keras", "keras-hub", "torch", "jax", "tensorflow")
    versions = "Versions: " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names) + "."
    count = len({verdict.model for verdict in verdicts})
    parts = [HEAD.format(models=count, versions=versions, summary=summary(verdicts))]
    by_kind: dict[str, list[Verdict]] = collections.defaultdict(list)
    cases = load_cases()
    for verdict in verdicts:
        by_kind[cases[verdict.model].kind].append(verdict)
    for kind, group in by_kind.items():
        lines = [f"## {kind}", "", "| model | SGD | Adam |", "|---|---|---|"]
        for name in dict.fromkeys(verdict.model for verdict in group):
            cells = [cell(verdict) for verdict in group if verdict.model == name]
            lines.append(f"| {name.removeprefix('hub ').removeprefix('app ')} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    parts += [refusals(verdicts), other_steps()]
    return "\n".join(parts)


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
    lines = ["## Who takes other steps", ""]
    lines.append(
        f"All others train with rates of {Steps.sgd:g} (SGD) and {Steps.adam:g} (Adam, epsilon {Steps.epsilon:g})."
    )
    lines.append("")
    for name, steps in OTHER_STEPS.items():
        rates = f"{steps.sgd:g} (SGD), {steps.adam:g} (Adam, epsilon {steps.epsilon:g})"
        lines.append(f"- {name}: {rates}. {steps.why}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
