"""Fine-tuning: adapters learn the same everywhere, are resumed without the frozen weights, and leave a plain model."""

import importlib.util
import json

import keras
import numpy as np
import pytest

import kerasdp
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import frozen_weights
from tests.helpers import BACKENDS, ROOT, each_way, losses_in, results, run
from tests.programs import finetune

USUAL = {(BACKENDS[0], 1): ("plain",)}


def is_there(backend, count, case):
    """Not each choice is there on each backend; what is shared needs several devices."""
    in_parts = count > 1 and backend != "tensorflow"
    return in_parts or case != "together"


def outcome(backend, count, case):
    quick = USUAL.get((backend, count), ())
    others = [each for each in finetune.CASES if is_there(backend, count, each) and each not in quick]
    return results("finetune.py", backend, count, *(quick if case in quick else others))[case]


@each_way(finetune.CASES, lambda backend, count, case: case in USUAL.get((backend, count), ()), is_there=is_there)
def test_it_learns_the_same(backend, count, case, capsys):
    """Losses of 20 steps in float64 beside those of the first backend on one device; the program looks at the rest."""
    expected = outcome(BACKENDS[0], 1, "plain")
    found = outcome(backend, count, case)
    assert not isinstance(found, str), found
    assert found["diverged"] == [] and len(found["losses"]) == 24
    apart = np.abs(np.subtract(found["losses"], expected["losses"])).max()
    with capsys.disabled():
        print(f"\n{backend} x {count}, {case}: losses differ by at most {apart:.1e}")
    assert apart < 1e-9
    np.testing.assert_allclose(sorted(found["variables"]), sorted(expected["variables"]), rtol=1e-9, atol=1e-12)


def resumed(backend, count, *runs):
    """What runs give, one after the other in a process, each with its settings."""
    cases = [json.dumps(each) for each in runs]
    found = results("finetune.py", backend, count, *cases)
    return [found[case] for case in cases]


@pytest.mark.proof
def test_checkpoints_hold_what_trains_alone(backend, tmp_path):
    """They are small, are resumed elsewhere, and refused with other frozen weights, or others that train."""
    own = {"workdir": str(tmp_path / "own"), "checkpoint_weights": "trained", "optimizer": "SGD"}
    again = own | {"resume": True}
    whole = own | {"workdir": str(tmp_path / "whole"), "checkpoint_weights": "all"}
    begun, of_all, other, also, bare, kind = resumed(
        backend, 1, own | {"epochs": 1}, whole | {"epochs": 1}, again | {"shift": 1e-3},
        again | {"also_train": "hidden"}, whole | {"resume": True, "also_train": "hidden"},
        again | {"checkpoint_weights": "all"},
    )  # fmt: skip
    assert begun["losses"] == of_all["losses"] and begun["bytes"] < of_all["bytes"] / 3
    assert "differs from the run in the workdir in the frozen weights: expected" in other
    for refused in (also, bare):
        assert "differs from the run in the workdir in the weights that train" in refused
    assert "in checkpoint_weights: expected trained. Received: all" in kind
    with pytest.raises(UserError, match=r"has no frozen weights, because its run used .*kerasdp.export"):
        kerasdp.load_model(own["workdir"])
    elsewhere = BACKENDS[(BACKENDS.index(backend) + 1) % len(BACKENDS)]
    (straight,) = resumed(backend, 1, {"optimizer": "SGD"})
    (continued,) = resumed(elsewhere, 1, again)
    # Those before the stop are what the callback kept.
    assert continued["losses"][:20] == pytest.approx(straight["losses"][:20], rel=1e-9)


def adapted(*more):
    """A model whose adapters have learned something; `more` of its layers have some, too."""
    keras.utils.set_random_seed(1)
    model = finetune.build()
    finetune.add_adapters(model, 2)
    for name in more:
        model.get_layer(name).enable_lora(2, lora_alpha=3)
    for variable in model.trainable_variables:
        variable.assign(keras.random.normal(variable.shape))
    model.compile("adam", "mse")
    return model


TOKENS = np.arange(24).reshape(2, 12)


def test_what_is_exported_is_plain(tmp_path):
    """It computes what the model did, and all of it trains; the model itself stays as it was."""
    model = adapted("hidden", "words")
    expected, trained = model.predict(TOKENS, verbose=0), len(model.trainable_variables)
    for path in (str(tmp_path / "model.keras"), str(tmp_path / "model.weights.h5")):
        kerasdp.export(model, path)
        if path.endswith(".keras"):
            plain = keras.saving.load_model(path)
        else:
            plain = finetune.build()
            plain.load_weights(path)
        np.testing.assert_allclose(plain.predict(TOKENS, verbose=0), expected, rtol=1e-4, atol=1e-5)
        assert not [one.path for one in plain.variables if "lora" in one.path]
        assert {one.dtype for one in plain.weights} == {"float32"}
        assert len(plain.trainable_variables) > trained
    np.testing.assert_array_equal(model.predict(TOKENS, verbose=0), expected)
    assert len(model.trainable_variables) == trained and model.optimizer is not None


def test_what_trains():
    """Adapters of queries and values; of a model without attention those of each Dense but the last; no statistics."""
    model = adapted()
    assert sum(int(np.prod(one.shape)) for one in model.trainable_variables) == 320
    assert not model.get_layer("norm").trainable and len(frozen_weights(model)) == 15
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="one"), keras.layers.Dense(2, name="last")])
    finetune.add_adapters(plain, 1)
    assert [one.path.rpartition("/")[2] for one in plain.trainable_variables] == ["lora_kernel_a", "lora_kernel_b"]
    with pytest.raises(UserError, match=r"lora_rank: .* has no attention or hidden Dense layer"):
        finetune.add_adapters(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]), 2)


def tuned(folder, *flags, backend=BACKENDS[0], expected=0, **settings):
    flags = ("--device=cpu", f"--backend={backend}", "--lora_rank=2", "--log_every=1", *flags)
    program = settings.pop("program", ROOT / "recipes" / "finetune.py")
    done = run(program, *flags, backend=backend, cwd=folder, timeout=600, **settings)
    assert done.returncode == expected, done.stderr
    return done


@pytest.mark.proof
def test_the_model_of_the_recipe(tmp_path):
    """Two fits of a copy with few samples; resumed in the second on another backend; what it leaves is plain."""
    text = (ROOT / "recipes" / "finetune.py").read_text()
    (tmp_path / "finetune.py").write_text(text.replace("np.arange(part.num_samples)", "np.arange(96)"))
    own = {"program": "finetune.py", "PYTHONPATH": str(ROOT)}
    run_of = ("--workdir=run", "--checkpoint_weights=trained")
    tuned(tmp_path, *run_of, "--epochs=1", "--verbose=0", **own)
    flags = ("--epochs=2", "--resume", "--gpus=2")
    tuned(tmp_path, *run_of, *flags, backend=BACKENDS[-1], **own)
    straight = tuned(tmp_path, "--workdir=straight", "--epochs=2", **own)
    losses = [losses_in(tmp_path / name / "fit-2") for name in ("run", "straight")]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert "held out: accuracy" in straight.stdout
    report = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert report["after"]["loss"] < report["before"]["loss"]
    plain = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert plain.count_params() == 129_068 and not [one.path for one in plain.variables if "lora" in one.path]


DATA = """
import numpy as np
def texts():
    x = ["the quick fox", "fox .", "the brown fox jumped", "quick brown", "the .", "jumped the fox"] * 4
    y = np.array([1, 0, 1, 0, 1, 1] * 4)
    return (x, y), (x[:6], y[:6])
"""
PRESETS = """
import sys
from keras_hub import models
sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32, "max_sequence_length": 8}
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "brown", "fox", "jumped", "."]
before = models.BertTextClassifierPreprocessor(models.BertTokenizer(vocabulary=words), sequence_length=8)
backbone = models.BertBackbone(vocabulary_size=len(words), dropout=0.1, **sizes)
models.BertTextClassifier(backbone, num_classes=2, preprocessor=before).save_to_preset("bert")
"""


@pytest.mark.proof
@pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason="needs keras_hub")
def test_a_preset_of_keras_hub(tmp_path):
    """A classifier of texts learns alike on all backends; its file is plain."""
    (tmp_path / "mine.py").write_text(DATA)
    made = run("-c", PRESETS, cwd=tmp_path, KERAS_BACKEND=BACKENDS[0])
    assert made.returncode == 0, made.stderr
    found = {}
    for backend in BACKENDS:
        flags = ("--preset=bert", f"--dataset={tmp_path}/mine.py:texts", f"--workdir={backend}", "--gpus=2")
        flags += ("--batch_size=7", "--precision=float64", "--checkpoint_weights=trained")
        tuned(tmp_path, *flags, backend=backend)
        found[backend] = losses_in(tmp_path / backend)
        code = "import keras, keras_hub, sys; model = keras.saving.load_model(sys.argv[1]); "
        code += "assert not [one.path for one in model.variables if 'lora' in one.path]"
        loaded = run("-c", code, f"{backend}/model.keras", cwd=tmp_path, KERAS_BACKEND=backend)
        assert loaded.returncode == 0, loaded.stderr
    for losses in found.values():
        assert len(losses) == 16 and losses == pytest.approx(found[BACKENDS[0]], rel=1e-9)
