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

import kerasdp


def predict(runner: "kerasdp.Runner", checkpoint: str, output: str | None) -> None:
    """Runs in every worker process, after the backend is chosen."""
    config = runner.config
    data = kerasdp.load_data(config.dataset, config.data_dir)
    with runner.scope():
        model = kerasdp.load_model(checkpoint)  # of layers of your own: load_model(checkpoint, build_it())
    outputs = runner.predict(model, data.test)  # of all samples, in their order, whatever the number of devices
    path = output or os.path.join(config.workdir, "predictions.csv")
    if runner.is_chief:
        if path.endswith(".npy"):
            np.save(path, outputs)
        else:
            np.savetxt(path, outputs.reshape(len(outputs), -1), "%.9g", delimiter=",")  # float32 as a whole
        print(f"{len(outputs)} held-out samples of {config.dataset} | {checkpoint}")
        print(f"{config.backend} on {runner.devices}; predictions in {path}")


if __name__ == "__main__":
    kerasdp.main(predict, flags="predict")
