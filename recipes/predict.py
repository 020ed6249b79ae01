"""Writes the predictions of a trained model, on any backend and number of devices.

    python recipes/train.py --workdir=runs/mine                                          # trains a model
    python recipes/predict.py --checkpoint=runs/mine --output=digits.csv                 # the held-out digits
    python recipes/predict.py --checkpoint=runs/mine --output=logits.npy --backend=jax --gpus=2
    python recipes/predict.py --checkpoint=model.keras --dataset=my_data.py:load

Expected of the second command: 360 rows, the same on every backend and number of devices up to 1e-5.

The checkpoint may come from another backend. --dataset takes the same values as in recipes/train.py. Each sample of its
test data has one row, in order. A row has the raw outputs of the model. Models of recipes/train.py return logits.
"""

import os

import numpy as np
from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", None, "Model: the --workdir of a run, a folder or URL of checkpoints, or a "
                    ".safetensors or .keras file.", required=True)  # fmt: skip
flags.DEFINE_string("output", None, "Target, a .npy or .csv file. Default: predictions.csv in --workdir.")
flags.DEFINE_string("dataset", "digits", "Data set of recipes/train.py, or file.py:function.")
flags.DEFINE_string("data_dir", None, "Folder of images, for --dataset=images only.")
flags.register_validator(
    "output", lambda path: path is None or path.endswith((".npy", ".csv")), "expected a .npy or .csv file"
)
kerasdp.flags.define("backend", "gpus", "device", "precision", "batch_size", "workdir")


def predict(runner):
    """Predicts with the model, after the backend is chosen."""
    config = runner.config
    data = kerasdp.load_data(FLAGS.dataset, FLAGS.data_dir)
    with runner.scope():
        model = kerasdp.load_model(FLAGS.checkpoint)  # with custom layers: load_model(checkpoint, make_model())
    outputs = runner.predict(model, data.test)  # all samples in order, on any number of devices
    path = FLAGS.output or os.path.join(config.workdir, "predictions.csv")
    if runner.is_chief:
        if path.endswith(".npy"):
            np.save(path, outputs)
        else:
            np.savetxt(path, outputs.reshape(len(outputs), -1), "%.9g", delimiter=",")  # all digits of float32
        print(f"{len(outputs)} held-out samples of {FLAGS.dataset} | {FLAGS.checkpoint}")
        print(f"{config.backend} on {runner.devices}; predictions in {path}")


def main(argv):
    """Starts the prediction with the flags."""
    kerasdp.launch(predict, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
