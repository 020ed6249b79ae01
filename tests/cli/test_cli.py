"""Flags become a Config; whatever is wrong with them is one line."""

import contextlib
import dataclasses
import pathlib
import re

import pytest

import kerasdp
from kerasdp.cli.main import CHOICES, RECIPES, parse
from kerasdp.config import BACKENDS, Config
from kerasdp.errors import PreemptedError, UserError
from kerasdp.processes.devices import is_installed

FLAGFILES = sorted((pathlib.Path(__file__).parents[2] / "flags").glob("*.flags"))


def parse_training(*flags):
    return parse("train", ["train.py", *flags])[0]


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


def help_of(capsys, name):
    """The text of `--help`, and the flags that it lists."""
    with pytest.raises(SystemExit) as stopped:
        parse(name, [f"recipes/{name}.py", "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    return text, re.findall(r"^  --(\w+): ", text, re.M)


@pytest.mark.short("train", "parity", "predict")
@pytest.mark.parametrize("name", RECIPES)
def test_help_names_the_flags_of_the_recipe_in_groups(name, capsys):
    """Those that it takes, each once; any other is refused."""
    text, listed = help_of(capsys, name)
    assert text.startswith(f"usage: python recipes/{name}.py [")
    assert listed == [choice.flag for choice in RECIPES[name].choices()] and len(listed) == len(set(listed))
    for choice in RECIPES[name].choices():
        assert text.count(f"\n{choice.group}:\n") == 1
    assert max(map(len, text.splitlines())) <= 100
    for flag in {choice.flag for choice in CHOICES} - set(listed):
        with pytest.raises(UserError, match=f"Unknown command line flag '{flag}'"):
            parse(name, ["", f"--{flag}"])


def test_help_shows_the_defaults_of_the_recipe(capsys):
    text, _ = help_of(capsys, "from_scratch")
    assert "Default: 48." in text and "Default: 0.05." in text and "Default: 0." in text
    assert not re.search(r"Default: (None|False|)\.", text)


def test_recipes_name_fields():
    """Of choices that there are: a misspelled one would refuse or take nothing."""
    fields = {field.name for field in dataclasses.fields(Config)}
    for known in RECIPES.values():
        assert {*known.takes, *known.without} <= fields
        assert {*known.own, *known.defaults} <= {choice.name for choice in CHOICES}


@pytest.mark.parametrize("file", FLAGFILES, ids=lambda file: file.stem)
def test_flagfiles(file):
    """Each parses, and its header tells the command, the expected result and time, and where they were measured."""
    recipe = {"pipeline": "pipeline", "lesson": "from_scratch"}.get(file.stem.partition("_")[0], "train")
    assert parse(recipe, ["", f"--flagfile={file}"])
    header = " ".join(line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#"))
    for word in (f"python recipes/{recipe}.py --flagfile=flags/{file.name}", "Expected:", "Measured on:"):
        assert word in header


INSTALLED = next(name for name in BACKENDS if is_installed(name))


@pytest.mark.parametrize(
    ("name", "flags", "choices", "own"),
    [
        ("parity", [f"--backends={INSTALLED}", "--device_counts=1, 3"], {"precision": "float32"},
         {"backends": [INSTALLED], "device_counts": [1, 3]}),
        ("bisection", [f"--backends={INSTALLED}"], {"max_steps": 2}, {"backends": [INSTALLED]}),
        ("pipeline", ["--model=resnet50", "--split_sizes=2, 4"],
         {"model": "resnet50", "num_devices": None, "strategy": "pipeline", "backend": "torch"},
         {"split_sizes": [2, 4], "repetitions": 10}),
        ("from_scratch", ["--gpus=3", "--epochs=1"],
         {"num_devices": 3, "epochs": 1, "batch_size": 48, "learning_rate": 0.05, "model": "lenet",
          "dataset": "digits"},
         {}),
        ("predict", ["--checkpoint=runs/mine", "--dataset=mnist", "--gpus=2", "--output=all.npy"],
         {"num_devices": 2, "dataset": "mnist"}, {"checkpoint": "runs/mine", "output": "all.npy"}),
        ("transfer", ["--data_dir=photos"], {"dataset": "images(size=(160,160))", "batch_size": 32, "epochs": 5},
         {"backbone": "MobileNetV2", "weights": "imagenet", "head_epochs": 5, "fine_tuning_rate": 1e-5}),
    ],
)  # fmt: skip
def test_what_a_recipe_gets(name, flags, choices, own):
    config, found = parse(name, [f"{name}.py", *flags])
    assert ({choice: getattr(config, choice) for choice in choices}, found) == (choices, own)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("train", "--learning_rate=fast", "--learning_rate: expected a number above 0. Received: 'fast'"),
        ("train", "--batchsize=3", "flag 'batchsize'. Did you mean: batch_size ?; --help lists all flags"),
        ("train", "--flagfile=/nowhere/none.flags", "none.flags"),
        ("train", "stray", "expected flags only. Received: 'stray'"),
        ("train", "--resume", "add --workdir=FOLDER"),
        ("parity", "--backends=torch,theano", "expected one of torch, jax, tensorflow"),
        ("parity", "--device_counts=1,two", "--device_counts: expected numbers such as 1,2,4"),
        ("parity", "--device_counts=100", "expected at least 100"),
        ("pipeline", "--repetitions=1", "--repetitions: expected at least 2"),
        ("from_scratch", "--precision=bfloat16", "--precision: expected float32 or float64 in the lesson"),
        ("predict", "--output=a.txt", "--output: expected a file that ends in .npy or .csv"),
        ("predict", "--gpus=2", "--checkpoint is needed: Model to use"),
        ("export", "--checkpoint=m.keras", "--to is needed: File to write: NAME.keras"),
        ("finetune", "--lora_rank=-1", "--lora_rank: expected a whole number of at least 0. Received: -1"),
        ("finetune", "--preset=a --weights=b", "--preset and --weights both name the model: leave out one of them"),
        ("finetune", "--dataset=digits", "--dataset=FILE.py:FUNCTION goes with --weights or --preset"),
        ("finetune", "--dataset=a.py:b", "give both, or none of them"),
        ("finetune", "--weights=b", "give both, or none of them"),
        ("transfer", "--head_epochs=0", "--head_epochs: expected a number above 0. Received: 0"),
        ("transfer", "--fine_tuning_rate=-1", "--fine_tuning_rate: expected a number above 0. Received: -1"),
    ],
)
def test_wrong_flags(name, flags, words):
    with pytest.raises(UserError) as caught:
        parse(name, [f"{name}.py", *flags.split()])
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
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
