"""Leaves the files of a run whose model, optimizer and batches are user-defined, and those of one of flags.

python records.py BACKEND NUM_DEVICES FOLDER
"""

import sys

import keras
import numpy as np

import kerasdp

backend, num_devices, folder = sys.argv[1:]


class Batches:
    def __len__(self):
        return 3

    def __iter__(self):
        for number in range(3):
            yield np.full((32, 4), number, "float32"), np.arange(32) % 10


def own(runner):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(10)], name="mine")
    model.compile(keras.optimizers.Adam(0.25), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(Batches(), epochs=2)


def of_flags(runner):
    config = runner.config
    data = kerasdp.load_data(config.dataset, config.data_dir)
    model = kerasdp.build_model(config.model, data.input_shape, data.num_classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kerasdp.make_optimizer(config.optimizer, config.learning_rate), loss)
    model.fit(data.train, epochs=1)


for train in (own, of_flags):
    kerasdp.launch(
        train, kerasdp.Config(dataset="synthetic(shape=(28,28,1), num_samples=256)"), backend=backend,
        num_devices=int(num_devices), device="cpu", verbose=2, max_steps=4, workdir=f"{folder}/{train.__name__}",
    )  # fmt: skip
