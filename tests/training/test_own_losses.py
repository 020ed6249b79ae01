"""Usual losses in loops and steps of one's own are those of one device on several, or are refused with the cure."""

import functools
import re

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, ROOT, result_of, run

# In the default suite.
SHORT = ("texts", "texts_with_drawn_masks", "right_texts_of_all")
SPLIT = [name for name in ("torch", "tensorflow") if name in BACKENDS]


@functools.cache
def outcomes(backend, count, *names):
    return result_of(run(PROGRAMS / "own_losses.py", backend, count, *names, backend=backend, timeout=800))


def wrong_refusals(found):
    """The cases that are refused though they are means, or trained though they are none, or refused in other words."""
    refused = {name: words for name, words in found.items() if isinstance(words, str)}
    others = [name for name in found if (name in refused) == ("right" in name)]
    return others + [f"{name}: {words}" for name, words in refused.items() if "kerasdp.all_rows" not in words]


@pytest.mark.skipif(not SPLIT, reason="one program on jax")
def test_short():
    found = outcomes(SPLIT[0], 2, *SHORT)
    assert len(found) == 2 * len(SHORT) and wrong_refusals(found) == []
    assert "first in the gradient of" in found["looped texts"] and "own_losses.py:" in found["looped texts"]


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", SPLIT)
def test_all(backend):
    """In float64, 6 steps, the last batch of an epoch uneven."""
    found, expected = outcomes(backend, 2), outcomes(BACKENDS[0], 1)
    # What one device refuses, too: torch (2.13) traces no CTC loss in a loop of one's own.
    found = {name: losses for name, losses in found.items() if not isinstance(expected[name], str)}
    assert len(found) >= 60 and wrong_refusals(found) == []
    for name, losses in found.items():
        if not isinstance(losses, str):
            np.testing.assert_allclose(losses, expected[name], rtol=1e-9, err_msg=name)


def test_the_loss_of_the_page(tmp_path):
    """The masked loss of `docs/own-loops.md`, run as it stands there, on two devices and on one."""
    page = (ROOT / "docs" / "own-loops.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "of the words that count" in code]
    found = []
    for count in (1, 2):
        program = tmp_path / f"masked_{count}.py"
        program.write_text(code.replace("num_devices=2", f'num_devices={count}, device="cpu", verbose=0'))
        done = run(program, backend=BACKENDS[0])
        found.append([float(number) for number in re.findall(r"\d\.\d+", done.stdout)])
    assert len(found[0]) == 8
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
