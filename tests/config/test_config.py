"""Choices are checked when they are made, with one line that says what was expected."""

import dataclasses
import inspect
import json
import pathlib

import numpy as np
import pytest

from kerasdp import errors
from kerasdp.config import BACKENDS, Config
from kerasdp.config.choices import choices_of
from kerasdp.errors import UserError
from kerasdp.launch import launch

PIPELINE = {"strategy": "pipeline"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "theano"}, "--backend: expected one of torch, jax, tensorflow. Received: 'theano'"),
        ({"num_devices": 0}, "--gpus: expected a whole number of at least 1. Received: 0"),
        ({"batch_size": 3, "num_devices": 4}, "expected at least 4 samples for 4 devices. Received: 3"),
        ({"seed": 2**32}, "--seed"),
        ({"verbose": False}, "--verbose: expected one of 0, 1, 2. Received: False"),
        ({"strategy": "tensor", "split_size": 2}, "--cut_at and --split_size need --strategy=pipeline"),
        ({"tracker": "tensorboard"}, "add --workdir=FOLDER"),
        (
            {"tracker": "comet", "workdir": "w"},
            "tracker: expected some of tensorboard, wandb, mlflow. Received: 'comet'",
        ),
        ({"accumulate": 2.0}, "--accumulate: expected a whole number of at least 1. Received: 2.0"),
        (
            {"accumulate": 9, "batch_size": 15, "num_devices": 2},
            "--accumulate: the 8 samples of a device cannot be split into 9 micro-batches of equal size "
            "(only the last may be smaller); use --accumulate=8",
        ),
        (
            {"accumulate": 32, "batch_size": 61, "num_devices": 1},
            "--accumulate: the 61 samples of a device cannot be split into 32 micro-batches of equal size "
            "(only the last may be smaller); use --accumulate=31",
        ),
        (
            {"accumulate": 2, "strategy": "pipeline"},
            "--accumulate: works with --strategy=data only. Received: pipeline; use --split_size",
        ),
        ({"accumulate": 2, "strategy": "tensor"}, "Received: tensor; leave out --accumulate"),
        (PIPELINE | {"split_size": 0}, "--split_size: expected a whole number of at least 1. Received: 0"),
        (PIPELINE | {"split_size": "4"}, "--split_size: expected a whole number of at least 1. Received: '4'"),
        (PIPELINE | {"backend": "jax"}, "Received: jax; use --backend=torch, or --backend=jax with --shard=weights"),
        (PIPELINE | {"num_devices": 4, "cut_at": "a"}, "--gpus: expected 2, one device per stage of --cut_at"),
        ({"batch_size": True}, "--batch_size: expected a whole number of at least 1. Received: True"),
        ({"cut_at": ["a", "b"]}, "--cut_at: expected names of layers in one string, comma-separated. Received: ['a', "),
        ({"workdir": 3}, "--workdir: expected a folder. Received: 3"),
        ({"resume": "no"}, "--resume: expected True or False. Received: 'no'"),
        (
            {"backend": np.zeros((2, 2))},
            "--backend: expected one of torch, jax, tensorflow. Received: array([[0., 0.],",
        ),
        ({"checkpoint_every": 0}, "--checkpoint_every: expected epoch, never, steps (as 50) or minutes (as 10m). Rece"),
    ],
)
def test_a_wrong_choice_is_one_line(changes, words):
    with pytest.raises(UserError) as caught:
        Config(**changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parts_of_a_batch():
    """Whatever the batches of `fit` are."""
    settings = Config(batch_size=61, accumulate=4)
    assert [settings.micro_batch_rows(61, count) for count in (1, 2)] == [16, 16]  # of 31 on a device 8, 8, 8, 7
    assert settings.micro_batch_rows(256, 2) == 64
    assert Config().micro_batch_rows(61, 2) is None
    with pytest.raises(UserError, match="--accumulate: the 9 samples of a device cannot be split into 4 micro"):
        settings.micro_batch_rows(18, 2)


def test_a_config_is_frozen_and_fits_into_json():
    settings = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 3
    assert Config(**json.loads(json.dumps(settings.as_dict()))) == settings


def test_each_choice_is_written_once():
    """With its field: default, meaning, range and flags. Defaults are in their ranges; the docstring is made of it."""
    known = choices_of(Config)
    assert [field.name for field in dataclasses.fields(Config) if field.name not in known] == []
    for name, choice in known.items():
        assert choice.help.endswith((".", "...")) and choice.allowed.expected and choice.group
        assert choice.default is None or isinstance(choice.default, choice.kinds)
        assert choice.default in (None, "") or choice.allowed.holds(choice.default)
        assert not choice.unset or choice.default is None
        assert inspect.getdoc(Config).count(f"\n    {name}: ") == 1
        assert f"\n        {name}: " not in inspect.getsource(Config), "its meaning is in the table"
    text = inspect.getdoc(Config)
    assert text.index("\nArgs:\n") < text.index("\nRaises:\n") and "--" not in text


def test_switches_are_those_that_messages_know():
    """`errors` lies below the table, and names those that people in Python write as `resume=True`."""
    known = choices_of(Config)
    assert {name for name, choice in known.items() if bool in choice.kinds} == set(errors._SWITCHES)
    assert {choice.flag: name for name, choice in known.items() if choice.flag != name}.items() <= (
        errors.FIELDS_OF_FLAGS.items()
    )


@pytest.mark.parametrize(
    ("name", "value", "backends"),
    [
        ("device", "tpu", ["jax"]),
        ("compile", "on", ["torch"]),
        ("shard", "weights", ["torch", "jax"]),
        ("strategy", "tensor", ["jax"]),
        ("strategy", "pipeline", ["torch"]),
    ],
)
def test_where_a_choice_is_there(name, value, backends):
    """Its backends take it; the others say in a line that it is there for those only, and help says so, too."""
    for backend in (None, *BACKENDS):
        if backend in (None, *backends):
            Config(backend=backend, **{name: value})
        else:
            words = f"--{name}={value}: works with --backend={' and '.join(backends)} only. Received: {backend}; "
            with pytest.raises(UserError, match=words):
                Config(backend=backend, **{name: value})
    assert f"with {' and '.join(backends)} only" in choices_of(Config)[name].help


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("workdir", pathlib.Path("runs/a"), "runs/a"),
        ("checkpoint_every", np.int64(50), 50),
        ("seed", np.int64(7), 7),
        ("hang_timeout", np.float32(0.5), 0.5),
        ("hang_timeout", 1, 1),
    ],
)
def test_types_that_people_have_in_python(name, value, plain):
    settings = Config(**{name: value})
    found = json.loads(json.dumps(settings.as_dict()))[name]
    assert (found, type(found)) == (plain, type(plain))
    assert settings == Config(**{name: plain})
    assert name != "checkpoint_every" or settings.checkpoint_interval() == (50, None)


def test_arguments_of_launch_are_choices_and_are_explained():
    arguments = set(inspect.signature(launch).parameters) - {"train", "settings"}
    assert arguments == set(choices_of(Config))
    for name in arguments:
        assert f"\n        {name}: " in launch.__doc__, name
