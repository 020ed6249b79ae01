"""Runs a recipe: turns its command line into arguments, runs it, and ends the program."""

import atexit
import contextlib
import dataclasses
import datetime
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from kerasdp.cli.flags import RECIPES, Own, define, read, recipe
from kerasdp.config import Config, Request
from kerasdp.config.choices import choices_of
from kerasdp.config.validation import BACKENDS
from kerasdp.errors import (
    EXIT_CODE_OF_INTERRUPT,
    FIELDS_OF_FLAGS,
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
        function: what the recipe does. With the flags of `"train"`, `"evaluate"` and `"predict"` it runs in the
            workers, as `kerasdp.launch` calls it; else it runs here, and False from it is exit code 1.
        flags: which flags there are, by their recipe's name: `"train"`: `function(runner)`; `"parity"`:
            `function(config, backends, device_counts)`; `"bisection"`: `function(config, backends)`; `"pipeline"`:
            `function(config, split_sizes, repetitions)`; `"ray_train"`:
            `function(config, num_workers, cpus_per_worker, grid)`; `"sweep"`: `function(config, space, num_trials)`;
            `"from_scratch"`: `function(config)`; `"evaluate"` and `"predict"`: `function(runner, request)`, with a
            `kerasdp.inference.Request`; `"export"`: `function(config, request, path)`; `"transfer"`:
            `function(config, backbone, weights, head_epochs, fine_tuning_rate)`; `"finetune"`:
            `function(config, base, adapters, prompt)`.
        defaults: with the flags of `"train"`: values of flags that are not given, other than usual.
        unused: with the flags of `"train"`: those that the recipe has no use for, and refuses.

    Raises:
        SystemExit: where the exit code is not 0.
    """
    try:
        with ending_with_a_line():
            if flags == "train":
                launch(function, parse(sys.argv, defaults, unused))
            elif flags in ("evaluate", "predict"):
                config, request = parse_recipe(flags, sys.argv)
                launch(functools.partial(function, request=request), config)
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

_RANGE = re.compile(r"([^.\s]\S*?)\.\.([^.\s]\S*)")


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
    counts = _numbers(own, "device_counts")
    others = len(counts) > 1 or own.other_python is not None
    names = _backends(own) or [name for name in BACKENDS if is_installed(name)][: 1 if others else 2]
    if len(names) != (1 if others else 2):
        expected = "one, with --device_counts or --other_python" if others else "two, as torch,jax"
        raise UserError(f"--backends: expected {expected}. Received: {','.join(names)}")
    if len(counts) > 1 and (counts[0] != 1 or len(counts) > 2 or own.other_python is not None):
        raise UserError(f"--device_counts: expected 1 and another, as 1,2, alone. Received: {own.device_counts}")
    config = _config_on([max(counts)], given)
    first, second = (
        Way(backend=name, num_devices=count, precision=config.precision, python=python)
        for name, count, python in ((names[0], counts[0], ""), (names[-1], counts[-1], own.other_python or ""))
    )
    return config, (first, second)


def _pipeline(given: dict[str, Any], own: Own) -> tuple[Config, list[int], int]:
    """Returns what is trained, split sizes, repetitions."""
    return _config(given, strategy="pipeline"), _numbers(own, "split_sizes"), own.repetitions


def _sweep(given: dict[str, Any], own: Own) -> tuple[Config, dict[str, Any], int | None]:
    """Returns what all runs share, values or ranges by field, and the number of trials.

    Without `--trials` that is None, and all combinations are trained.
    """
    space = _values_by_field(own.sweep)
    if not space:
        raise UserError("a sweep needs choices to try: add --sweep='learning_rate=0.01,0.1; batch_size=32,64'")
    ranges = [name for name, values in space.items() if isinstance(values, tuple)]
    if ranges and own.trials is None:
        raise UserError(f"--sweep: the range of {ranges[0]} needs --trials=20, of which Optuna picks the values")
    return _config(given), space, own.trials


def _ray_train(given: dict[str, Any], own: Own) -> tuple[Config, tuple[int, int], float | None, dict[str, Any] | None]:
    """Returns what is trained, workers (fewest, most), cores of each, a grid."""
    if "sweep" in given and "workers" in given:
        raise UserError("--workers has no effect with --sweep, whose runs have one worker each: leave out one of them")
    grid = _values_by_field(own.sweep)
    fewest, _, most = own.workers.partition(":")
    for name, values in (grid or {}).items():
        if isinstance(values, tuple):
            raise UserError(f"--sweep: {name}: expected values, as 0.01,0.1; ranges are for recipes/sweep.py")
    return _config(given), (int(fewest), int(most or fewest)), own.cpus_per_worker, grid


def _from_scratch(given: dict[str, Any], own: Own) -> tuple[Config]:
    if given.get("precision", "float32") not in ("float32", "float64"):
        raise UserError(f"--precision: expected float32 or float64 in the lesson. Received: {given['precision']!r}")
    return (_config(given),)


def _request(given: dict[str, Any], own: Own) -> tuple[Config, Request]:
    """Returns the run's devices, and what is evaluated or predicted."""
    if "inputs" in given and "dataset" in given:
        raise UserError("--inputs and --dataset both name the data: leave out one of them")
    config = _config(given)
    return config, dataclasses.replace(_record(Request, given), workdir=str(config.workdir))


def _export(given: dict[str, Any], own: Own) -> tuple[Config, Request, str]:
    """Returns a backend, the model, and the file to write."""
    config, request = _request(given, own)
    if own.to is None:
        raise UserError("--to is needed: NAME.keras, NAME.onnx, or a folder, for a SavedModel")
    config = dataclasses.replace(config, num_devices=1, workdir=None, verbose=0)
    return config, dataclasses.replace(request, workdir=".", activation="none"), own.to


def _transfer(given: dict[str, Any], own: Own) -> tuple[Config, str, str, int, float]:
    """Returns the run, the backbone, its weights, epochs of the first fit, rate of the second."""
    dataset = given["dataset"]
    if dataset == "images":
        height, width = map(int, own.size.split(","))
        dataset = f"images(size=({height},{width}))"
    elif "size" in given:
        raise UserError("--size has no effect here: it is that of the images of a folder (--data_dir)")
    return _config(given, dataset=dataset), own.backbone, own.weights, own.head_epochs, own.fine_tuning_rate


def _finetune(given: dict[str, Any], own: Own) -> tuple[Config, dict[str, Any], dict[str, Any], str | None]:
    """Returns the run, arguments of `load_pretrained` (none: the recipe's own model) and `add_adapters` (none: LoRA is
    not used), and what to continue."""
    base: dict[str, Any] = {}
    if own.preset is not None:
        base = {"preset": own.preset, "task": own.task}
    elif own.weights != "none":
        base = {"weights": own.weights, "model": given.get("model")}
    if own.preset is not None and own.weights != "none":
        raise UserError("--preset and --weights both name the model: leave out one of them")
    unused = {
        "it is the class of --preset": ["task"] if own.preset is None else [],
        "the recipe trains a model of its own: add --weights or --preset": [] if base else ["dataset", "data_dir"],
        "it makes the model of which --weights has the weights": [] if "weights" in base else ["model"],
        "all weights train: add --lora_rank=8": []
        if own.lora_rank
        else ["lora_alpha", "lora_targets", "also_train", "frozen"],
    }
    for reason, name in ((reason, name) for reason, names in unused.items() for name in names):
        if name in given:
            raise UserError(f"--{name} has no effect here: {reason}")
    if base and "dataset" not in given:
        raise UserError("--dataset is needed, to fine-tune on: a name, or FILE.py:FUNCTION")
    adapters = {"rank": own.lora_rank, "alpha": own.lora_alpha, "targets": own.lora_targets}
    adapters |= {"also_train": own.also_train, "frozen": own.frozen}
    return _config(given), base, adapters if own.lora_rank else {}, own.prompt


_ARGUMENTS: dict[str, Callable[[dict[str, Any], Own], tuple[Any, ...]]] = {
    "train": lambda given, own: (_config(given),),
    "parity": _parity,
    "bisection": _bisection,
    "pipeline": _pipeline,
    "sweep": _sweep,
    "ray_train": _ray_train,
    "from_scratch": _from_scratch,
    "evaluate": _request,
    "predict": _request,
    "export": _export,
    "transfer": _transfer,
    "finetune": _finetune,
}


def _values_by_field(text: str | None) -> dict[str, Any] | None:
    """Returns the values of each field in `flag=value,value; flag=least..most`: a list, or the ends of a range.

    Commas in brackets belong to a value. None if there is no text.

    Raises:
        UserError: if there is no such flag, or a value is none of it.
    """
    if text is None:
        return None
    found: dict[str, Any] = {}
    known = define()
    for part in filter(None, map(str.strip, text.split(";"))):
        name, equals, values = map(str.strip, part.partition("="))
        if not equals or name not in known:
            raise UserError(
                f"--sweep: expected flags with values, as 'learning_rate=0.01,0.1; batch_size=32'. Received: {part!r}"
            )
        parser = known[name].parser
        ends = _RANGE.fullmatch(values) if parser.syntactic_help in ("an integer", "a number") else None
        texts = ends.groups() if ends else re.split(r",(?![^(]*\))", values)
        try:
            parsed = [parser.parse(value.strip()) for value in texts]
        except ValueError as error:
            raise UserError(f"--sweep: {name}: {' '.join(str(error).split())}. Received: {values!r}") from error
        found[FIELDS_OF_FLAGS.get(name, name)] = tuple(parsed) if ends else parsed
    return found


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
