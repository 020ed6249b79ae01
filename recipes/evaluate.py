"""Evaluates a trained model, from any backend, on any backend and number of devices: each sample counts once.

    python recipes/train.py --workdir=runs/mine                                          # makes one
    python recipes/evaluate.py --checkpoint=runs/mine                                    # its newest checkpoint
    python recipes/evaluate.py --checkpoint=runs/mine/checkpoints/best.safetensors --backend=jax --gpus=2
    python recipes/evaluate.py --checkpoint=model.keras --dataset=images --data_dir=photos

Expected of the second: accuracy 0.975 on 360 held-out digits, as at the end of the training.

Evaluates on the held-out part of --dataset, which is as in recipes/train.py, and writes evaluation.json into --workdir.
Copy this file into your project and change loss, metrics and data as you like.
"""

import json
import os

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", None, "The --workdir of a run, a folder or URL of checkpoints, a .safetensors or "
                    ".keras file.", required=True)  # fmt: skip
flags.DEFINE_string("dataset", "digits", "Data set of recipes/train.py, or file.py:function.")
flags.DEFINE_string("data_dir", None, "Folder of the data set images.")
kerasdp.flags.define("backend", "gpus", "device", "precision", "batch_size", "workdir")


def evaluate(runner):
    """Runs once the backend is chosen."""
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
    """Runs in the process that was started."""
    kerasdp.launch(evaluate, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
