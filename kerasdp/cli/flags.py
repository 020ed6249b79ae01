"""Defines the flags, in groups, and writes the text of `--help`."""

import os
import textwrap
from collections.abc import Callable
from typing import Any

from absl import flags

from kerasdp.benchmark.contenders import PEERS
from kerasdp.config import Config, validation

FLAGS = flags.FlagValues()
GROUPS: dict[str, list[str]] = {}
PROGRAM = "KERASDP_PROGRAM"  # in the environment: how the user called the recipe, if not by its file

_DEFAULTS = Config()
# Groups that belong to one recipe alone.
COMPARISON = "Comparison (recipes/parity.py and recipes/benchmark.py only)"
STUDY = "Study of a pipeline (recipes/pipeline.py only)"
BENCHMARK = "Benchmark (recipes/benchmark.py only)"
RAY = "Ray (recipes/ray_train.py only)"
SWEEP = "Sweep (recipes/sweep.py and recipes/ray_train.py only)"
SEARCH = "Search (recipes/sweep.py only)"
INFERENCE = "Evaluation and prediction (recipes/evaluate.py and recipes/predict.py only)"
TRANSFER = "Fine-tuning (recipes/transfer.py only)"
EXPORT = "Export (recipes/export.py only)"
PREDICTION = "Prediction (recipes/predict.py only)"


def _define(group: str, name: str, kind: Callable[..., Any], default: Any, text: str) -> None:
    kind(name, default, text, flag_values=FLAGS)
    GROUPS.setdefault(group, []).append(name)


def _define_flags_of_devices() -> None:
    text, number = flags.DEFINE_string, flags.DEFINE_integer

    group = "Backend and devices"
    _define(
        group,
        "backend",
        text,
        None,
        f"{', '.join(validation.BACKENDS)}. Default: $KERAS_BACKEND, else that of keras.json, else the first "
        "installed.",
    )
    _define(group, "gpus", number, None, "Devices to train on: GPUs, TPUs, or, where there are none, that many virtual "
            "CPU devices. Default: all GPUs or TPUs, or 1.")  # fmt: skip
    flags.DEFINE_alias("devices", "gpus", flag_values=FLAGS)
    FLAGS["devices"].help = "Another name of --gpus."
    GROUPS[group].append("devices")
    _define(group, "device", text, _DEFAULTS.device, "gpu, tpu (jax), cpu, or auto: GPUs or TPUs if there are "
            "any, else the CPU.")  # fmt: skip
    _define(
        group,
        "precision",
        text,
        _DEFAULTS.precision,
        f"{', '.join(validation.PRECISIONS)}: precision of the layers' arithmetic.",
    )
    _define(group, "gradient_precision", text, _DEFAULTS.gradient_precision, "float32, or bfloat16, which halves "
            "what devices send when they exchange gradients (torch, tensorflow).")  # fmt: skip
    _define(group, "reduce", text, None, "Where the gradients of several devices are added: device, or host: in host "
            "memory, which is slower and leaves device memory free (torch, tensorflow). Default: device.")  # fmt: skip
    _define(group, "device_shares", text, None, "Shares of the batch for devices of unequal speed: 3,1, or auto, which "
            "measures first (torch, tensorflow). Default: equal shards.")  # fmt: skip
    _define(group, "compile", text, _DEFAULTS.compile, "on, off, or auto: a step of training or evaluation as one "
            "compiled graph on torch, in runs with 1,000 of its kind or more. On jax and tensorflow the model's "
            "jit_compile decides, as in Keras.")  # fmt: skip
    _define(group, "check", text, _DEFAULTS.check, "first: before the first update on several devices, a few samples "
            "go through the model whole and split over all; the run ends if they differ. Or off.")  # fmt: skip
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
    _define(group, "pipeline_schedule", text, _DEFAULTS.pipeline_schedule, "gpipe: all forward passes first; 1f1b: "
            "backward passes as soon as possible; interleaved1f1b: several stages per device (torch).")  # fmt: skip


def _define_flags_of_machines() -> None:
    text, number = flags.DEFINE_string, flags.DEFINE_integer

    group = "Several machines (docs/many-machines.md)"
    _define(group, "hosts", text, None, "Number of machines, or the least and the most as 1:3 (torch), each with the "
            "devices of --gpus. Default: what torchrun, mpirun, TF_CONFIG or srun say, else 1.")  # fmt: skip
    _define(group, "host_rank", number, None, "Number of this machine, from 0. Default: $JOB_COMPLETION_INDEX.")
    _define(group, "coordinator", text, None, "Where machine 0 listens for the others: ADDRESS:PORT.")
    _define(group, "interface", text, None, "Network interface between the machines. Default: the one on the way to "
            "--coordinator.")  # fmt: skip
    _define(group, "dry_run", flags.DEFINE_boolean, _DEFAULTS.dry_run, "Print what would run where, on any number of "
            "--hosts and --gpus, what it sends and what it holds; nothing is started.")  # fmt: skip


def _define_flags_of_training() -> None:
    text, number, real = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_float
    models, datasets = ", ".join(validation.MODELS), ", ".join(validation.DATASETS)

    group = "Model and data"
    _define(group, "model", text, _DEFAULTS.model, f"{models}, or your own: path/to/file.py:function or "
            "package.module:function, called as f(input_shape=, num_classes=), which returns a Keras model that "
            "gives logits.")  # fmt: skip
    _define(group, "dataset", text, _DEFAULTS.dataset, f"{datasets}, or your own: file.py:function, which "
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
    _define(group, "schedule", text, _DEFAULTS.schedule, "constant, or how the rate falls: cosine, linear (both to 0 "
            "at the end), step(every=10, factor=0.1), in epochs.")  # fmt: skip
    _define(group, "warmup", number, _DEFAULTS.warmup, "Updates in which the rate rises to its full height.")
    _define(group, "ema", flags.DEFINE_float, None, "Decay of an exponential moving average of the weights, as 0.99: "
            "it is evaluated, and is what the training leaves. Default: none.")  # fmt: skip
    _define(group, "label_smoothing", flags.DEFINE_float, _DEFAULTS.label_smoothing, "Share of the target that all "
            "classes have alike, as 0.1.")  # fmt: skip
    _define(group, "augment", text, None, f"Changes of images in training: some of "
            f"{', '.join(validation.AUGMENTATIONS)}, as 'flip, rotate(factor=0.1)'. Default: none.")  # fmt: skip
    _define(group, "early_stopping", number, None, "Epochs without a lower validation loss after which the training "
            "ends, with the weights of the best. Default: never.")  # fmt: skip
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
    _define(group, "deterministic", flags.DEFINE_boolean, _DEFAULTS.deterministic, "Repeated or resumed on GPUs of the "
            "same kind and number, the run is equal bit by bit, as it always is on the CPU; slower.")  # fmt: skip


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
        "0: nothing, 1: progress bar, 2: a line per epoch, 3: also the curve of the loss so far. Default: 1 in a "
        "terminal, else 2.",
    )
    _define(group, "tracker", text, None, f"Some of {', '.join(validation.TRACKERS)}, comma-separated: where the "
            "numbers of the run go beside its files. Default: nowhere.")  # fmt: skip
    _define(group, "profile", text, None, "Steps that the profiler of the backend records, as 5:8, into the workdir.")
    _define(group, "export", text, None, "File for the finished model, as plain Keras: NAME.keras or NAME.weights.h5.")

    group = "Checkpoints and faults"
    _define(group, "checkpoint_every", text, _DEFAULTS.checkpoint_every, "epoch; 50: also every 50 steps; 10m: also "
            "every 10 minutes; never: none.")  # fmt: skip
    _define(group, "checkpoint_dir", text, None, "Folder of the checkpoints, or a URL: s3://bucket/run, gs://, az://, "
            "... (pip install 'kerasdp[fsspec]'). Default: checkpoints in --workdir.")  # fmt: skip
    _define(
        group,
        "keep",
        number,
        _DEFAULTS.keep,
        "Number of newest checkpoints to keep; the best one, by validation loss (else training loss), is kept as well.",
    )
    _define(group, "resume", switch, _DEFAULTS.resume, "Resume from the newest checkpoint, on any backend "
            "and number of devices; without one, start from the beginning.")  # fmt: skip
    _define(group, "max_restarts", number, _DEFAULTS.max_restarts, "How often to restart from the last checkpoint "
            "when a worker dies or hangs.")  # fmt: skip
    _define(group, "hang_timeout", real, None, "Seconds without a move after which the run is ended, or "
            "restarted; more than the longest step or callback takes; what may compile has an hour. 0: never. Default: "
            "600 with torch on several devices, where ranks wait for each other; else a line says where.")  # fmt: skip


def _define_flags_of_recipes() -> None:
    text, number = flags.DEFINE_string, flags.DEFINE_integer

    group = COMPARISON
    _define(group, "backends", text, None, "Instead of --backend, comma-separated. Default: all that are installed.")
    _define(group, "device_counts", text, "1,2,4", "Instead of --gpus: numbers of devices, comma-separated.")

    group = STUDY
    _define(group, "split_sizes", text, "1,3,5,8,10,12,20,40,60", "Samples per micro-batch to try, comma-separated.")
    _define(group, "repetitions", number, 10, "Epochs to measure, of each way; one more, which compiles, comes first.")

    group = BENCHMARK
    _define(group, "peers", text, None, "What to measure next to kerasdp, comma-separated: "
            f"{', '.join(PEERS)}; or none. Default: all that can train the same on --backends.")  # fmt: skip
    _define(group, "rounds", number, 5, "How often each is measured, in turn.")
    _define(group, "steps_per_round", number, 20, "Training steps of each round.")

    group = RAY
    _define(group, "workers", text, "1", "Workers of the run, or the fewest and the most as 1:4, each with --gpus "
            "devices.")  # fmt: skip
    _define(group, "cpus_per_worker", flags.DEFINE_float, None, "Cores that Ray sets aside for each worker, or each "
            "run of a sweep. Default: one for each device.")  # fmt: skip

    _define(SWEEP, "sweep", text, None, "Flags and their values: many runs, one for each combination: "
            "'learning_rate=0.01,0.03; batch_size=32,64'; with --trials ranges, too: 'seed=1..9'.")  # fmt: skip
    _define(SEARCH, "trials", number, None, "Runs whose values Optuna picks from --sweep, for the lowest validation "
            "loss. Default: all combinations are trained.")  # fmt: skip

    group = INFERENCE
    _define(group, "checkpoint", text, None, "Model to use: the --workdir of a run, a folder or URL of checkpoints, or "
            "one file: .safetensors (a checkpoint), .keras or .weights.h5, of any backend.")  # fmt: skip
    _define(group, "inputs", text, None, "Instead of --dataset: an image, a folder of images (with a sub-folder for "
            "each class, or without), .npy, or .npz with x and, for labels, y.")  # fmt: skip
    _define(group, "activation", text, None, "softmax, sigmoid or none: what makes probabilities of the model's "
            "outputs. Default: softmax, unless its last layer has an activation.")  # fmt: skip
    _define(group, "trust_checkpoint", flags.DEFINE_boolean, False, "Run the code that a checkpoint names as its model "
            "or data set; otherwise only what --model and --dataset name is run.")  # fmt: skip

    group = PREDICTION
    _define(group, "output", text, None, "File for the predictions: .npy, .csv or .parquet. Default: predictions.csv "
            "in --workdir.")  # fmt: skip

    _define(EXPORT, "to", text, None, "File to write: NAME.keras, NAME.onnx, or a folder, for a SavedModel.")

    group = TRANSFER
    _define(group, "backbone", text, "MobileNetV2", "Model of keras.applications.")
    _define(group, "weights", text, "imagenet", "Its weights: imagenet (a download), none, or a .weights.h5 file.")
    _define(group, "size", text, "160,160", "Height and width to which images of a folder are resized.")
    _define(group, "head_epochs", number, 5, "Epochs of the first fit, which trains the new head alone.")
    _define(group, "fine_tuning_rate", flags.DEFINE_float, 1e-5, "Learning rate of the second fit (Adam).")


_define_flags_of_devices()
_define_flags_of_machines()
_define_flags_of_training()
_define_flags_of_files()
_define_flags_of_recipes()
flags.DEFINE_boolean("help", False, "Print this help.", flag_values=FLAGS, short_name="h")
flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), flags.ArgumentSerializer(), "flagfile", "", ""), FLAGS)


def help_text(program: str) -> str:
    """Returns the text of `--help`: the flags in their groups."""
    command = os.environ.get(PROGRAM, f"python {program}")
    lines = [f"usage: {command} [--flagfile=flags/NAME.flags] [--flag=value ...]"]
    for group, names in GROUPS.items():
        lines += ["", f"{group}:"]
        for name in names:
            flag = FLAGS[name]
            default = "" if flag.default in (None, False) else f" Default: {flag.default}."
            lines.append(textwrap.fill(
                f"--{name}: {flag.help}{default}", width=100, initial_indent="  ", subsequent_indent="      "
            ))  # fmt: skip
    return "\n".join(lines)
