"""Runs a recipe: knows the flags that it takes, makes arguments of its command line, and ends the program."""

import atexit
import contextlib
import dataclasses
import datetime
import difflib
import functools
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from kerasdp.config import BACKENDS, Config
from kerasdp.config.choices import (
    COUNT,
    FROM_0,
    POSITIVE,
    Choice,
    Range,
    check_choices,
    choice,
    choices_of,
    is_count,
)
from kerasdp.errors import FIELDS_OF_FLAGS, RunError, UserError, from_command_line, say_how_it_ends
from kerasdp.launch import launch
from kerasdp.processes.devices import choose_backend, is_installed
from kerasdp.reporting.report import drop_stdout

# The groups of the flags of a few recipes.
COMPARISON = "Comparison"
STUDY = "Study of a pipeline"
RAY = "Ray"
SWEEP = "Sweep"
TRAINED = "Trained model"
TRANSFER = "Fine-tuning"

_NUMBERS = Range("numbers such as 1,2,4", lambda text: all(is_count(part.strip()) for part in text.split(",")))
_SIZE = Range("height and width, as 160,160", lambda text: _NUMBERS.holds(text) and text.count(",") == 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own:
    """The choices that are no choices of a run: each is a flag of a few recipes."""

    # fmt: off
    backends: str | None = choice(None, COMPARISON, Range("names of backends, comma-separated"),
        "Instead of --backend, comma-separated.", "all that are installed")
    device_counts: str = choice("1,2,4", COMPARISON, _NUMBERS,
        "Instead of --gpus: numbers of devices, comma-separated.")

    split_sizes: str = choice("1,3,5,8,10,12,20,40,60", STUDY, _NUMBERS,
        "Samples per micro-batch to try, comma-separated.")
    repetitions: int = choice(10, STUDY, Range("at least 2, for a deviation", lambda number: number >= 2),
        "Epochs to measure, of each way; one more, which compiles, comes first.")

    workers: int = choice(1, RAY, COUNT, "Workers of the run, each with --gpus devices.")
    trials: int = choice(20, SWEEP, COUNT, "Runs whose choices Optuna picks, for the lowest validation loss.")

    checkpoint: str | None = choice(None, TRAINED, Range("a file or a folder"),
        "Model to use: the --workdir of a run, a folder or URL of checkpoints, or one file: .safetensors (a "
        "checkpoint) or .keras, of any backend.")
    output: str | None = choice(None, TRAINED,
        Range("a file that ends in .npy or .csv", lambda path: path.endswith((".npy", ".csv"))),
        "File for the predictions: .npy or .csv.", "predictions.csv in --workdir")
    to: str | None = choice(None, TRAINED, Range("a file or a folder", bool),
        "File to write: NAME.keras, NAME.weights.h5, NAME.onnx, or a folder, for a SavedModel.")

    backbone: str = choice("MobileNetV2", TRANSFER, Range("a model"), "Model of keras.applications.")
    weights: str = choice("imagenet", TRANSFER, Range("a file"),
        "Weights to begin with. transfer: imagenet (a download), none, or a .weights.h5 file. finetune: the --workdir "
        "of a run, a folder of checkpoints, or a file: .safetensors, .keras.")
    size: str = choice("160,160", TRANSFER, _SIZE,
        "Height and width to which images of a folder are resized.")
    head_epochs: int = choice(5, TRANSFER, POSITIVE, "Epochs of the first fit, which trains the new head alone.")
    fine_tuning_rate: float = choice(1e-5, TRANSFER, POSITIVE, "Learning rate of the second fit (Adam).")

    preset: str | None = choice(None, TRANSFER, Range("a preset of KerasHub"),
        "Preset of KerasHub, instead of --weights: a name, which is downloaded, or a folder that save_to_preset wrote.",
        "none")
    lora_rank: int = choice(0, TRANSFER, FROM_0,
        "Rank of the adapters (LoRA) that train beside frozen weights; 0: all weights train.")
    # fmt: on

    def __post_init__(self) -> None:
        check_choices(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which flags a recipe takes.

    Args:
        own: fields of `Own` that are its flags.
        takes: of a recipe that does not train with `fit`: the fields that are its flags.
        reason: what is said there of other flags.
        refused: of a recipe that trains: the fields of `Config` that are no flags, by what to do instead.
        defaults: fields whose defaults are others than usual.
    """

    own: Sequence[str] = ()
    takes: Sequence[str] = ()
    reason: str = ""
    refused: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)

    def choices(self) -> list[Choice]:
        """Returns the choices that are its flags."""
        known = choices_of(Own) | choices_of(Config)
        refused = {name for names in self.refused.values() for name in names}
        names = [*self.own, *(self.takes or (name for name in choices_of(Config) if name not in refused))]
        return [
            dataclasses.replace(known[name], default=self.defaults.get(name, known[name].default)) for name in names
        ]

    def flags(self) -> list[str]:
        """Returns the names of its flags."""
        return [flag for choice in self.choices() for flag in choice.flags]

    def reason_against(self, field: str) -> str:
        """Returns what is said of the flag of a field that it does not take."""
        for reason, names in self.refused.items():
            if field in names:
                return reason
        owner = next((name for name, recipe in RECIPES.items() if field in (*recipe.own, *recipe.takes)), "train")
        return self.reason or f"it belongs to recipes/{owner}.py"


_FILES = ["tracker", "resume", "keep", "checkpoint_every", "checkpoint_dir", "max_restarts"]
_DEVICES = ["backend", "num_devices", "device"]
_DATA = ["dataset", "data_dir", "batch_size"]
_EVALUATION = [*_DEVICES, *_DATA, "precision", "workdir"]
_NOT_TRAINED = "a trained model is used here, and nothing is trained"

RECIPES = {
    "train": Recipe(),
    "parity": Recipe(
        own=["backends", "device_counts"],
        refused={
            "use --backends and --device_counts": ["backend", "num_devices"],
            "what is compared differs in backend and number of devices alone": [
                "strategy", "accumulate", "tracker",
            ],
        },
    ),
    "bisection": Recipe(
        own=["backends"],
        takes=[*_DATA, "model", "optimizer", "learning_rate", "seed", "precision", "max_steps",
               "device", "workdir"],
        reason="a few steps are computed on one device, operation by operation, and nothing is trained",
        defaults={"precision": "float64", "max_steps": 2},
    ),
    "pipeline": Recipe(
        own=["split_sizes", "repetitions"],
        refused={
            "a study trains on one device, and as a pipeline": ["strategy", "accumulate"],
            "use --split_sizes": ["split_size"],
            "use --repetitions": ["epochs", "max_steps"],
            "a study keeps nothing of what it trains": _FILES,
        },
    ),
    "sweep": Recipe(
        own=["trials"],
        refused={
            "each run of a sweep has its checkpoints in its own folder": ["checkpoint_dir"],
        },
    ),
    "ray_train": Recipe(
        own=["workers"],
    ),
    "from_scratch": Recipe(
        takes=[*_DEVICES, *_DATA, "model", "workdir", "epochs", "learning_rate", "seed", "precision"],
        reason="the lesson trains LeNet with plain SGD, and keeps its losses alone",
        defaults={"batch_size": 48, "epochs": 8, "learning_rate": 0.05},
    ),
    "predict": Recipe(own=["checkpoint", "output"], takes=_EVALUATION, reason=_NOT_TRAINED),
    "evaluate": Recipe(own=["checkpoint"], takes=_EVALUATION, reason=_NOT_TRAINED),
    "export": Recipe(
        own=["checkpoint", "to"], takes=["backend", "device"], reason=_NOT_TRAINED, defaults={"num_devices": 1},
    ),
    "transfer": Recipe(
        own=["backbone", "weights", "size", "head_epochs", "fine_tuning_rate"],
        refused={
            "use --backbone": ["model"],
            "use --head_epochs and --epochs": ["max_steps"],
        },
        defaults={"dataset": "images", "optimizer": "adam(learning_rate=0.001)", "batch_size": 32, "epochs": 5},
    ),
    "finetune": Recipe(
        own=["preset", "weights", "lora_rank"],
        refused={
            "the model has been built": ["model"],
            "the data come from your function: --dataset=mine.py:data": ["data_dir"],
        },
        defaults={"weights": "none", "optimizer": "adam(learning_rate=0.001)", "batch_size": 32, "epochs": 2},
    ),
}  # fmt: skip


def recipe(flags: str = "train", defaults: dict[str, Any] | None = None, unused: Iterable[str] = ()) -> Recipe:
    """Returns what a recipe takes that calls `kerasdp.main` with these arguments."""
    known = RECIPES[flags]
    others = {FIELDS_OF_FLAGS.get(name, name): value for name, value in (defaults or {}).items()}
    refused = {"this recipe has its own, or none": [FIELDS_OF_FLAGS.get(name, name) for name in unused]}
    return dataclasses.replace(known, refused={**known.refused, **refused}, defaults=known.defaults | others)


# The choices that are flags of any recipe.
CHOICES = [*(choices_of(Config) | choices_of(Own)).values()]
PROGRAM = "KERASDP_PROGRAM"  # in the environment: how the user called the recipe, if not by its file


def in_groups(choices: Iterable[Choice]) -> dict[str, list[Choice]]:
    """Returns choices by their groups, in their order."""
    groups: dict[str, list[Choice]] = {}
    for one in choices:
        groups.setdefault(one.group, []).append(one)
    return groups


def help_text(program: str, recipe: Recipe) -> str:
    """Returns the text of a recipe's `--help`: its flags in their groups."""
    command = os.environ.get(PROGRAM, f"python {program}")
    lines = [f"usage: {command} [--flagfile=flags/NAME.flags] [--flag=value ...]"]
    for group, choices in in_groups(recipe.choices()).items():
        lines += ["", f"{group}:"]
        for one in choices:
            names = ", ".join(f"--{flag}" for flag in reversed(one.flags))
            default = f" Default: {one.default_text}." if one.default_text else ""
            text = f"  {names}: {one.help}{default}"
            lines += textwrap.wrap(text, width=100, subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join(lines)


def _define(recipe: Recipe) -> flags.FlagValues:
    """Returns the flags of a recipe, not read yet. Numbers are texts: the check of the choices says what is none."""
    values = flags.FlagValues()
    for one in recipe.choices():
        *others, name = one.flags
        define = flags.DEFINE_boolean if bool in one.kinds else flags.DEFINE_string
        define(name, None, "", flag_values=values)
        for other in others:
            flags.DEFINE_alias(other, name, flag_values=values)
    flags.DEFINE_boolean("help", False, "", flag_values=values, short_name="h")
    flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), flags.ArgumentSerializer(), "flagfile", "", ""), values)
    return values


def read(arguments: list[str], recipe: Recipe) -> dict[str, Any]:
    """Returns what a command line says, by field, and the recipe's own defaults.

    Args:
        arguments: `sys.argv`, the program's name included.
        recipe: which flags there are.

    Raises:
        UserError: if a flag is unknown, or none of the recipe's.
        SystemExit: after `--help`.
    """
    values = _define(recipe)
    try:
        rest = values(arguments, known_only=False)
    except flags.UnrecognizedFlagError as error:
        raise UserError(_unknown(error.flagname, recipe, values)) from error
    except flags.Error as error:
        raise UserError(f"{' '.join(str(error).split())}; --help lists all flags") from error
    if values["help"].value:
        try:
            print(help_text(arguments[0], recipe), flush=True)
        except BrokenPipeError:  # `--help | head`
            drop_stdout()
        raise SystemExit(0)
    if len(rest) > 1:
        raise UserError(f"expected flags only. Received: {' '.join(rest[1:])!r}; --help lists all flags")
    given = {one.name: _as_kind(values[one.flags[-1]].value, one.kinds) for one in recipe.choices()}
    return recipe.defaults | {name: value for name, value in given.items() if value is not None}


def _as_kind(value: Any, kinds: tuple[type, ...]) -> Any:
    """Returns a text as a number, where a choice is one; what is none as it is."""
    for kind in (int, float):
        if kind in kinds and isinstance(value, str):
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def _unknown(name: str, recipe: Recipe, known: Iterable[str]) -> str:
    """Returns what to say of a flag that there is not, or that the recipe does not take."""
    fields = {flag: one.name for one in CHOICES for flag in one.flags}
    refused = {flag: recipe.reason_against(field) for flag, field in fields.items() if flag not in recipe.flags()}
    if name in refused:
        return f"--{name} has no effect here: {refused[name]}"
    flags_of_fields = {one.name: one.flags[-1] for one in CHOICES}
    near = difflib.get_close_matches(name, [*known, *fields, *flags_of_fields], n=1)
    flag = flags_of_fields.get(near[0], near[0]) if near else ""
    if flag in refused:
        return f"there is no flag --{name}, and --{flag} has no effect here: {refused[flag]}; --help lists all flags"
    return f"there is no flag --{name}{f'; did you mean --{flag}?' if flag else '.'} --help lists all flags"


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
    except (RunError, KeyboardInterrupt) as error:
        sys.exit(say_how_it_ends(error))


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


def _bisection(given: dict[str, Any], own: Own) -> tuple[Config, tuple[Any, Any]]:
    """Returns what is trained, and the two ways."""
    from kerasdp.parity import Way

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
