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
from typing import Any, TypeVar

from kerasdp.cli.flags import RECIPES, Own, read, recipe
from kerasdp.config import Config
from kerasdp.config.choices import choices_of
from kerasdp.config.validation import BACKENDS
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
            elif flags in _USES:
                config, choices = parse_recipe(flags, sys.argv)
                launch(functools.partial(function, **choices), config)
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


T = TypeVar("T")


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
    return _ARGUMENTS[name](given, _record(Own, given))


def _parity(given: dict[str, Any], own: Own) -> tuple[Config, list[str] | None, list[int]]:
    """Returns what is trained, backends (None: all installed), device counts."""
    backends, counts = _backends(own), _numbers(own, "device_counts")
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
    return _config({"backend": "torch"} | given, strategy="pipeline"), _numbers(own, "split_sizes"), own.repetitions


def _sweep(given: dict[str, Any], own: Own) -> tuple[Config, int]:
    """Returns what all runs share, and the number of trials."""
    return _config(given), own.trials


def _ray_train(given: dict[str, Any], own: Own) -> tuple[Config, int]:
    """Returns what is trained, and the number of workers."""
    return _config(given), own.workers


def _from_scratch(given: dict[str, Any], own: Own) -> tuple[Config]:
    if given.get("precision", "float32") not in ("float32", "float64"):
        raise UserError(f"--precision: expected float32 or float64 in the lesson. Received: {given['precision']!r}")
    if given.get("model", "lenet").partition("(")[0] != "lenet":
        raise UserError(f"--model: expected lenet in the lesson. Received: {given['model']!r}")
    return (_config(given),)


# The recipes that use a trained model, and the flags that they add to the flags of a run.
_USES = {"evaluate": ["checkpoint"], "predict": ["checkpoint", "output"], "export": ["checkpoint", "to"]}
_NEEDED = {
    "checkpoint": "the --workdir of a run, a checkpoint, or a .keras file",
    "to": "NAME.keras, NAME.onnx, or a folder, for a SavedModel",
}


def _use(user: str, given: dict[str, Any], own: Own) -> tuple[Config, dict[str, Any]]:
    """Returns the run's devices and data, and what a recipe uses."""
    choices = {name: getattr(own, name) for name in _USES[user]}
    for name, meaning in _NEEDED.items():
        if name in choices and choices[name] is None:
            raise UserError(f"--{name} is needed: {meaning}")
    return _config({"num_devices": 1} | given if user == "export" else given), choices


def _transfer(given: dict[str, Any], own: Own) -> tuple[Config, str, str, int, float]:
    """Returns the run, the backbone, its weights, epochs of the first fit, rate of the second."""
    dataset = given["dataset"]
    if dataset == "images":
        height, width = map(int, own.size.split(","))
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


_ARGUMENTS: dict[str, Callable[[dict[str, Any], Own], tuple[Any, ...]]] = {
    "train": lambda given, own: (_config(given),),
    "parity": _parity,
    "bisection": _bisection,
    "pipeline": _pipeline,
    "sweep": _sweep,
    "ray_train": _ray_train,
    "from_scratch": _from_scratch,
    **{name: functools.partial(_use, name) for name in _USES},
    "transfer": _transfer,
    "finetune": _finetune,
}


def _record(kind: type[T], given: dict[str, Any]) -> T:
    """Returns a dataclass with what is given of its choices."""
    return kind(**{name: given[name] for name in choices_of(kind) if name in given})


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


def _numbers(own: Own, flag: str) -> list[int]:
    text: str = getattr(own, flag)
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError as error:
        raise UserError(f"--{flag}: expected numbers such as 1,2,4. Received: {text!r}") from error
    if min(numbers) < 1:
        raise UserError(f"--{flag}: expected numbers of at least 1. Received: {min(numbers)}")
    return numbers
