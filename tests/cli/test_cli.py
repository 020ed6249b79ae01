"""Flags become a Config; whatever is wrong with them is one line."""

import contextlib
import dataclasses
import pathlib
import re

import pytest

import kerasdp
from kerasdp.cli.main import CHOICES, RECIPES, parse, parse_recipe, recipe
from kerasdp.config import BACKENDS, Config
from kerasdp.errors import PreemptedError, UserError
from kerasdp.processes.devices import is_installed

FLAGFILES = sorted((pathlib.Path(__file__).parents[2] / "flags").glob("*.flags"))
SWITCHES = [choice.name for choice in CHOICES if bool in choice.kinds]


def parse_training(*flags):
    return parse(["train.py", *flags])


def test_defaults_are_those_of_the_config():
    settings = parse_training()
    assert settings.workdir.startswith("runs/")
    assert dataclasses.replace(settings, workdir=None) == Config()


def test_flags_and_flagfile(tmp_path):
    file = tmp_path / "some.flags"
    file.write_text("# a comment\n--epochs=3\n--gpus=2\n--optimizer=sgd(momentum=0.9)\n")
    flags = ("--epochs=4", "--learning_rate=0.5", "--workdir=w", "--tracker=tensorboard")
    settings = parse_training(f"--flagfile={file}", *flags)
    assert (settings.epochs, settings.num_devices, settings.optimizer) == (4, 2, "sgd(momentum=0.9)")
    assert (settings.learning_rate, settings.workdir, settings.tracker) == (0.5, "w", "tensorboard")


def test_devices_is_another_name_of_gpus(tmp_path):
    file = tmp_path / "some.flags"
    file.write_text("--gpus=2\n")
    assert parse_training("--devices=4").num_devices == 4
    assert parse_training(f"--flagfile={file}", "--devices=4").num_devices == 4
    with pytest.raises(UserError, match="has no effect here: use --backends and --device_counts"):
        parse_recipe("parity", ["parity.py", "--devices=4"])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--nosuch=1", "there is no flag --nosuch. --help lists all flags"),
        ("--learning_rate=fast", "--learning_rate: expected a number above 0. Received: 'fast'"),
        ("--num_devices=2", "there is no flag --num_devices; did you mean --gpus? --help lists all flags"),
        ("--lr=0.1", "there is no flag --lr. --help lists all flags"),
        ("--batchsize=3", "did you mean --batch_size?"),
        ("--num_epochs=3", "did you mean --epochs?"),
        ("--flagfil=3", "did you mean --flagfile?"),
        ("--flagfile=/nowhere/none.flags", "none.flags"),
        ("stray", "expected flags only. Received: 'stray'"),
        ("--resume", "add --workdir=FOLDER"),
    ],
)
def test_wrong_flags(flag, words):
    with pytest.raises(UserError) as caught:
        parse_training(flag)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def help_of(name, capsys):
    """The text of `--help`, and the flags that it lists."""
    with pytest.raises(SystemExit) as stopped:
        parse_recipe(name, [f"recipes/{name}.py", "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    lists = re.findall(r"^  (--[^:]*): ", text, re.M)
    return text, [name.removeprefix("--") for names in lists for name in names.split(", ")]


@pytest.mark.short("train", "parity", "predict")
@pytest.mark.parametrize("name", RECIPES)
def test_help_names_the_flags_of_the_recipe_in_groups(name, capsys):
    """Those that it takes, each once; any other is refused."""
    text, listed = help_of(name, capsys)
    assert text.startswith(f"usage: python recipes/{name}.py [")
    assert sorted(listed) == sorted(RECIPES[name].flags()) and len(listed) == len(set(listed))
    for choice in RECIPES[name].choices():
        assert f"\n{choice.group}:\n" in text
    assert max(map(len, text.splitlines())) <= 100
    for flag in {flag for choice in CHOICES for flag in choice.flags} - set(listed):
        with pytest.raises(UserError, match=f"--{flag} has no effect here: .* "):
            parse_recipe(name, ["", f"--{flag}=1" if flag not in SWITCHES else f"--{flag}"])


def test_help_shows_the_defaults_of_the_recipe(capsys):
    text, _ = help_of("from_scratch", capsys)
    assert "Default: 48." in text and "Default: 0.05." in text and "Default: 0." in text
    assert not re.search(r"Default: (None|False|)\.", text)
    with pytest.raises(SystemExit):
        parse(["text.py", "--help"], {"optimizer": "adam", "batch_size": 32}, ["model"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--optimizer: Any Keras optimizer: adam, 'sgd(momentum=0.9)', ... Default: adam." in text
    assert "--batch_size: Samples per step over all devices: the global batch. Default: 32." in text
    assert "--model:" not in text


def test_recipes_name_fields():
    """Of choices that there are, each once: a misspelled one would refuse or take nothing."""
    fields = {choice.name for choice in CHOICES}
    for known in RECIPES.values():
        refused = [name for names in known.refused.values() for name in names]
        assert {*known.own, *known.takes, *known.defaults} <= fields
        assert set(refused) <= {field.name for field in dataclasses.fields(Config)} and len(refused) == len({*refused})
    assert recipe("train", unused=["gpus"]).reason_against("num_devices") == "this recipe has its own, or none"


@pytest.mark.parametrize("file", FLAGFILES, ids=lambda file: file.stem)
def test_flagfiles(file):
    """Each parses, and its header tells the command, the expected result and time, and where they were measured."""
    recipe = {"pipeline": "pipeline", "lesson": "from_scratch"}.get(file.stem.partition("_")[0], "train")
    assert parse_recipe(recipe, ["", f"--flagfile={file}"])
    header = " ".join(line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#"))
    for word in (f"python recipes/{recipe}.py --flagfile=flags/{file.name}", "Expected:", "Measured on:"):
        assert word in header


INSTALLED = next(name for name in BACKENDS if is_installed(name))


@pytest.mark.parametrize(
    ("name", "flags", "choices", "others"),
    [
        ("parity", ["--model=convnet"], {"model": "convnet"}, [None, [1, 2, 4]]),
        ("parity", [f"--backends={INSTALLED}", "--device_counts=1, 3"], {}, [[INSTALLED], [1, 3]]),
        ("pipeline", ["--model=resnet50", "--split_sizes=2, 4"], {"model": "resnet50", "num_devices": None},
         [[2, 4], 10]),
        ("from_scratch", ["--gpus=3", "--epochs=1"],
         {"num_devices": 3, "epochs": 1, "batch_size": 48, "learning_rate": 0.05, "model": "lenet",
          "dataset": "digits"},
         []),
        ("predict", ["--checkpoint=runs/mine", "--dataset=mnist", "--gpus=2", "--output=all.npy"],
         {"num_devices": 2, "dataset": "mnist"}, ["runs/mine", "all.npy"]),
        ("export", ["--checkpoint=m.keras", "--to=m.onnx"], {"num_devices": 1}, ["m.keras", "m.onnx"]),
        ("transfer", ["--size=96,64", "--data_dir=photos"], {"dataset": "images(size=(96,64))", "batch_size": 32,
         "epochs": 5}, ["MobileNetV2", "imagenet", 5, 1e-5]),
    ],
)  # fmt: skip
def test_what_a_recipe_gets(name, flags, choices, others):
    config, *found = parse_recipe(name, [f"{name}.py", *flags])
    assert ({choice: getattr(config, choice) for choice in choices}, found) == (choices, others)


WRONG = {
    "parity": {
        "--backend=torch": "--backend has no effect here: use --backends",
        "--num_devices=2": "no flag --num_devices, and --gpus has no effect here: use --backends and --device_counts;",
        "--accumulate=2": "--accumulate has no effect here: what is compared differs in backend and number of",
        "--backends=torch,theano": "expected one of torch, jax, tensorflow",
        "--device_counts=1,two": "--device_counts: expected numbers such as 1,2,4",
        "--device_counts=0": "--device_counts: expected numbers such as 1,2,4. Received: '0'",
        "--device_counts=100": "expected at least 100",
    },
    "pipeline": {
        "--split_size=4": "--split_size has no effect here: use --split_sizes",
        "--epochs=4": "--epochs has no effect here: use --repetitions",
        "--strategy=data": "--strategy has no effect here: a study trains on one device, and as a pipeline",
        "--repetitions=1": "--repetitions: expected at least 2",
        "--backends=jax": "it belongs to recipes/parity.py",
    },
    "from_scratch": {
        "--optimizer=adam": "--optimizer has no effect here: the lesson trains LeNet with plain SGD",
        "--precision=bfloat16": "--precision: expected float32 or float64 in the lesson",
    },
    "predict": {
        "--epochs=3": "--epochs has no effect here: a trained model is used",
        "--output=a.txt": "--output: expected a file that ends in .npy or .csv",
        "--gpus=2": "--checkpoint is needed",
    },
    "export": {"--checkpoint=m.keras": "--to is needed: NAME.keras, NAME.onnx, or a folder, for a SavedModel"},
    "train": {
        "--split_sizes=2": "--split_sizes has no effect here: it belongs to recipes/pipeline.py",
        "--checkpoint=m.keras": "--checkpoint has no effect here: it belongs to recipes/predict.py",
    },
}


@pytest.mark.parametrize(
    ("name", "flag", "words"), [(name, *wrong) for name, flags in WRONG.items() for wrong in flags.items()]
)
def test_wrong_flags_of_recipes(name, flag, words):
    """That a recipe refuses whatever it does not take is shown above; here, what it says."""
    with pytest.raises(UserError) as caught:
        parse_recipe(name, [f"{name}.py", flag])
    assert words in str(caught.value)
    parse_training()  # and is forgotten


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        (None, None, ""),
        (True, None, ""),
        (False, 1, ""),
        (UserError("expected that"), 2, "error: expected that\n"),
        (PreemptedError("stopped; resume it"), 99, "stopped; resume it\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_how_a_recipe_ends(outcome, code, words, monkeypatch, capsys):
    """One line on stderr, and an exit code; False is a comparison that found a difference."""

    def compare(config, backends, device_counts):
        assert (config.model, device_counts) == ("mlp", [1])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr("sys.argv", ["parity.py", "--model=mlp", "--device_counts=1"])
    with pytest.raises(SystemExit) if code else contextlib.nullcontext() as stopped:
        kerasdp.main(compare, flags="parity")
    assert (stopped.value.code if stopped else None, capsys.readouterr().err) == (code, words)
