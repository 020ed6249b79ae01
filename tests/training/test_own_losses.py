"""Usual losses in custom loops and steps are those of one device on several, or are refused with the cure."""

import re
import textwrap

import numpy as np
import pytest

from tests.helpers import BACKENDS, ROOT, results, run

# In the default suite.
SHORT = ("looped texts", "looped contrastive", "looped right_texts_of_all", "fitted sum_of_rows")
SPLIT = [name for name in ("torch", "tensorflow") if name in BACKENDS]


def wrong_refusals(found):
    """The cases that are refused though they are means, or trained though they are none, or refused in other words."""
    refused = {name: words for name, words in found.items() if isinstance(words, str)}
    others = [name for name in found if (name in refused) == ("right" in name)]
    return others + [f"{name}: {words}" for name, words in refused.items() if "kerasdp.all_rows" not in words]


@pytest.mark.skipif(not SPLIT, reason="one program on jax")
def test_short():
    found = results("own_losses.py", SPLIT[0], 2, *SHORT)
    assert len(found) == len(SHORT) and wrong_refusals(found) == []
    assert "first in the gradient of" in found["looped texts"] and "own_losses.py:" in found["looped texts"]
    assert found["fitted sum_of_rows"].startswith(
        "train_step of Network computes different values for a split batch than for the whole batch, "
        "first in the gradient of"
    )


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", SPLIT)
def test_all(backend):
    """In float64, 6 steps, the last batch of an epoch uneven."""
    found, expected = results("own_losses.py", backend, 2), results("own_losses.py", BACKENDS[0], 1)
    assert len(found) == 26 and wrong_refusals(found) == []
    for name, losses in found.items():
        if not isinstance(losses, str):
            np.testing.assert_allclose(losses, expected[name], rtol=1e-9, err_msg=name)


MASKED = """
import keras
import numpy as np
from keras import ops

import kerasdp


def train(runner):
    with runner.scope():
        model = keras.Sequential(
            [keras.Input((12,), dtype="int32"), keras.layers.Embedding(22, 8), keras.layers.Dense(21)]
        )
        optimizer, seeds = keras.optimizers.Adam(0.01), keras.random.SeedGenerator(1)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    @runner.step
    def train_step(tokens):
        mask = ops.cast(keras.random.uniform(ops.shape(tokens), seed=seeds) < 0.15, "float32")
        masked_tokens = ops.where(mask > 0, 21, tokens)

        def forward():
            LINES
            return loss

        loss, gradients = kerasdp.value_and_grad(forward, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss}

    tokens = np.random.default_rng(0).integers(1, 20, (256, 12)).astype("int32")
    return [float(train_step(batch)["loss"]) for batch in runner.batches(tokens, batch_size=64, epochs=2)]


print(kerasdp.launch(train, num_devices=COUNT, device="cpu", verbose=0))
"""


@pytest.mark.proof
def test_the_loss_of_the_page(tmp_path):
    """The masked loss of `docs/custom-loops.md`, its lines in a program, on two devices and on one."""
    page = (ROOT / "docs" / "custom-loops.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "masked tokens per row" in code]
    lines = textwrap.indent(code.rstrip(), " " * 12).lstrip()
    found = []
    for count in (1, 2):
        program = tmp_path / f"masked_{count}.py"
        program.write_text(MASKED.replace("LINES", lines).replace("COUNT", str(count)))
        done = run(program, backend=BACKENDS[0])
        found.append([float(number) for number in re.findall(r"\d\.\d+", done.stdout)])
    assert len(found[0]) == 8
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
