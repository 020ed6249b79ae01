"""Turns the command lines of the recipes that do not train with `fit` into what they do."""

import dataclasses
from typing import Any

from kerasdp.cli.flags import FLAGS, GROUPS, INFERENCE, PREDICTION
from kerasdp.cli.parse import config_of_flags, read, value_of
from kerasdp.config import Config
from kerasdp.config.request import Request
from kerasdp.errors import UserError

# What each recipe has a use for; new flags are refused until somebody adds them here.
_OF_ALL = {
    "help",
    "h",
    "flagfile",
    "backend",
    "gpus",
    "devices",
    "device",
    "dataset",
    "data_dir",
    "batch_size",
    "workdir",
}
_OF_LESSON = _OF_ALL | {"epochs", "learning_rate", "kernel_initializer", "seed", "precision"}
_OF_EVALUATION = _OF_ALL | {"model", "precision", "compile", "deterministic", "hang_timeout", *GROUPS[INFERENCE]}
_OF_EXPORT = _OF_ALL - {"gpus", "devices", "batch_size", "workdir"} | {"model", "checkpoint", "trust_checkpoint", "to"}
_OF_PREDICTION = _OF_EVALUATION | set(GROUPS[PREDICTION])


def parse_from_scratch(arguments: list[str]) -> tuple[Config]:
    """Turns the command line of the lesson into what is trained. Args and errors as in `parse`."""
    _read_only(arguments, _OF_LESSON, "the lesson trains LeNet with plain SGD, and keeps its losses alone")
    if value_of("precision") not in ("float32", "float64"):
        raise UserError(f"--precision: expected float32 or float64 in the lesson. Received: {value_of('precision')!r}")
    defaults: dict[str, Any] = {
        "dataset": "fashion_mnist", "batch_size": 256, "epochs": 5, "learning_rate": 0.3,
        "kernel_initializer": "random_normal(stddev=0.01)",
    }  # fmt: skip
    return (config_of_flags(**{name: value for name, value in defaults.items() if not FLAGS[name].present}),)


def parse_evaluation(arguments: list[str]) -> tuple[Config, Request]:
    """Turns the command line of an evaluation into the run's devices, and what is evaluated.

    Args and errors as in `parse`.
    """
    return _request(arguments, _OF_EVALUATION)


def parse_prediction(arguments: list[str]) -> tuple[Config, Request]:
    """Turns the command line of a prediction into the run's devices, and what is predicted.

    Args and errors as in `parse`.
    """
    return _request(arguments, _OF_PREDICTION)


def parse_export(arguments: list[str]) -> tuple[Config, Request, str]:
    """Turns the command line of an export into a backend, the model, and the file to write.

    Args and errors as in `parse`.
    """
    config, request = _request(arguments, _OF_EXPORT)
    if value_of("to") is None:
        raise UserError("--to is needed: NAME.keras, NAME.onnx, or a folder, for a SavedModel")
    config = dataclasses.replace(config, num_devices=1, workdir=None, verbose=0)
    return config, dataclasses.replace(request, workdir=".", activation="none"), value_of("to")


def _read_only(arguments: list[str], names: set[str], reason: str) -> None:
    """Reads a command line on which these flags alone are taken."""
    read(arguments, without={name: reason for name in FLAGS if name not in names})


def _request(arguments: list[str], names: set[str]) -> tuple[Config, Request]:
    _read_only(arguments, names, "a trained model is used here, and nothing is trained")
    if FLAGS["inputs"].present and FLAGS["dataset"].present:
        raise UserError("--inputs and --dataset both name the data: leave out one of them")
    if value_of("checkpoint") is None:
        raise UserError("--checkpoint is needed: the --workdir of a run, a checkpoint, or a .keras file")
    config = config_of_flags()
    fields = {field.name for field in dataclasses.fields(Request)} & names
    given = {name: value_of(name) for name in fields if FLAGS[name].present}
    return config, Request(**given | {"workdir": str(config.workdir)})
