"""README's figures, and the ratios of the page on performance, are those that were recorded."""

import importlib.util
import re

import pytest
from PIL import Image

from tests.helpers import ROOT

RECORDED = (ROOT / "docs" / "contributing" / "gpu-figures.md").read_text()
# A model's name in the tables of the H100, and what the tables of the H200 call a program.
NAMES = {"Llama, LoRA": "llama", "Llama with LoRA": "llama", "LSTM tagger": "tagger", "EfficientNetV2": "efficientnet",
         "U-Net": "unet"}  # fmt: skip
OF_H200 = {
    "torch": ("kerasdp on torch, `--compile=on`", "torch.compile by hand", "Keras `fit` on torch"),
    "jax": ("kerasdp on jax", "jax by hand", "Keras `fit` on jax"),
}
OF_H100 = {"torch": (1, 2, 4), "jax": (5, 6, 7)}
# Keras' fit and the loop of this model were measured in another call, in which kerasdp took so long.
OTHER_CALL = {("llama", "torch", 4): 1.58}


def rows_of(text):
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("*") for cell in line] for line in lines if "---" not in line[0]]


def milliseconds(model, backend, gpu):
    """Of kerasdp, of the loop and of Keras' fit; None where a program was not measured."""
    section = RECORDED.partition(f"## One {gpu}")[2]
    rows = {row[0]: row for row in rows_of(section.partition("Peak memory" if gpu == "H100" else "Seconds to")[0])}
    if gpu == "H200":
        column = rows["program"].index(model)
        found = [rows[program][column] for program in OF_H200[backend]]
    else:
        found = [rows[NAMES.get(model, model.lower())][column] for column in OF_H100[backend]]
    return [None if cell == "-" else float(cell) for cell in found]


def test_the_table_of_the_readme():
    table = (ROOT / "README.md").read_text().partition("## Results")[2].partition("\n## ")[0]
    head, *rows = rows_of(table)
    assert head == ["small model", "backend", "GPU", "kerasdp", "loop", "Keras `fit`"] and 0 < len(rows) <= 6
    for model, backend, gpu, *values in rows:
        assert [float(value) for value in values] == milliseconds(model, backend, gpu), (model, backend)


def test_the_ratios_of_the_page():
    head, *rows = rows_of((ROOT / "docs" / "performance.md").read_text().partition("## Measured speeds")[2])
    columns = [(number, *re.match(r"(torch|jax|tensorflow) / .*?(loop|fit)`?$", name).groups())
               for number, name in enumerate(head) if number]  # fmt: skip
    of_gpus = [row for row in rows if row[0].endswith(("H100", "H200"))]
    assert len(of_gpus) == 8
    for row in of_gpus:
        model, _, gpu = row[0].rpartition(", ")
        for column, backend, other in columns:
            if backend == "tensorflow":
                assert row[column] == "-"
                continue
            own, loop, fit = milliseconds(model, backend, gpu)
            own = OTHER_CALL.get((NAMES.get(model), backend, 4), own) if other == "fit" else own
            recorded = loop if other == "loop" else fit
            if recorded is None:
                assert row[column] == "-", row
            else:
                assert float(row[column]) == pytest.approx(recorded / own, rel=0.006, abs=0.005), (row, head[column])


def test_the_chart_is_current():
    """If not: python docs/performance.py."""
    spec = importlib.util.spec_from_file_location("performance", ROOT / "docs" / "performance.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, rows = module.read((ROOT / "docs" / "performance.md").read_text())
    assert Image.open(ROOT / "docs" / "performance.png").text["Description"] == repr(rows)
