"""The recipe for transfer learning: two fits, batch norm in inference mode, resumed in the second."""

import shutil

import numpy as np
import pytest
from PIL import Image

from kerasdp.errors import UserError
from tests.helpers import BACKENDS, ROOT, losses_in, run

SHORT = (
    "--device=cpu",
    "--dataset=images(size=(32,32))",
    "--batch_size=8",
    "--head_epochs=1",
    "--log_every=1",
    "--verbose=0",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Images of many sizes in two classes, and weights of a backbone with statistics that are not those of a start."""
    folder, random = tmp_path_factory.mktemp("transfer"), np.random.RandomState(0)
    for label, name in enumerate(("dark", "light")):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = random.rand(*random.randint(30, 90, 2), 3) * 100 + 120 * label
            Image.fromarray(pixels.astype("uint8")).save(folder / "photos" / name / f"{number}.png")
    code = (
        "import keras\n"
        "model = keras.applications.MobileNetV2(include_top=False, weights=None, input_shape=(32, 32, 3))\n"
        "keras.utils.set_random_seed(1)\n"
        "for weight in model.weights:\n"
        "    if 'moving_mean' in weight.path:\n"
        "        weight.assign(keras.random.normal(weight.shape, stddev=0.1))\n"
        f"model.save_weights({str(folder / 'backbone.weights.h5')!r})\n"
    )
    done = run("-c", code, KERAS_BACKEND=BACKENDS[0])
    assert done.returncode == 0, done.stderr
    return folder


def transferred(files, backend, workdir, *flags, program="recipes/transfer.py", **settings):
    given = (f"--data_dir={files}/photos", f"--weights={files}/backbone.weights.h5", f"--workdir={workdir}")
    done = run(program, *SHORT, *given, f"--backend={backend}", *flags, backend=backend, timeout=600, **settings)
    assert done.returncode == 0, done.stderr
    return [losses_in(folder) for folder in (workdir, workdir / "fit-2")]


@pytest.mark.proof
def test_the_same_losses_everywhere_and_after_a_resume(files, tmp_path):
    """In both fits; a copy in an empty folder is stopped after the first epoch of the second fit, and resumed."""
    shutil.copy(ROOT / "recipes" / "transfer.py", tmp_path)
    expected = None
    for backend in BACKENDS:
        folder = tmp_path / backend
        found = transferred(files, backend, folder, "--gpus=2", "--epochs=2")
        expected = expected or found
        assert [len(losses) for losses in found] == [4, 8]
        for some, others in zip(found, expected, strict=True):
            assert some == pytest.approx(others, rel=1e-4), backend
    resumed = tmp_path / "resumed"
    settings = {"program": "transfer.py", "cwd": tmp_path, "PYTHONPATH": str(ROOT)}
    transferred(files, BACKENDS[0], resumed, "--epochs=1", **settings)
    again = transferred(files, BACKENDS[-1], resumed, "--epochs=2", "--resume", **settings)
    assert again[1] == pytest.approx(expected[1], rel=1e-4)
    check_batch_norm(files, tmp_path / BACKENDS[0] / "model.keras")


def check_batch_norm(files, path):
    """Its statistics are those of the file, after all training; other weights of the backbone have changed."""
    code = (
        "import keras, numpy as np\n"
        f"trained = keras.saving.load_model({str(path)!r}, compile=False)\n"
        "(trained,) = [layer for layer in trained.layers if isinstance(layer, keras.Model)]\n"
        "given = keras.applications.MobileNetV2(include_top=False, weights=None, input_shape=(32, 32, 3))\n"
        f"given.load_weights({str(files / 'backbone.weights.h5')!r})\n"
        "for own, other in zip(trained.weights, given.weights):\n"
        "    same = np.array_equal(*map(keras.ops.convert_to_numpy, (own, other)))\n"
        "    print(own.path.rpartition('/')[2], same)\n"
    )
    done = run("-c", code, KERAS_BACKEND=BACKENDS[0])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[1] for line in lines if line.startswith("moving_")} == {"True"}
    assert "kernel False" in lines


@pytest.mark.parametrize(
    ("name", "weights", "words"),
    [
        ("MobileNet9", "none", "--backbone: expected one of ConvNeXtBase, .* Received: 'MobileNet9'"),
        ("MobileNetV2", "nowhere.h5", "--weights=nowhere.h5 cannot be loaded .* the path to the weights file"),
        ("VGG16", "none", r"--backbone: VGG16 with --weights=none cannot be loaded for images of shape \(8, 8, 3\)"),
    ],
)
def test_a_backbone_that_cannot_be_had(name, weights, words):
    from kerasdp import load_backbone

    with pytest.raises(UserError, match=words):
        load_backbone(name, weights, (8, 8, 3))
