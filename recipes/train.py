"""Trains any model on any backend, on one or many devices, with the same loss curve.

    python recipes/train.py                                  # the first backend installed, all GPUs or the CPU
    python recipes/train.py --backend=jax --gpus=4           # four GPUs, or four virtual CPU devices
    python recipes/train.py --flagfile=flags/resnet18_fashion_2gpus.flags --backend=torch
    python recipes/train.py --workdir=runs/mine --resume     # resumes where it stopped, on any backend and devices
    python recipes/train.py --model=my_model.py:build --dataset=my_data.py:load
    python recipes/train.py --help

Expected of the first two: validation accuracy at least 0.96 on held-out digits, in less than a minute on two CPU cores.

Copy this file into your project and change what you like: it is plain Keras around `runner`.
"""

import os

import kerasdp


def train(runner: "kerasdp.Runner") -> None:
    """Runs in every worker process, after the backend is chosen."""
    import keras

    config = runner.config
    data = kerasdp.load_data(config.dataset, config.data_dir)
    with runner.scope():
        model = kerasdp.build_model(config.model, data.input_shape, data.num_classes)
        model.compile(
            optimizer=kerasdp.make_optimizer(config.optimizer, config.learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    # As Keras' `fit`; batch_size is the global batch, whatever the number of devices.
    runner.fit(
        model,
        data.train,
        batch_size=config.batch_size,
        epochs=config.epochs,
        validation_data=data.test,
    )
    kerasdp.export(model, os.path.join(config.workdir, "model.keras"))  # plain Keras


if __name__ == "__main__":
    kerasdp.main(train)
