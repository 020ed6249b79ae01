"""The recipe for text: bucketed and masked, alike on all backends and device counts, resumed in the middle."""

import os
import re
import shutil

import pytest

from tests.helpers import BACKENDS, ROOT, losses_in, run

FLAGS = ("--device=cpu", "--batch_size=8", "--epochs=1", "--log_every=1", "--verbose=0")
WAYS = [(name, count) for name in BACKENDS for count in (1, 2)]


def trained(backend, count, workdir, *flags, **settings):
    program = settings.pop("program", "recipes/text.py")
    ways = (f"--backend={backend}", f"--gpus={count}", f"--workdir={workdir}")
    done = run(program, *FLAGS, *ways, *flags, backend=backend, timeout=500, **settings)
    assert done.returncode == 0, done.stderr
    return losses_in(workdir)


@pytest.mark.proof
def test_the_same_losses_everywhere_and_after_a_resume(tmp_path):
    """Largest relative difference over the backends on 1 and 2 devices in 6 steps of Adam: seen 3e-7."""
    expected = trained(*WAYS[0], tmp_path / "first", "--max_steps=6")
    assert len(expected) == 6 and expected[-1] < expected[0]
    for backend, count in WAYS[1:]:
        found = trained(backend, count, tmp_path / f"{backend}{count}", "--max_steps=6")
        assert found == pytest.approx(expected, rel=1e-5), (backend, count)
    for backend in BACKENDS:
        folder = tmp_path / f"resumed-{backend}"
        trained(backend, 1, folder, "--max_steps=3")
        assert trained(BACKENDS[0], 2, folder, "--max_steps=6", "--resume") == pytest.approx(expected, rel=1e-5)


def test_a_copy_learns_and_refuses_what_it_has_no_use_for(tmp_path):
    """In an empty folder, on one backend; two steps."""
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
