"""Turns the command lines of the recipes into what they train."""

import contextlib
import dataclasses
import datetime
import difflib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from kerasdp.benchmark.contenders import SHAPES
from kerasdp.cli.flags import (
    BENCHMARK,
    COMPARISON,
    EXPORT,
    FLAGS,
    GROUPS,
    INFERENCE,
    PREDICTION,
    RAY,
    SEARCH,
    STUDY,
    SWEEP,
    TRANSFER,
    help_text,
)
from kerasdp.config import Config
from kerasdp.config.names import meant
from kerasdp.errors import FIELDS_OF_FLAGS, UserError
from kerasdp.runtime.devices import choose_backend

_RECIPES = {
    COMPARISON: "parity", STUDY: "pipeline", BENCHMARK: "benchmark", RAY: "ray_train", INFERENCE: "predict",
    PREDICTION: "predict", SWEEP: "sweep", SEARCH: "sweep", EXPORT: "export", TRANSFER: "transfer",
}  # fmt: skip
OF_MACHINES = dict.fromkeys(["hosts", "host_rank", "coordinator", "interface"], "it trains on this machine alone")
OF_MACHINES["dry_run"] = "it tells of one run, of recipes/train.py"
_NOT_COMPARED = [
    "strategy", "accumulate", "gradient_precision", "reduce", "device_shares", "early_stopping", "tracker", "profile",
]  # fmt: skip
OF_LEARNING = ["schedule", "warmup", "ema", "label_smoothing", "augment", "early_stopping"]
_NOT_MEASURED = [
    "strategy", "accumulate", "stages", "cut_at", "balance", "split_size", "micro_batches", "pipeline_schedule",
    "reduce", "device_shares", "optimizer", "learning_rate", "lr_base_batch", "kernel_initializer", *OF_LEARNING,
]  # fmt: skip
_NOT_STUDIED = ["tracker", "profile", "resume", "export", "keep", "checkpoint_every", "checkpoint_dir", "max_restarts"]


def parse(arguments: list[str], defaults: dict[str, Any] | None = None, unused: Sequence[str] = ()) -> Config:
    """Turns a command line into a `Config`.

    Args:
        arguments: `sys.argv`, the program's name included.
        defaults: values of flags that are not given, other than usual.
        unused: flags that are refused.

    Raises:
        UserError: if a flag is unknown or its value cannot be used.
        SystemExit: after `--help`.
    """
    with other_defaults(defaults or {}):
        read(arguments, without=of_other_recipes() | dict.fromkeys(unused, "this recipe has its own, or none"))
        return config_of_flags()


def parse_comparison(arguments: list[str]) -> tuple[Config, list[str] | None, list[int]]:
    """Turns the command line of a comparison into what is trained, backends (None: all installed), device counts.

    Args and errors as in `parse`.
    """
    read(
        arguments,
        without=dict.fromkeys(["backend", "gpus"], "use --backends and --device_counts")
        | dict.fromkeys(_NOT_COMPARED, "what is compared differs in backend and number of devices alone")
        | of_other_recipes(COMPARISON)
        | OF_MACHINES,
    )
    names, numbers = _backends(), _numbers("device_counts")
    config = config_of_flags()
    for number in numbers:
        dataclasses.replace(config, num_devices=number)  # raises if there is no such number
    return config, names, numbers


def parse_study(arguments: list[str]) -> tuple[Config, list[int], int]:
    """Turns the command line of a study of a pipeline into what is trained, split sizes, repetitions.

    Args and errors as in `parse`.
    """
    read(
        arguments,
        without=of_other_recipes(STUDY)
        | OF_MACHINES
        | dict.fromkeys(["strategy", "accumulate"], "a study trains on one device, and as a pipeline")
        | dict.fromkeys(["split_size", "micro_batches"], "use --split_sizes")
        | dict.fromkeys(["epochs", "max_steps"], "use --repetitions")
        | dict.fromkeys(OF_LEARNING, "a study measures times alone")
        | dict.fromkeys(_NOT_STUDIED, "a study keeps nothing of what it trains"),
    )
    sizes = _numbers("split_sizes")
    if value_of("repetitions") < 2:
        raise UserError(f"--repetitions: expected at least 2, for a deviation. Received: {FLAGS['repetitions'].value}")
    return config_of_flags(strategy="pipeline"), sizes, value_of("repetitions")


def parse_benchmark(arguments: list[str]) -> tuple[Config, list[str] | None, list[int], list[str] | None, int, int]:
    """Turns the command line of a benchmark into what is trained, backends, device counts, peers, rounds, their steps.

    None for backends or peers: all there are. Args and errors as in `parse`.
    """
    read(
        arguments,
        without=dict.fromkeys(["backend", "gpus"], "use --backends and --device_counts")
        | of_other_recipes(COMPARISON, BENCHMARK)
        | OF_MACHINES
        | dict.fromkeys(_NOT_MEASURED, "all contenders train alike, with data parallelism and SGD")
        | dict.fromkeys(["epochs", "max_steps"], "use --rounds and --steps_per_round")
        | dict.fromkeys(_NOT_STUDIED, "a benchmark keeps nothing of what it trains"),
    )
    for flag in ("rounds", "steps_per_round"):
        if value_of(flag) < 1:
            raise UserError(f"--{flag}: expected a whole number of at least 1. Received: {value_of(flag)}")
    counts = _numbers("device_counts") if FLAGS["device_counts"].present else [1]
    # Which all contenders can train; and what the frameworks do by themselves.
    defaults = {"model": "convnet", "batch_norm": "replica"}
    config = config_of_flags(**{name: value for name, value in defaults.items() if not FLAGS[name].present})
    if config.model in SHAPES and FLAGS["dataset"].present:
        raise UserError(f"--dataset has no effect here: {config.model} is measured on random images")
    for count in counts:
        dataclasses.replace(config, num_devices=count)  # raises if there is no such number
    peers = value_of("peers")
    names = None if peers is None else [name.strip() for name in peers.split(",") if name.strip() != "none"]
    return config, _backends(), counts, names, value_of("rounds"), value_of("steps_per_round")


@contextlib.contextmanager
def other_defaults(values: dict[str, Any]) -> Iterator[None]:
    """Gives flags other defaults within the `with` block, in `--help`, too."""
    usual = {name: FLAGS[name].default for name in values}
    try:
        for name, value in values.items():
            FLAGS.set_default(name, value)
        yield
    finally:
        for name, value in usual.items():
            FLAGS.set_default(name, value)


def of_other_recipes(*own: str) -> dict[str, str]:
    """Returns the flags of the recipes' groups but for a recipe's own, each with the recipe that it belongs to."""
    return {
        name: f"it belongs to recipes/{recipe}.py"
        for group, recipe in _RECIPES.items()
        for name in GROUPS[group]
        if group not in own
    }


def _backends() -> list[str] | None:
    names = value_of("backends")
    return None if names is None else [choose_backend(name.strip()) for name in names.split(",")]


def _numbers(flag: str) -> list[int]:
    try:
        numbers = [int(number) for number in value_of(flag).split(",")]
    except ValueError as error:
        raise UserError(f"--{flag}: expected numbers such as 1,2,4. Received: {value_of(flag)!r}") from error
    if min(numbers) < 1:
        raise UserError(f"--{flag}: expected numbers of at least 1. Received: {min(numbers)}")
    return numbers


def read(arguments: list[str], without: dict[str, str]) -> None:
    """Sets `FLAGS` from a command line, on which the flags `without` are refused, with what to do instead."""
    _refuse_code_of_runs(arguments[1:])
    FLAGS.unparse_flags()
    for name in FLAGS:
        FLAGS[name].present = 0
    try:
        rest = FLAGS(arguments, known_only=False)
    except flags.UnrecognizedFlagError as error:
        raise UserError(_unknown(error.flagname, without)) from error
    except flags.Error as error:
        raise UserError(f"{' '.join(str(error).split())}; --help lists all flags") from error
    if value_of("help"):
        print(help_text(arguments[0]))
        raise SystemExit(0)
    if len(rest) > 1:
        raise UserError(f"expected flags only. Received: {' '.join(rest[1:])!r}; --help lists all flags")
    for name, instead in without.items():
        if FLAGS[name].present:
            raise UserError(f"--{name} has no effect here: {instead}")


def _refuse_code_of_runs(arguments: list[str]) -> None:
    """Raises `UserError` for a flagfile in a run's folder that names code: whoever left the run chose it."""
    for number, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.lstrip("-") != "flagfile":
            continue
        path = os.path.expanduser((value or "".join(arguments[number + 1 : number + 2])).strip())  # as absl reads it
        if not os.path.exists(os.path.join(os.path.dirname(path), "config.json")):
            continue
        try:
            found = FLAGS.read_flags_from_files([f"--flagfile={path}"])
        except (flags.Error, OSError, ValueError) as error:
            raise UserError(f"--flagfile: cannot read {path!r} ({' '.join(str(error).split())})") from error
        for flag, following in zip(found, [*found[1:], ""]):  # --name=value, or one after the other
            name, _, value = flag.partition("=")
            names_code = name.lstrip("-") in ("model", "dataset", "sweep") and ":" in (value or following)
            if names_code or name.lstrip("-") == "trust_checkpoint":
                raise UserError(
                    f"--flagfile: {path} is in the folder of a run, and names code: {ascii(flag)[1:-1]:.200}; copy the "
                    "file to another folder once you have read it, or write the flag yourself"
                )


def _unknown(name: str, without: dict[str, str]) -> str:
    """Returns what to say of a flag that there is not."""
    fields = {field: flag for flag, field in FIELDS_OF_FLAGS.items()}
    field = meant(name)
    near = [fields.get(field, field)] if field else difflib.get_close_matches(name, list(FLAGS), n=1)
    instead = f"; did you mean --{near[0]}?" if near and near[0] not in without else "."
    if near and near[0] in without:
        instead = f", and --{near[0]} has no effect here: {without[near[0]]};"
    return f"there is no flag --{name}{instead} --help lists all flags"


def value_of(flag: str) -> Any:
    """Returns the value of a flag that was read."""
    return FLAGS[flag].value


def config_of_flags(**choices: Any) -> Config:
    """Returns the choices of the flags that were read, with a new workdir if none is given.

    Args:
        **choices: fields that are not to be read from their flags.
    """
    values = {name: value_of(name) for group, names in GROUPS.items() for name in names if group not in _RECIPES}
    values = {FIELDS_OF_FLAGS.get(name, name): value for name, value in values.items()}
    if values["workdir"] is None and (values["checkpoint_dir"] or not values["resume"]):
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        values["workdir"] = os.path.join("runs", f"{now}-{os.getpid()}")
    return Config(**(values | choices))
