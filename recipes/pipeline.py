"""Compares a pipeline over two devices with one device, and finds the best split size.

    python recipes/pipeline.py --flagfile=flags/pipeline_resnet50.flags --backend=torch    # two GPUs
    python recipes/pipeline.py --flagfile=flags/pipeline_small.flags                       # any machine
    python recipes/pipeline.py --model=toy --dataset="synthetic(shape=(10,), num_classes=5)"

It trains with torch in three ways:
- single device
- layer split: the model is cut over two devices, and they take turns
- pipelined, for each of --split_sizes: the first device computes a micro-batch, the second computes the previous one

A table shows the mean and deviation of the time of several repetitions, and the memory of each device. pipeline.json
and two charts are in --workdir. Expect no gain on virtual CPU devices that share cores.

It follows the PyTorch tutorial "Single-Machine Model Parallel Best Practices": ResNet-50 with 1000 classes, 128x128
images, batches of 120, squared error against one-hot labels, plain SGD. There a split size of 12 was best, and the
layer split was slower than one device.
"""

import dataclasses
import json
import pathlib
import statistics
from typing import Any

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_list("split_sizes", "1,3,5,8,10,12,20,40,60", "Numbers of samples per micro-batch to try.")
flags.DEFINE_integer("repetitions", 10, "Epochs to measure, after a first epoch that compiles.", lower_bound=2)
flags.DEFINE_string("model", "lenet", "toy, mlp, lenet, convnet, resnet18, resnet50, or file.py:function.")
flags.DEFINE_string("dataset", "digits", "A data set of kerasdp, such as mnist, or file.py:function.")
flags.DEFINE_string("optimizer", "sgd(learning_rate=0.03, momentum=0.9)", "Any Keras optimizer, such as adam.")
flags.register_validator("split_sizes", lambda sizes: all(map(str.isdecimal, sizes)), "expected, for example 1,2,4")
kerasdp.flags.define("backend", "gpus", "device", "precision", "compile", "cut_at", "batch_size", "seed", "workdir",
                     backend="torch")  # fmt: skip


def toy(input_shape: tuple[int, ...], num_classes: int) -> Any:
    """Builds two dense layers, one for each device."""
    import keras

    hidden = keras.layers.Dense(10, "relu", name="first")
    return keras.Sequential([keras.Input(input_shape), hidden, keras.layers.Dense(num_classes, name="second")])


def train(runner: "kerasdp.Runner") -> dict[str, Any]:
    """Trains the model. Returns the seconds of each epoch except the first, which compiles, and the peak memory."""
    import keras

    from kerasdp.models import convnet, lenet, mlp, resnet18, resnet50

    data = kerasdp.load_data(FLAGS.dataset)

    @kerasdp.per_sample
    def squared_error(labels: Any, outputs: Any) -> Any:
        return keras.losses.mean_squared_error(keras.ops.one_hot(labels, data.num_classes), outputs)

    with runner.scope():
        builders = [toy, mlp, lenet, convnet, resnet18, resnet50]
        model = kerasdp.build_model(FLAGS.model, data.input_shape, data.num_classes, builders)
        model.compile(kerasdp.make_optimizer(FLAGS.optimizer), squared_error)
    model.fit(data.train, batch_size=runner.config.batch_size, epochs=FLAGS.repetitions + 1)
    strategy = runner.strategy
    memory = [round(most / 2**20) for most in strategy.processes.all_gather_object(strategy.peak_memory_bytes())]
    return {"seconds": runner.state.epoch_seconds[1:], "MiB": memory, "stages": runner.state.description}


def ways(config: kerasdp.Config, split_sizes: list[int]) -> dict[str, kerasdp.Config]:
    """Returns the name and the settings of each way to train."""
    # With hang_timeout each run has a new process, so memory that one run leaves does not slow the next run.
    config = dataclasses.replace(config, workdir=None, verbose=0, checkpoint_every="never", hang_timeout=3600.0)
    whole = {"strategy": "data", "num_devices": 1, "cut_at": None}
    cut = config if config.cut_at else dataclasses.replace(config, num_devices=config.num_devices or 2)
    cut = cut.with_devices_for_stages()
    found = {"single device": dataclasses.replace(config, **whole)}
    found["layer split"] = dataclasses.replace(cut, split_size=config.batch_size)
    sizes = [size for size in split_sizes if size <= config.batch_size]
    return found | {f"pipelined, split size {size}": dataclasses.replace(cut, split_size=size) for size in sizes}


def main(argv):
    """Trains in all ways. Prints their times and memory, and writes them to the workdir."""
    config, found = kerasdp.Config(strategy="pipeline", **kerasdp.flags.values(argv)), {}
    for name, settings in ways(config, [int(size) for size in FLAGS.split_sizes]).items():
        try:
            found[name] = result = kerasdp.launch(train, settings)
        except kerasdp.RunError as error:
            print(f"{name:28} {error}", flush=True)
            continue
        mean, deviation = statistics.mean(result["seconds"]), statistics.stdev(result["seconds"])
        memory = f"   peak MiB a device {result['MiB']}" if result["MiB"] else ""
        print(result["stages"] if name == "layer split" else "", end="\n" if name == "layer split" else "")
        print(f"{name:28} {mean:8.3f} s +- {deviation:.3f}{memory}", flush=True)
    pipelined = {name: result["seconds"] for name, result in found.items() if name.startswith("pipelined")}
    if not pipelined:
        raise kerasdp.RunError("no pipelined run has finished; the messages above say why")
    best = min(pipelined, key=lambda name: statistics.mean(pipelined[name]))
    print(f"best: {best}")
    folder = pathlib.Path(str(config.workdir))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.json").write_text(json.dumps(found, indent=2))
    seconds = {name: result["seconds"] for name, result in found.items()}
    names = [name for name in ("single device", "layer split", best) if name in seconds]
    draw({name: seconds[name] for name in names}, "bar", folder / "bars.png")
    sizes = {name.rpartition(" ")[2]: seconds[name] for name in pipelined}
    draw(sizes, "errorbar", folder / "sweep.png", xlabel="split size (samples a micro-batch)")


def draw(seconds: dict[str, list[float]], kind: str, path: pathlib.Path, **labels: str) -> None:
    """Draws the mean and the standard deviation of the measured times, as bars or as a line."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6.4, 4.2), layout="tight")).subplots()
    means = [statistics.mean(repeated) for repeated in seconds.values()]
    getattr(axes, kind)(list(seconds), means, yerr=[statistics.stdev(each) for each in seconds.values()], capsize=5)
    axes.set(ylabel="seconds a repetition", **labels)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
