"""Models that nobody here wrote train alike in six ways, or are refused in a line.

`python -m pytest -m proof -n 0 -s tests/real_code`; REAL_CODE_OUT=FOLDER keeps the results, or judges those there are.
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
def out(tmp_path_factory) -> pathlib.Path:
    pytest.importorskip("keras_hub")
    folder = pathlib.Path(os.environ.get("REAL_CODE_OUT") or tmp_path_factory.mktemp("real_code"))
    program("run", f"--out={folder}")
    unsure = program("table", f"--out={folder}", "--unsure").strip()
    if unsure:
        program("run", f"--out={folder}", "--precision=float64", f"--models={unsure}")
    return folder


def program(name, *arguments) -> str:
    command = [sys.executable, "-m", f"tests.real_code.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


@pytest.mark.timeout(7200)
def test_all_models(out, monkeypatch):
    from tests.real_code.cases import load_cases
    from tests.real_code.table import summary
    from tests.real_code.verdicts import REASONS, judge

    verdicts = judge(out, list(load_cases()))
    print(summary(verdicts))
    assert len({verdict.model for verdict in verdicts}) >= 80
    wrong = [verdict for verdict in verdicts if verdict.word not in ("alike", "alike in float64", "refused")]
    assert not wrong, "\n".join(str(verdict) for verdict in wrong)
    refused = [verdict for verdict in verdicts if verdict.word == "refused"]
    assert len(refused) <= 0.05 * len(verdicts), [verdict.model for verdict in refused]
    for verdict in refused:
        for words in verdict.refusals:
            assert "\n" not in words and any(part in words for part in REASONS), words
