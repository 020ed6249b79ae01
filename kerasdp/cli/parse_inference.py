"""Turns the command lines of the recipes that do not train with `fit` into what they do."""

import dataclasses
from typing import Any

from kerasdp.cli.flags import FLAGS, INFERENCE, PREDICTION
from kerasdp.cli.parse import OF_MACHINES, config_of_flags, of_other_recipes, read, value_of
from kerasdp.config import Config
from kerasdp.config.request import Request
from kerasdp.errors import UserError

_OF_FILES = ["tensorboard", "resume", "export", "keep", "checkpoint_every", "checkpoint_dir", "max_restarts"]
_OF_STEPS = ["epochs", "max_steps", "optimizer", "learning_rate", "lr_base_batch", "accumulate", "gradient_precision"]
_OF_STEPS += ["kernel_initializer", "check"]
_OF_ENGINES = ["strategy", "stages", "cut_at", "balance", "split_size", "micro_batches", "schedule", "accumulate"]
_OF_ENGINES += ["gradient_precision", "compile", "data_on_device", "check", "batch_norm", "deterministic", "precision"]


def parse_from_scratch(arguments: list[str]) -> tuple[Config]:
    """Turns the command line of the lesson into what is trained. Args and errors as in `parse`."""
    nothing = dict.fromkeys(_OF_FILES + ["log_every", "verbose", "hang_timeout"], "the lesson has nothing of the kind")
    read(
        arguments,
        without=of_other_recipes()
        | OF_MACHINES
        | nothing
        | dict.fromkeys(["model", "optimizer", "lr_base_batch"], "the lesson trains LeNet with plain SGD")
        | dict.fromkeys(_OF_ENGINES, "the lesson has an engine of its own, in float32"),
    )
    defaults: dict[str, Any] = {
        "dataset": "fashion_mnist", "batch_size": 256, "epochs": 5, "learning_rate": 0.3,
        "kernel_initializer": "random_normal(stddev=0.01)",
    }  # fmt: skip
    return (config_of_flags(**{name: value for name, value in defaults.items() if not FLAGS[name].present}),)


def parse_evaluation(arguments: list[str]) -> tuple[Config, Request]:
    """Turns the command line of an evaluation into the run's devices, and what is evaluated.

    Args and errors as in `parse`.
    """
    return _request(arguments, of_other_recipes(INFERENCE))


def parse_prediction(arguments: list[str]) -> tuple[Config, Request]:
    """Turns the command line of a prediction into the run's devices, and what is predicted.

    Args and errors as in `parse`.
    """
    return _request(arguments, of_other_recipes(INFERENCE, PREDICTION))


def _request(arguments: list[str], without: dict[str, str]) -> tuple[Config, Request]:
    read(arguments, without=without | OF_MACHINES | dict.fromkeys(_OF_FILES + _OF_STEPS, "nothing is trained here"))
    if FLAGS["inputs"].present and FLAGS["dataset"].present:
        raise UserError("--inputs and --dataset both name the data: leave out one of them")
    if value_of("checkpoint") is None:
        raise UserError("--checkpoint is needed: the --workdir of a run, a checkpoint, or a .keras file")
    config = config_of_flags()
    names = [field.name for field in dataclasses.fields(Request) if field.name in FLAGS]
    given = {name: value_of(name) for name in names if FLAGS[name].present}
    return config, Request(**given | {"workdir": str(config.workdir)})
