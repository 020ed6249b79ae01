"""Defines the flags, and turns a command line into a `Config`."""

import dataclasses
import datetime
import os
import textwrap
from collections.abc import Callable
from typing import Any

from absl import flags

from kerasdp.benchmark.contenders import PEERS, SHAPES
from kerasdp.config import Config, validation
from kerasdp.errors import UserError
from kerasdp.runtime.devices import choose_backend

FLAGS = flags.FlagValues()
GROUPS: dict[str, list[str]] = {}

_DEFAULTS = Config()
_OF_ONE_PIPELINE = ["strategy", "accumulate", "split_size", "micro_batches", "epochs", "max_steps"]
_NOT_COMPARED = ["strategy", "accumulate", "gradient_precision"]
_NOT_MEASURED = ["strategy", "accumulate", "stages", "cut_at", "balance", "split_size", "micro_batches", "schedule"]
_NOT_MEASURED += ["optimizer", "learning_rate", "lr_base_batch", "kernel_initializer"]
_NOT_STUDIED = ["tensorboard", "resume", "export", "keep", "checkpoint_every", "max_restarts"]
_COMPARISON = "Comparison (recipes/parity.py and recipes/benchmark.py only)"
_STUDY = "Study of a pipeline (recipes/pipeline.py only)"
_BENCHMARK = "Benchmark (recipes/benchmark.py only)"


def _define(group: str, name: str, kind: Callable[..., Any], default: Any, text: str) -> None:
    kind(name, default, text, flag_values=FLAGS)
    GROUPS.setdefault(group, []).append(name)


def _define_flags_of_training() -> None:
    text, number, real = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_float
    names = {key: ", ".join(getattr(validation, key)) for key in ("BACKENDS", "MODELS", "DATASETS", "PRECISIONS")}

    group = "Backend and devices"
    _define(group, "backend", text, None, f"{names['BACKENDS']}. Default: $KERAS_BACKEND, else the first installed.")
    _define(group, "gpus", number, None, "Devices to train on. Default: all GPUs, or 1. "
            "Without a GPU: that many virtual CPU devices.")  # fmt: skip
    _define(group, "device", text, _DEFAULTS.device, "gpu, cpu, or auto: GPUs if there are any, else the CPU.")
    _define(
        group, "precision", text, _DEFAULTS.precision, f"{names['PRECISIONS']}: precision of the layers' arithmetic."
    )
    _define(group, "gradient_precision", text, _DEFAULTS.gradient_precision, "float32, or bfloat16, which halves "
            "what devices send when they exchange gradients (torch, tensorflow).")  # fmt: skip

    _define(group, "compile", text, _DEFAULTS.compile, "on, off, or auto: training steps as one compiled graph "
            "on torch, in runs of 1,000 steps or more. jax and tensorflow always compile.")  # fmt: skip
    _define(group, "data_on_device", text, _DEFAULTS.data_on_device, "on, off, or auto: inputs in memory stay on every "
            "device; auto: on GPUs, up to 1 GiB.")  # fmt: skip

    group = "Models cut over several devices"
    _define(group, "strategy", text, _DEFAULTS.strategy, "What the devices share: the batch (data); the model, cut "
            "into stages (pipeline); or each layer's output channels (tensor; jax only).")  # fmt: skip
    _define(group, "stages", number, None, "Stages of a pipeline. Default: one per device.")
    _define(group, "cut_at", text, None, "Layers after which to cut, comma-separated. Default: balanced.")
    _define(group, "balance", text, _DEFAULTS.balance, "What the stages get equal shares of: time (measured), flops, "
            "parameters.")  # fmt: skip
    _define(group, "split_size", text, None, "Samples per micro-batch, or auto: the fastest, by a short search.")
    _define(
        group,
        "micro_batches",
        number,
        None,
        "Number of micro-batches, instead of --split_size. Default: two per stage.",
    )
    _define(group, "schedule", text, _DEFAULTS.schedule, "gpipe: all forward passes first; 1f1b: backward passes as "
            "soon as possible (torch, jax); interleaved1f1b: with several stages per device (torch).")  # fmt: skip

    group = "Model and data"
    _define(group, "model", text, _DEFAULTS.model, f"{names['MODELS']}, or your own: path/to/file.py:function or "
            "package.module:function, called as f(input_shape=, num_classes=), which returns a Keras model that "
            "gives logits.")  # fmt: skip
    _define(group, "dataset", text, _DEFAULTS.dataset, f"{names['DATASETS']}, or your own: file.py:function, which "
            "returns (x_train, y_train), (x_test, y_test). Arguments: 'synthetic(shape=(32,32,3), num_classes=100)', "
            "'images(size=(64,64))'.")  # fmt: skip
    _define(group, "data_dir", text, None, "Folder of the data: IDX files for mnist, fashion_mnist and cifar10; for "
            "images a sub-folder per class.")  # fmt: skip

    group = "Training"
    _define(group, "batch_size", number, _DEFAULTS.batch_size, "Samples per step over all devices: the global batch.")
    _define(group, "accumulate", number, _DEFAULTS.accumulate, "Micro-batches into which each device cuts its samples, "
            "one after the other, for batches larger than its memory. The gradient is the same; batch norm takes its "
            "statistics from each micro-batch.")  # fmt: skip
    _define(group, "epochs", number, _DEFAULTS.epochs, "Passes over the training data.")
    _define(group, "max_steps", number, None, "Ends the run after this many updates.")
    _define(group, "optimizer", text, _DEFAULTS.optimizer, "Any Keras optimizer: adam, 'sgd(momentum=0.9)', ...")
    _define(group, "learning_rate", real, None, "Learning rate. Default: that of --optimizer.")
    _define(group, "lr_base_batch", number, None, "Multiplies the learning rate by batch_size over this number.")
    _define(
        group,
        "kernel_initializer",
        text,
        None,
        "Keras initializer of every kernel, as 'random_normal(stddev=0.01)'. Default: the model's.",
    )
    _define(group, "batch_norm", text, _DEFAULTS.batch_norm, "Statistics over the global batch (sync) or over each "
            "replica's shard of it (replica).")  # fmt: skip
    _define(group, "seed", number, _DEFAULTS.seed, "Seed of initial weights, sample order and dropout.")


def _define_flags_of_files() -> None:
    text, number, real, switch = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_float, flags.DEFINE_boolean

    group = "Output"
    _define(group, "workdir", text, None, "Folder for the files of the run. Default: a new one in runs/.")
    _define(group, "log_every", number, _DEFAULTS.log_every, "Steps between two lines of steps.jsonl.")
    _define(
        group,
        "verbose",
        number,
        None,
        "0: nothing, 1: progress bar, 2: a line per epoch. Default: a bar in a terminal.",
    )
    _define(group, "tensorboard", switch, _DEFAULTS.tensorboard, "Write event files into the workdir.")
    _define(group, "export", text, None, "File for the finished model, as plain Keras: NAME.keras or NAME.weights.h5.")

    group = "Checkpoints and faults"
    _define(group, "checkpoint_every", text, _DEFAULTS.checkpoint_every, "epoch; 50: also every 50 steps; 10m: also "
            "every 10 minutes; never.")  # fmt: skip
    _define(
        group, "keep", number, _DEFAULTS.keep, "Number of newest checkpoints to keep; the best one is kept as well."
    )
    _define(group, "resume", switch, _DEFAULTS.resume, "Resume from the newest checkpoint in --workdir, on any backend "
            "and number of devices; without one, start from the beginning.")  # fmt: skip
    _define(group, "max_restarts", number, _DEFAULTS.max_restarts, "How often to restart from the last checkpoint "
            "when a worker dies or hangs.")  # fmt: skip
    _define(group, "hang_timeout", real, None, "Seconds without a step after which the run is ended, or restarted; "
            "more than the longest step takes, compilation included. Default: none.")  # fmt: skip


def _define_flags_of_recipes() -> None:
    text, number = flags.DEFINE_string, flags.DEFINE_integer

    group = _COMPARISON
    _define(group, "backends", text, None, "Instead of --backend, comma-separated. Default: all that are installed.")
    _define(group, "device_counts", text, "1,2,4", "Instead of --gpus: numbers of devices, comma-separated.")

    group = _STUDY
    _define(group, "split_sizes", text, "1,3,5,8,10,12,20,40,60", "Samples per micro-batch to try, comma-separated.")
    _define(group, "repetitions", number, 10, "Epochs to measure, of each way; one more, which compiles, comes first.")

    group = _BENCHMARK
    _define(group, "peers", text, None, "What to measure next to kerasdp, comma-separated: "
            f"{', '.join(PEERS)}; or none. Default: all that can train the same on --backends.")  # fmt: skip
    _define(group, "rounds", number, 5, "How often each is measured, in turn.")
    _define(group, "steps_per_round", number, 20, "Training steps of each round.")


_define_flags_of_training()
_define_flags_of_files()
_define_flags_of_recipes()
flags.DEFINE_boolean("help", False, "Print this help.", flag_values=FLAGS, short_name="h")
flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), flags.ArgumentSerializer(), "flagfile", "", ""), FLAGS)


def help_text(program: str) -> str:
    """Returns the text of `--help`: the flags in their groups."""
    lines = [f"usage: python {program} [--flagfile=flags/NAME.flags] [--flag=value ...]"]
    for group, names in GROUPS.items():
        lines += ["", f"{group}:"]
        for name in names:
            flag = FLAGS[name]
            default = "" if flag.default in (None, False) else f" Default: {flag.default}."
            lines.append(textwrap.fill(
                f"--{name}: {flag.help}{default}", width=100, initial_indent="  ", subsequent_indent="      "
            ))  # fmt: skip
    return "\n".join(lines)


def parse(arguments: list[str]) -> Config:
    """Turns a command line into a `Config`.

    Args:
        arguments: `sys.argv`, the program's name included.

    Raises:
        UserError: if a flag is unknown or its value cannot be used.
        SystemExit: after `--help`.
    """
    _read(arguments, without=_of_recipes(_COMPARISON, _STUDY, _BENCHMARK))
    return _config()


def parse_comparison(arguments: list[str]) -> tuple[Config, list[str] | None, list[int]]:
    """Turns the command line of a comparison into what is trained, backends (None: all installed), device counts.

    Args and errors as in `parse`.
    """
    _read(
        arguments,
        without=dict.fromkeys(["backend", "gpus"], "use --backends and --device_counts")
        | dict.fromkeys(_NOT_COMPARED, "what is compared differs in backend and number of devices alone")
        | _of_recipes(_STUDY, _BENCHMARK),
    )
    names, numbers = _backends(), _numbers("device_counts")
    config = _config()
    for number in numbers:
        dataclasses.replace(config, num_devices=number)  # raises if there is no such number
    return config, names, numbers


def parse_study(arguments: list[str]) -> tuple[Config, list[int], int]:
    """Turns the command line of a study of a pipeline into what is trained, split sizes, repetitions.

    Args and errors as in `parse`.
    """
    _read(
        arguments,
        without=_of_recipes(_COMPARISON, _BENCHMARK)
        | dict.fromkeys(_OF_ONE_PIPELINE, "use --split_sizes and --repetitions")
        | dict.fromkeys(_NOT_STUDIED, "a study keeps nothing of what it trains"),
    )
    sizes = _numbers("split_sizes")
    if _value("repetitions") < 2:
        raise UserError(f"--repetitions: expected at least 2, for a deviation. Received: {FLAGS['repetitions'].value}")
    return _config(strategy="pipeline"), sizes, _value("repetitions")


def parse_benchmark(arguments: list[str]) -> tuple[Config, list[str] | None, list[int], list[str] | None, int, int]:
    """Turns the command line of a benchmark into what is trained, backends, device counts, peers, rounds, their steps.

    None for backends or peers: all there are. Args and errors as in `parse`.
    """
    _read(
        arguments,
        without=dict.fromkeys(["backend", "gpus"], "use --backends and --device_counts")
        | _of_recipes(_STUDY)
        | dict.fromkeys(_NOT_MEASURED, "all contenders train alike, with data parallelism and SGD")
        | dict.fromkeys(["epochs", "max_steps"], "use --rounds and --steps_per_round")
        | dict.fromkeys(_NOT_STUDIED, "a benchmark keeps nothing of what it trains"),
    )
    for flag in ("rounds", "steps_per_round"):
        if _value(flag) < 1:
            raise UserError(f"--{flag}: expected a whole number of at least 1. Received: {_value(flag)}")
    counts = _numbers("device_counts") if FLAGS["device_counts"].present else [1]
    # Which all contenders can train; and what the frameworks do by themselves.
    defaults = {"model": "convnet", "batch_norm": "replica"}
    config = _config(**{name: value for name, value in defaults.items() if not FLAGS[name].present})
    if config.model in SHAPES and FLAGS["dataset"].present:
        raise UserError(f"--dataset has no effect here: {config.model} is measured on random images")
    for count in counts:
        dataclasses.replace(config, num_devices=count)  # raises if there is no such number
    peers = _value("peers")
    names = None if peers is None else [name.strip() for name in peers.split(",") if name.strip() != "none"]
    return config, _backends(), counts, names, _value("rounds"), _value("steps_per_round")


def _of_recipes(*groups: str) -> dict[str, str]:
    """Returns the flags of these groups, each with the recipe that it belongs to."""
    recipes = {_COMPARISON: "parity", _STUDY: "pipeline", _BENCHMARK: "benchmark"}
    return {name: f"it belongs to recipes/{recipes[group]}.py" for group in groups for name in GROUPS[group]}


def _backends() -> list[str] | None:
    names = _value("backends")
    return None if names is None else [choose_backend(name.strip()) for name in names.split(",")]


def _numbers(flag: str) -> list[int]:
    try:
        numbers = [int(number) for number in _value(flag).split(",")]
    except ValueError as error:
        raise UserError(f"--{flag}: expected numbers such as 1,2,4. Received: {_value(flag)!r}") from error
    if min(numbers) < 1:
        raise UserError(f"--{flag}: expected numbers of at least 1. Received: {min(numbers)}")
    return numbers


def _read(arguments: list[str], without: dict[str, str]) -> None:
    """Sets `FLAGS` from a command line, on which the flags `without` are refused, with what to do instead."""
    FLAGS.unparse_flags()
    for name in FLAGS:
        FLAGS[name].present = 0
    try:
        rest = FLAGS(arguments, known_only=False)
    except flags.Error as error:
        raise UserError(f"{' '.join(str(error).split())}; --help lists all flags") from error
    if _value("help"):
        print(help_text(arguments[0]))
        raise SystemExit(0)
    if len(rest) > 1:
        raise UserError(f"expected flags only. Received: {' '.join(rest[1:])!r}; --help lists all flags")
    for name, instead in without.items():
        if FLAGS[name].present:
            raise UserError(f"--{name} has no effect here: {instead}")


def _value(flag: str) -> Any:
    return FLAGS[flag].value


def _config(**choices: Any) -> Config:
    of_recipes = (_COMPARISON, _STUDY, _BENCHMARK)
    values = {name: _value(name) for group, names in GROUPS.items() for name in names if group not in of_recipes}
    values["num_devices"] = values.pop("gpus")
    values["num_stages"] = values.pop("stages")
    if values["workdir"] is None and not values["resume"]:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        values["workdir"] = os.path.join("runs", f"{now}-{os.getpid()}")
    return Config(**(values | choices))
