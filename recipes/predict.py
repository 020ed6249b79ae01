"""Predicts with a trained model, from any backend, on any backend and number of devices: a row for each sample.

    python recipes/train.py --workdir=runs/mine                                          # makes one
    python recipes/predict.py --checkpoint=runs/mine --output=digits.csv                 # the held-out digits
    python recipes/predict.py --checkpoint=runs/mine --output=logits.npy --backend=jax --gpus=2
    python recipes/predict.py --checkpoint=model.keras --dataset=my_data.py:load

Expected of the second: 360 rows, the same on every backend and number of devices up to 1e-5.

Predicts the held-out part of --dataset, which is as in recipes/train.py. A row has the outputs of the model, as they
are: logits, of models that recipes/train.py has trained. Copy this file into your project and change what you like.
"""

import os

import numpy as np
from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", None, "The --workdir of a run, a folder or URL of checkpoints, a .safetensors or "
                    ".keras file.", required=True)  # fmt: skip
flags.DEFINE_string("output", None, "File to write, .npy or .csv. Default: predictions.csv in --workdir.")
flags.DEFINE_string("dataset", "digits", "Data set of recipes/train.py, or file.py:function.")
flags.DEFINE_string("data_dir", None, "Folder of the data set images.")
flags.register_validator(
    "output", lambda path: path is None or path.endswith((".npy", ".csv")), "expected .npy or .csv"
)
kerasdp.flags.define("backend", "gpus", "device", "precision", "batch_size", "workdir")


def predict(runner):
    """Runs once the backend is chosen."""
    config = runner.config
    data = kerasdp.load_data(FLAGS.dataset, FLAGS.data_dir)
    with runner.scope():
        model = kerasdp.load_model(FLAGS.checkpoint)  # with custom layers: load_model(checkpoint, make_model())
    outputs = runner.predict(model, data.test)  # of all samples, in their order, whatever the number of devices
    path = FLAGS.output or os.path.join(config.workdir, "predictions.csv")
    if runner.is_chief:
        if path.endswith(".npy"):
            np.save(path, outputs)
        else:
            np.savetxt(path, outputs.reshape(len(outputs), -1), "%.9g", delimiter=",")  # all digits of float32
        print(f"{len(outputs)} held-out samples of {FLAGS.dataset} | {FLAGS.checkpoint}")
        print(f"{config.backend} on {runner.devices}; predictions in {path}")


def main(argv):
    """Runs in the process that was started."""
    kerasdp.launch(predict, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
