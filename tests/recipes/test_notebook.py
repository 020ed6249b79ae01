"""The notebook runs on each backend, as a reader runs it: in a kernel, cell by cell."""

import re

import nbclient
import nbformat
import pytest

from tests.helpers import ROOT, environment

NOTEBOOK = ROOT / "recipes" / "notebook.ipynb"


def output_of(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.proof
def test_the_notebook_runs_on_two_devices(backend):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    env = environment(KERAS_BACKEND=backend, PYTHONPATH=str(ROOT))
    # Under this name ipykernel (7) leaves alone what native code and other processes print.
    env.pop("PYTEST_CURRENT_TEST")
    nbclient.NotebookClient(notebook, timeout=280).execute(env=env, cwd=str(NOTEBOOK.parent))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    launched, predicted, alone = (output_of(code[place]) for place in (3, 5, 6))
    assert launched.count(f"{backend} on 2 ") == 1  # what all processes print comes here
    assert launched.count("epoch 8/8") == 1
    assert float(re.search(r"test accuracy (\S+)", predicted)[1]) > 0.95
    assert float(re.search(r"differ by at most (\S+)", alone)[1]) < 1e-4
    assert any("image/png" in output.get("data", {}) for output in code[4].outputs)
