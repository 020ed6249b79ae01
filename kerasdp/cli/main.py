"""Runs a recipe: turns its command line into arguments, runs it, and ends the program."""

import atexit
import contextlib
import dataclasses
import datetime
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kerasdp.cli.flags import RECIPES, Own, read, recipe
from kerasdp.config import BACKENDS, Config
from kerasdp.config.choices import choices_of
from kerasdp.errors import (
    EXIT_CODE_OF_INTERRUPT,
    RunError,
    UserError,
    from_command_line,
    last_line_of,
    line_of_interrupt,
)
from kerasdp.launch import launch
from kerasdp.parity.trace import Way
from kerasdp.runtime.devices import choose_backend, is_installed


def main(
    function: Callable[..., Any],
    flags: str = "train",
    *,
    defaults: dict[str, Any] | None = None,
    unused: Sequence[str] = (),
) -> None:
    """Runs a function as the command line says, and ends the program.

    A user's mistake is one line and exit code 2; a run that fails is its error and exit code 1.

    Args:
        function: what the recipe does. With the flags of `"train"`, `"evaluate"`, `"predict"` and `"export"` it runs in
            the workers, as `kerasdp.launch` calls it; else it runs here, and False from it is exit code 1.
        flags: which flags there are, by their recipe's name: `"train"`: `function(runner)`; `"parity"`:
            `function(config, backends, device_counts)`; `"bisection"`: `function(config, backends)`; `"pipeline"`:
            `function(config, split_sizes, repetitions)`; `"ray_train"`: `function(config, num_workers)`; `"sweep"`:
            `function(config, num_trials)`; `"from_scratch"`: `function(config)`; `"evaluate"`:
            `function(runner, checkpoint)`; `"predict"`: `function(runner, checkpoint, output)`; `"export"`:
            `function(runner, checkpoint, to)`; `"transfer"`:
            `function(config, backbone, weights, head_epochs, fine_tuning_rate)`; `"finetune"`:
            `function(config, rank, weights, preset)`.
        defaults: with the flags of `"train"`: values of flags that are not given, other than usual.
        unused: with the flags of `"train"`: those that the recipe has no use for, and refuses.

    Raises:
        SystemExit: where the exit code is not 0.
    """
    try:
        with ending_with_a_line():
            if flags == "train":
                launch(function, parse(sys.argv, defaults, unused))
            elif "checkpoint" in RECIPES[flags].own:  # a trained model is used
                config, *choices = parse_recipe(flags, sys.argv)
                launch(functools.partial(function, **dict(zip(RECIPES[flags].own, choices))), config)
            elif function(*parse_recipe(flags, sys.argv)) is False:
                sys.exit(1)
    finally:  # all is done: Ctrl-C while Python ends is no error of the frameworks' own last functions
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def ending_with_a_line() -> Iterator[None]:
    """Ends the program with one line, and the exit code, for an error of a run or Ctrl-C within the `with` block."""
    try:
        with from_command_line():
            yield
    except RunError as error:
        print(last_line_of(error), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as end:
        print(line_of_interrupt(end), file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE_OF_INTERRUPT)


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
    return _config(read(arguments, recipe("train", defaults, unused)))


def parse_recipe(name: str, arguments: list[str]) -> tuple[Any, ...]:
    """Turns the command line of a recipe into what its function gets, as `main` says. Raises as `parse`."""
    given = read(arguments, RECIPES[name])
    own = Own(**{field: given[field] for field in choices_of(Own) if field in given})
    for field, meaning in _NEEDED.items():
        if field in RECIPES[name].own and getattr(own, field) is None:
            raise UserError(f"--{field} is needed: {meaning}")
    if name in _ARGUMENTS:
        return _ARGUMENTS[name](given, own)
    return _config(given), *(getattr(own, field) for field in RECIPES[name].own)


def _parity(given: dict[str, Any], own: Own) -> tuple[Config, list[str] | None, list[int]]:
    """Returns what is trained, backends (None: all installed), device counts."""
    backends, counts = _backends(own), _numbers(own.device_counts)
    return _config_on(counts, {"precision": "float32"} | given), backends, counts  # in TF32 all would differ


def _bisection(given: dict[str, Any], own: Own) -> tuple[Config, tuple[Way, Way]]:
    """Returns what is trained, and the two ways."""
    names = _backends(own) or [name for name in BACKENDS if is_installed(name)][:2]
    if len(names) != 2:
        raise UserError(f"--backends: expected two, as torch,jax. Received: {','.join(names)}")
    config = _config_on([1], given)
    first, second = (Way(backend=name, num_devices=1, precision=config.precision) for name in names)
    return config, (first, second)


def _pipeline(given: dict[str, Any], own: Own) -> tuple[Config, list[int], int]:
    """Returns what is trained, split sizes, repetitions."""
    return _config({"backend": "torch"} | given, strategy="pipeline"), _numbers(own.split_sizes), own.repetitions


def _from_scratch(given: dict[str, Any], own: Own) -> tuple[Config]:
    for flag, names in (("precision", ("float32", "float64")), ("model", ("lenet",))):
        value = given.get(flag, names[0])
        if value.partition("(")[0] not in names:
            raise UserError(f"--{flag}: expected {' or '.join(names)} in the lesson. Received: {value!r}")
    return (_config(given),)


def _transfer(given: dict[str, Any], own: Own) -> tuple[Config, str, str, int, float]:
    """Returns the run, the backbone, its weights, epochs of the first fit, rate of the second."""
    dataset = given["dataset"]
    if dataset == "images":
        height, width = _numbers(own.size)
        dataset = f"images(size=({height},{width}))"
    elif "size" in given:
        raise UserError("--size has no effect here: it is that of the images of a folder (--data_dir)")
    return _config(given, dataset=dataset), own.backbone, own.weights, own.head_epochs, own.fine_tuning_rate


def _finetune(given: dict[str, Any], own: Own) -> tuple[Config, int, str | None, str | None]:
    """Returns the run, the rank of adapters, and the file or the preset of the model; without, it is the recipe's."""
    weights = None if own.weights == "none" else own.weights
    if own.preset is not None and weights is not None:
        raise UserError("--preset and --weights both name the model: leave out one of them")
    if (own.preset or weights) and ":" not in given.get("dataset", ""):
        raise UserError("--dataset=FILE.py:FUNCTION is needed, to fine-tune on")
    if not (own.preset or weights) and "dataset" in given:
        raise UserError("--dataset has no effect here: the recipe trains its own model: add --weights or --preset")
    return _config(given), own.lora_rank, weights, own.preset


_NEEDED = {
    "checkpoint": "the --workdir of a run, a checkpoint, or a .keras file",
    "to": "NAME.keras, NAME.onnx, or a folder, for a SavedModel",
}
# The recipes whose function gets something else than the choices of the run, and the recipe's own ones.
_ARGUMENTS: dict[str, Callable[[dict[str, Any], Own], tuple[Any, ...]]] = {
    "parity": _parity,
    "bisection": _bisection,
    "pipeline": _pipeline,
    "from_scratch": _from_scratch,
    "transfer": _transfer,
    "finetune": _finetune,
}


def _config(given: dict[str, Any], **choices: Any) -> Config:
    """Returns the choices of the run that are given, with a new workdir if none is. `choices` come before those."""
    values = {name: given[name] for name in choices_of(Config) if name in given}
    if values.get("workdir") is None and (values.get("checkpoint_dir") or not values.get("resume")):
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        values["workdir"] = os.path.join("runs", f"{now}-{os.getpid()}")
    return Config(**(values | choices))


def _config_on(counts: list[int], given: dict[str, Any]) -> Config:
    """Returns the choices of runs on several numbers of devices, which they must go together with."""
    config = _config(given)
    for count in counts:
        dataclasses.replace(config, num_devices=count)  # raises if they do not
    return config


def _backends(own: Own) -> list[str] | None:
    return None if own.backends is None else [choose_backend(name.strip()) for name in own.backends.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
