"""Trains with data that stays on the devices, as on a GPU, or does not; prints what came out.

python data_on_device.py BACKEND NUM_DEVICES on|off
"""

import functools
import sys

import numpy as np
from starting import printed

import kerasdp


def train(is_kept, runner):
    import keras

    from kerasdp.training import readers

    readers._stays_on_device = lambda *_: is_kept

    numbers = np.random.RandomState(0)
    images, marks = numbers.randint(0, 256, (61, 6, 6, 1)).astype("uint8"), numbers.rand(61, 5).astype("float32")
    x, y = {"images": images, "marks": marks}, numbers.randint(0, 3, 61)
    reads = []
    original = kerasdp.ArraySource.inputs
    kerasdp.ArraySource.inputs = lambda self, indices: reads.append(len(indices)) or original(self, indices)
    with runner.scope():
        layers, inputs = keras.layers, {"images": keras.Input((6, 6, 1)), "marks": keras.Input((5,))}
        flat = layers.Flatten()(layers.Rescaling(1 / 255)(inputs["images"]))
        outputs = layers.Dense(3)(layers.Dropout(0.3)(layers.Concatenate()([flat, inputs["marks"]])))
        model = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    history = runner.fit(model, x, y, epochs=3, validation_data=({key: x[key][:21] for key in x}, y[:21]))
    weights = model.get_weights()[0].tolist()
    return {"history": history.history, "weights": weights, "reads": len(reads)}


if __name__ == "__main__":
    backend, count, choice = sys.argv[1:]
    printed(functools.partial(train, choice == "on"), backend, count, batch_size=8)
