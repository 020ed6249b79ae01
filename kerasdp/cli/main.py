"""Runs a recipe: knows the flags that it takes, makes arguments of its command line, and ends the program."""

import atexit
import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

from kerasdp.config import Config
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
from kerasdp.errors import RunError, UserError, from_command_line, say_how_it_ends
from kerasdp.launch import launch
from kerasdp.processes.devices import choose_backend
from kerasdp.reporting.report import drop_stdout

# The groups of the flags of a few recipes.
COMPARISON = "Comparison"
STUDY = "Study of a pipeline"
RAY = "Ray"
SWEEP = "Sweep"
TRAINED = "Trained model"
TRANSFER = "Fine-tuning"

_NUMBERS = Range("numbers such as 1,2,4", lambda text: all(is_count(part.strip()) for part in text.split(",")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own:
    """The choices that are no choices of a run: each is a flag of a few recipes."""

    # fmt: off
    backends: str | None = choice(None, COMPARISON, Range("names of backends, comma-separated"),
        "Instead of --backend, comma-separated.", "those that are installed; of bisection the first two")
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
        takes: the fields of `Config` that are its flags. Empty: all but `without`.
        without: the fields of `Config` that are none.
        defaults: fields whose defaults are others than usual.
    """

    own: Sequence[str] = ()
    takes: Sequence[str] = ()
    without: Sequence[str] = ()
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)

    def choices(self) -> list[Choice]:
        """Returns the choices that are its flags, with its own defaults."""
        known = choices_of(Own) | choices_of(Config)
        names = [name for name in choices_of(Config) if name in (self.takes or known) and name not in self.without]
        return [
            dataclasses.replace(known[name], default=self.defaults.get(name, known[name].default))
            for name in (*self.own, *names)
        ]


_DEVICES = ["backend", "num_devices", "device"]
_DATA = ["dataset", "data_dir", "batch_size"]
_EVALUATION = [*_DEVICES, *_DATA, "precision", "workdir"]
_MODEL = [*_DATA, "model", "optimizer", "learning_rate", "seed", "max_steps", "device", "workdir"]

RECIPES = {
    "train": Recipe(),
    "parity": Recipe(
        own=["backends", "device_counts"],
        takes=[*_MODEL, "precision", "batch_norm", "compile"],
        defaults={"precision": "float32"},  # in TF32 all would differ
    ),
    "bisection": Recipe(own=["backends"], takes=_MODEL, defaults={"max_steps": 2}),
    "pipeline": Recipe(
        own=["split_sizes", "repetitions"],
        without=["strategy", "accumulate", "split_size", "epochs", "max_steps", "tracker", "resume", "keep",
                 "checkpoint_every", "checkpoint_dir", "max_restarts"],
        defaults={"backend": "torch", "strategy": "pipeline"},
    ),
    "sweep": Recipe(own=["trials"], without=["checkpoint_dir"]),
    "ray_train": Recipe(own=["workers"]),
    "from_scratch": Recipe(
        takes=[*_DEVICES, *_DATA, "model", "workdir", "epochs", "learning_rate", "seed", "precision"],
        defaults={"batch_size": 48, "epochs": 8, "learning_rate": 0.05},
    ),
    "predict": Recipe(own=["checkpoint", "output"], takes=_EVALUATION),
    "evaluate": Recipe(own=["checkpoint"], takes=_EVALUATION),
    "export": Recipe(own=["checkpoint", "to"], takes=["backend", "device"], defaults={"num_devices": 1}),
    "transfer": Recipe(
        own=["backbone", "weights", "head_epochs", "fine_tuning_rate"],
        without=["model", "max_steps"],
        defaults={"dataset": "images(size=(160,160))", "optimizer": "adam(learning_rate=0.001)", "batch_size": 32,
                  "epochs": 5},
    ),
    "finetune": Recipe(
        own=["preset", "weights", "lora_rank"],
        without=["model", "data_dir"],
        defaults={"weights": "none", "optimizer": "adam(learning_rate=0.001)", "batch_size": 32, "epochs": 2},
    ),
}  # fmt: skip

# The choices that are flags of any recipe.
CHOICES = [*(choices_of(Config) | choices_of(Own)).values()]
PROGRAM = "KERASDP_PROGRAM"  # in the environment: how the user called the recipe, if not by its file


def help_text(program: str, recipe: Recipe) -> str:
    """Returns the text of a recipe's `--help`: its flags in their groups."""
    command = os.environ.get(PROGRAM, f"python {program}")
    lines = [f"usage: {command} [--flagfile=flags/NAME.flags] [--flag=value ...]"]
    for group, choices in itertools.groupby(recipe.choices(), lambda one: one.group):
        lines += ["", f"{group}:"]
        for one in choices:
            default = f" Default: {one.default_text}." if one.default_text else ""
            text = f"  --{one.flag}: {one.help}{default}"
            lines += textwrap.wrap(text, width=100, subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join(lines)


def read(arguments: list[str], recipe: Recipe) -> dict[str, Any]:
    """Returns what a command line says, by field, and the recipe's own defaults.

    Args:
        arguments: `sys.argv`, the program's name included.
        recipe: which flags there are.

    Raises:
        UserError: if a flag is none of the recipe's.
        SystemExit: after `--help`.
    """
    values = flags.FlagValues()
    for one in recipe.choices():  # numbers as texts: the check of the choices says what is none
        define = flags.DEFINE_boolean if bool in one.kinds else flags.DEFINE_string
        define(one.flag, None, "", flag_values=values)
    flags.DEFINE_boolean("help", False, "", flag_values=values, short_name="h")
    try:
        rest = values(arguments, known_only=False)
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
    given = {one.name: _as_kind(values[one.flag].value, one.kinds) for one in recipe.choices()}
    return recipe.defaults | {name: value for name, value in given.items() if value is not None}


def _as_kind(value: Any, kinds: tuple[type, ...]) -> Any:
    """Returns a text as a number, where a choice is one; what is none as it is."""
    for kind in (int, float):
        if kind in kinds and isinstance(value, str):
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def main(function: Callable[..., Any], flags: str = "train") -> None:
    """Runs a function with the flags of the command line: the main function of a script.

    An error of a run is printed in one line, without a traceback. A mistake of the user has exit code 2.

    Args:
        function: the work of the script. With the flags of `"train"`, `kerasdp.launch` calls `function(runner)` in the
            workers. With the flags of `"evaluate"`, `"predict"` or `"export"`, it calls `function(runner, **own)`. With
            other flags, `function(config, **own)` is called in this process; if it returns False, the exit code is 1.
            `own` holds the flags that only few recipes have, by name; `--help` lists them first.
        flags: the name of a recipe, whose flags the script takes: `"train"`, `"parity"`, `"bisection"`, `"pipeline"`,
            `"ray_train"`, `"sweep"`, `"from_scratch"`, `"evaluate"`, `"predict"`, `"export"`, `"transfer"` or
            `"finetune"`.

    Raises:
        SystemExit: if the exit code is not 0.

    Example:
        ```python
        import keras
        import kerasdp

        def train(runner):
            config = runner.config
            data = kerasdp.load_data(config.dataset)
            model = kerasdp.build_model(config.model, data.input_shape, data.num_classes)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(kerasdp.make_optimizer(config.optimizer), loss)
            model.fit(data.train, epochs=config.epochs, validation_data=data.test)

        if __name__ == "__main__":  # python train.py --gpus=2 --epochs=3
            kerasdp.main(train)
        ```
    """
    try:
        with ending_with_a_line():
            config, own = parse(flags, sys.argv)
            called = functools.partial(function, **own) if own else function
            if flags == "train" or "checkpoint" in own:
                launch(called, config)
            elif called(config) is False:
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


def parse(name: str, arguments: list[str]) -> tuple[Config, dict[str, Any]]:
    """Turns a command line into the choices of a run, with a new workdir if none is given, and the recipe's own.

    Args:
        name: of the recipe.
        arguments: `sys.argv`, the program's name included.

    Raises:
        UserError: if a flag is none of the recipe's, or its value cannot be used.
        SystemExit: after `--help`.
    """
    recipe = RECIPES[name]
    given = read(arguments, recipe)
    record = Own(**{field: given[field] for field in recipe.own if field in given})
    own = {field: getattr(record, field) for field in recipe.own}
    for field in ("checkpoint", "to"):
        if own.get(field, "") is None:
            raise UserError(f"--{field} is needed: {choices_of(Own)[field].help}")
    for field in own.keys() & {"device_counts", "split_sizes"}:
        own[field] = [int(number) for number in own[field].split(",")]
    if own.get("backends") is not None:
        own["backends"] = [choose_backend(backend.strip()) for backend in own["backends"].split(",")]
    values = {field: given[field] for field in choices_of(Config) if field in given}
    if values.get("workdir") is None and (values.get("checkpoint_dir") or not values.get("resume")):
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        values["workdir"] = os.path.join("runs", f"{now}-{os.getpid()}")
    if "device_counts" in own:  # which the other choices must go together with
        values["num_devices"] = max(own["device_counts"])
    config = Config(**values)
    _check_together(name, given, config)
    return config, own


def _check_together(name: str, given: dict[str, Any], config: Config) -> None:
    """Raises if the flags of a recipe do not go together."""
    if name == "from_scratch" and config.precision not in ("auto", "float32", "float64"):
        raise UserError(f"--precision: expected float32 or float64 in the lesson. Received: {config.precision!r}")
    if name == "finetune":
        models = [flag for flag in ("weights", "preset") if given.get(flag, "none") != "none"]
        if len(models) > 1:
            raise UserError("--preset and --weights both name the model: leave out one of them")
        if bool(models) != ("dataset" in given) or ":" not in given.get("dataset", ":"):
            raise UserError("--dataset=FILE.py:FUNCTION goes with --weights or --preset: give both, or none of them")
