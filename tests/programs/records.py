"""Leaves the files of a run whose model, optimizer and batches are user-defined, and those of one of named parts.

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


def of_names(runner):
    data = kerasdp.load_data("synthetic(shape=(28,28,1), num_samples=256)")
    model = kerasdp.build_model("lenet", data.input_shape, data.num_classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kerasdp.make_optimizer("sgd(learning_rate=0.03)"), loss)
    model.fit(data.train, epochs=1)


for train in (own, of_names):
    kerasdp.launch(
        train, backend=backend, num_devices=int(num_devices), device="cpu", verbose=2, max_steps=4,
        workdir=f"{folder}/{train.__name__}",
    )  # fmt: skip
