"""Evaluates a trained model on any backend and number of devices.

    python recipes/train.py --workdir=runs/mine                                          # trains a model
    python recipes/evaluate.py --checkpoint=runs/mine                                    # its newest checkpoint
    python recipes/evaluate.py --checkpoint=runs/mine/checkpoints/best.safetensors --backend=jax --gpus=2
    python recipes/evaluate.py --checkpoint=model.keras --dataset=images --data_dir=photos

Expected of the second command: accuracy 0.975 on 360 held-out digits, the same as at the end of the training.

The checkpoint may come from another backend. --dataset takes the same values as in recipes/train.py. Each sample of its
test data counts exactly once. evaluation.json in --workdir has the loss and the metrics. To change them, edit
`evaluate` in a copy of this file.
"""

import json
import os

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", None, "Model: the --workdir of a run, a folder or URL of checkpoints, or a "
                    ".safetensors or .keras file.", required=True)  # fmt: skip
flags.DEFINE_string("dataset", "digits", "Data set of recipes/train.py, or file.py:function.")
flags.DEFINE_string("data_dir", None, "Folder of images, for --dataset=images only.")
kerasdp.flags.define("backend", "gpus", "device", "precision", "batch_size", "workdir")


def evaluate(runner):
    """Evaluates the model, after the backend is chosen."""
    import keras

    config = runner.config
    data = kerasdp.load_data(FLAGS.dataset, FLAGS.data_dir)
    with runner.scope():
        model = kerasdp.load_model(FLAGS.checkpoint)  # with custom layers: load_model(checkpoint, make_model())
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    results = runner.evaluate(model, data.test, return_dict=True)
    if runner.is_chief:
        with open(os.path.join(config.workdir, "evaluation.json"), "w") as file:
            json.dump({"checkpoint": FLAGS.checkpoint, "dataset": FLAGS.dataset, **results}, file, indent=2)
        found = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
        print(f"{found} | {data.test.num_samples} held-out samples of {FLAGS.dataset} | {FLAGS.checkpoint}")
        print(f"{config.backend} on {runner.devices}; evaluation.json in {config.workdir}")


def main(argv):
    """Starts the evaluation with the flags."""
    kerasdp.launch(evaluate, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
