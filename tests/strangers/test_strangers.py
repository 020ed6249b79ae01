"""Models of packages, and code that keeps state, train as in Keras' own fit on one and two devices, or are refused.

`python -m pytest -m proof -n 0 -s tests/strangers`; STRANGERS_OUT=FOLDER keeps the results, or judges those there are.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers import BACKENDS, ROOT

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(len(BACKENDS) < 3, reason="needs torch, jax and tensorflow"),
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    for package in ("keras_rs", "keras_proba", "kimm", "scikeras"):
        pytest.importorskip(package)
    from tests.strangers.table import judged

    out = pathlib.Path(os.environ.get("STRANGERS_OUT") or tmp_path_factory.mktemp("strangers"))
    command = [sys.executable, "-m", "tests.real_code.run", "--gallery=strangers", f"--out={out}"]
    subprocess.run(command, cwd=ROOT, check=True)
    return judged(out)


@pytest.mark.timeout(7200)
def test_all_models_train_as_in_keras_or_are_refused(verdicts):
    from tests.strangers.table import summary, tried, word

    print(summary(verdicts))
    assert len([verdict for verdict in verdicts if tried(verdict)]) >= 40
    wrong = [
        f"{verdict.model}, {cell.way}: {word(cell)}: {cell.error or cell.losses}"
        for verdict in verdicts
        for cell in tried(verdict)
        if word(cell) not in ("alike", "refused")
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_refused_would_train_otherwise(verdicts):
    """A refusal whose training without the check is alike was not needed."""
    from tests.strangers.table import tried

    cells = [(verdict.model, cell) for verdict in verdicts for cell in tried(verdict) if cell.refusal]
    assert cells
    assert not [f"{model}, {cell.way}: {cell.refusal}" for model, cell in cells if cell.alike]
    assert not [f"{model}, {cell.way}: {cell.refusal}" for model, cell in cells if "\n" in cell.refusal]
