"""Finds the operation that two backends compute differently, in the forward pass, its gradient, or an update.

    python recipes/bisection.py --model=lenet                      # the first two backends that are installed
    python recipes/bisection.py --model=my_model.py:build --backends=jax,tensorflow --max_steps=3

Expected: exit code 0 and "nothing differs"; or 1, with the operation, its call, shapes and values; inputs.npz in the
workdir then holds what the operation got. Half a minute on two CPU cores.

Each step runs without compilation on one device, in float64, in which only mistakes are left.
"""

import os

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_list("backends", None, "Two backends. Default: the first two that are installed.")
flags.DEFINE_string("model", "lenet", "A model of kerasdp, such as convnet, or file.py:function.")
flags.DEFINE_string("dataset", "digits", "A data set of kerasdp, such as mnist, or file.py:function.")
flags.DEFINE_string("data_dir", None, "Folder of the data set images.")
flags.DEFINE_string("optimizer", "sgd(learning_rate=0.03, momentum=0.9)", "Any Keras optimizer, such as adam.")
flags.DEFINE_float("learning_rate", None, "Learning rate. Default: as in --optimizer.")
kerasdp.flags.define("device", "batch_size", "seed", "max_steps", "workdir",
                     device="auto", batch_size=64, max_steps=2)  # fmt: skip


def make_data():
    """Runs in each process. Yours may return `(x, y)`."""
    return kerasdp.load_data(FLAGS.dataset, FLAGS.data_dir)


def make_model():
    """Runs in each process, after the backend is chosen. Yours may return any compiled Keras model."""
    import keras

    data = make_data()
    model = kerasdp.build_model(FLAGS.model, data.input_shape, data.num_classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kerasdp.make_optimizer(FLAGS.optimizer, FLAGS.learning_rate), loss)
    return model


def main(argv):
    """Starts a process for each backend. The exit code is 1 where an operation differs."""
    import numpy as np

    given = kerasdp.flags.values(argv)
    workdir, steps = given.pop("workdir"), given.pop("max_steps")
    finding = kerasdp.parity.bisect(make_model, lambda: make_data().train, FLAGS.backends, steps=steps, **given)
    print(finding or "nothing differs")
    if finding is not None and finding.call is not None:
        os.makedirs(workdir, exist_ok=True)
        np.savez(os.path.join(workdir, "inputs.npz"), *finding.call.inputs)
    return 0 if finding is None else 1


if __name__ == "__main__":
    app.run(main)
