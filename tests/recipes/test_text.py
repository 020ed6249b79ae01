"""The recipe for text: it refuses what it has no use for, and its padding counts for nothing."""

import os
import re
import shutil

import pytest

from tests.helpers import BACKENDS, ROOT, run


def test_a_copy_refuses_what_it_has_no_use_for(tmp_path):
    """In an empty folder."""
    shutil.copy(ROOT / "recipes" / "text.py", tmp_path)
    refused = run("text.py", "--model=resnet18", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert refused.returncode == 2
    assert re.fullmatch(r"error: --model has no effect here: this recipe has its own, or none\n", refused.stderr)


@pytest.mark.proof
def test_padding_counts_for_nothing():
    """The same paragraphs, padded to 64 and to 128: the same loss and accuracy."""
    code = (
        "import kerasdp, text\n"
        "def train(runner):\n"
        "    import keras\n"
        "    _, part, count = text.paragraphs()\n"
        "    part = [each for each in part if len(each) < 60][:3]\n"
        "    with runner.scope():\n"
        "        model = text.build(count)\n"
        "        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)\n"
        "        model.compile(loss=loss, metrics=['accuracy'])\n"
        "    for length in (64, 128):\n"
        "        sequences, targets = [each[:-1] for each in part], [each[1:] for each in part]\n"
        "        data = kerasdp.Buckets(sequences, targets, lengths=[length], batch_size=3)\n"
        "        found = runner.evaluate(model, data, return_dict=True)\n"
        "        print('FOUND', found['loss'], found['accuracy'])\n"
        f"kerasdp.launch(train, backend={BACKENDS[0]!r}, num_devices=1, device='cpu', verbose=0)\n"
    )
    done = run("-c", code, backend=None, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'recipes'}")
    assert done.returncode == 0, done.stderr
    short, long = (list(map(float, line.split()[1:])) for line in done.stdout.splitlines() if line.startswith("FOUND"))
    assert long == pytest.approx(short, rel=1e-6)
