"""Cuts a model over two devices, with and without pipelining, and looks for the best size of micro-batches.

    python recipes/pipeline.py --flagfile=flags/pipeline_resnet50.flags --backend=torch    # two GPUs
    python recipes/pipeline.py --flagfile=flags/pipeline_small.flags --backend=jax         # any machine
    python recipes/pipeline.py --model=recipes/pipeline.py:toy --dataset="synthetic(shape=(10,), num_classes=5)"

It trains on one device; cut over two, which work in turn (layer split); and pipelined, with each of --split_sizes: the
first device then works on the next micro-batch while the second works on the previous one. Each is repeated. The table
shows the time with its deviation, how long the stages wait, and the memory of each device; the charts are in --workdir.

After the PyTorch tutorial "Single-Machine Model Parallel Best Practices": ResNet-50 with 1000 classes, 128x128 images,
batches of 120, squared error against one-hot labels, plain SGD. There pipelining with a split size of 12 was best, and
the layer split slower than one device. On virtual CPU devices that share cores expect no gain; the timeline shows the
overlap.
"""

from typing import Any

import kerasdp


def toy(input_shape: tuple[int, ...], num_classes: int) -> Any:
    """Two dense layers, one for each device."""
    import keras

    hidden = keras.layers.Dense(10, "relu", name="first")
    return keras.Sequential([keras.Input(input_shape), hidden, keras.layers.Dense(num_classes, name="second")])


def train(runner: "kerasdp.Runner") -> dict[str, Any]:
    """Runs for each way to train; each epoch is a repetition, and the first one, which compiles, is not counted."""
    import keras

    config = runner.config
    data = kerasdp.load_data(config)

    def squared_error(labels: Any, outputs: Any) -> Any:
        return keras.losses.mean_squared_error(keras.ops.one_hot(labels, data.num_classes), outputs)

    with runner.scope():
        model = kerasdp.build_model(config, data.input_shape, data.num_classes)
        model.compile(kerasdp.make_optimizer(config), squared_error)
    runner.fit(model, data.train, epochs=config.epochs)
    return kerasdp.benchmark.measured(runner, model, data.train)


def study(config: kerasdp.Config, split_sizes: list[int], repetitions: int) -> None:
    """Runs here, and starts a process for each way to train."""
    kerasdp.benchmark.study(train, config, split_sizes, repetitions)


if __name__ == "__main__":
    kerasdp.main(study, flags="pipeline")
