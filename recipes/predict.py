"""Predicts with a trained model, from any backend, on any backend and number of devices: a row for each sample.

    python recipes/train.py --workdir=runs/mine                                          # makes one
    python recipes/predict.py --checkpoint=runs/mine --output=digits.csv                 # the held-out digits
    python recipes/predict.py --checkpoint=runs/mine --inputs=images.npy --output=probabilities.npy --backend=jax
    python recipes/predict.py --checkpoint=model.keras --inputs=photos --output=photos.parquet --gpus=4
    python recipes/predict.py --checkpoint=runs/mine --inputs=photo.png --activation=none

Expected of the second: 360 rows, the same on every backend and number of devices up to 1e-5.

CSV and Parquet: file or row number, class, its probability, and a column for each class. Logits become probabilities
(--activation). Copy this file into your project and change what you like.
"""

import kerasdp


def predict(runner: "kerasdp.Runner", request: "kerasdp.inference.Request") -> None:
    """Runs in every worker process, after the backend is chosen."""
    with runner.scope():
        trained = kerasdp.inference.load_trained(request)
    samples = kerasdp.inference.open_samples(request, trained)
    # The outputs of all samples, in their order, whatever the number of devices.
    outputs = runner.predict(trained.model, samples.source)
    outputs = kerasdp.inference.probabilities(outputs, trained)
    if runner.is_chief:
        kerasdp.inference.write_predictions(request.output_path, outputs, samples, trained)
        kind = f"{trained.kind} of the outputs" if trained.applied else f"outputs as they are ({trained.kind})"
        print(f"{len(outputs)} samples ({samples.title}) | {kind} | {trained.path}")
        print(f"{runner.config.backend} on {runner.devices}; predictions in {request.output_path}")


if __name__ == "__main__":
    kerasdp.main(predict, flags="predict")
