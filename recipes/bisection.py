"""Finds the first operation that two backends compute differently.

    python recipes/bisection.py --model=lenet                      # the first two backends that are installed
    python recipes/bisection.py --model=my_model.py:build --backends=jax,tensorflow --max_steps=3

It compares the operations of the forward pass, their gradients, and the update of the weights. Each step runs without
compilation on one device, in float64. There round-off is far smaller than any bug.

Expected: "nothing differs" and exit code 0, in half a minute on two CPU cores. If an operation differs, the exit code
is 1. The output then shows the operation with its call, shapes and values. Its inputs are in inputs.npz in the workdir.
"""

import os

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_list("backends", None, "Two backends to compare. Default: the first two installed.")
flags.DEFINE_string("model", "lenet", "A model of kerasdp, such as convnet, or file.py:function.")
flags.DEFINE_string("dataset", "digits", "A data set of kerasdp, such as mnist, or file.py:function.")
flags.DEFINE_string("data_dir", None, "Folder of images, for --dataset=images only.")
flags.DEFINE_string("optimizer", "sgd(learning_rate=0.03, momentum=0.9)", "Any Keras optimizer, such as adam.")
flags.DEFINE_float("learning_rate", None, "Learning rate. Default: as in --optimizer.")
kerasdp.flags.define("device", "batch_size", "seed", "max_steps", "workdir",
                     device="auto", batch_size=64, max_steps=2)  # fmt: skip


def make_data():
    """Loads the data set. Runs in the process of each backend."""
    return kerasdp.load_data(FLAGS.dataset, FLAGS.data_dir)


def make_model():
    """Builds and compiles the model. Runs in each process, after the backend is chosen."""
    import keras

    data = make_data()
    model = kerasdp.build_model(FLAGS.model, data.input_shape, data.num_classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kerasdp.make_optimizer(FLAGS.optimizer, FLAGS.learning_rate), loss)
    return model


def main(argv):
    """Runs one process for each backend. Returns exit code 1 if an operation differs."""
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
