"""Evaluates a trained model, from any backend, on any backend and number of devices: each sample counts once.

    python recipes/train.py --workdir=runs/mine                                          # makes one
    python recipes/evaluate.py --checkpoint=runs/mine                                    # its newest checkpoint
    python recipes/evaluate.py --checkpoint=runs/mine/checkpoints/best.safetensors --backend=jax --gpus=2
    python recipes/evaluate.py --checkpoint=model.keras --dataset=images --data_dir=photos

Expected of the second: accuracy 0.9694 on 360 held-out digits, as at the end of the training.

Evaluates on the held-out part of --dataset, which is as in recipes/train.py, and writes evaluation.json into --workdir.
Copy this file into your project and change loss, metrics and data as you like.
"""

import json
import os

import kerasdp


def evaluate(runner: "kerasdp.Runner", checkpoint: str) -> None:
    """Runs in every worker process, after the backend is chosen."""
    import keras

    config = runner.config
    data = kerasdp.load_data(config.dataset, config.data_dir)
    with runner.scope():
        model = kerasdp.load_model(checkpoint)  # of layers of your own: load_model(checkpoint, build_it())
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    results = runner.evaluate(model, data.test, return_dict=True)
    if runner.is_chief:
        with open(os.path.join(config.workdir, "evaluation.json"), "w") as file:
            json.dump({"checkpoint": checkpoint, "dataset": config.dataset, **results}, file, indent=2)
        found = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
        print(f"{found} | {data.test.num_samples} held-out samples of {config.dataset} | {checkpoint}")
        print(f"{config.backend} on {runner.devices}; evaluation.json in {config.workdir}")


if __name__ == "__main__":
    kerasdp.main(evaluate, flags="evaluate")
