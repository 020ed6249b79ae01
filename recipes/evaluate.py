"""Evaluates a trained model, from any backend, on any backend and number of devices: each sample counts once.

    python recipes/train.py --workdir=runs/mine                                          # makes one
    python recipes/evaluate.py --checkpoint=runs/mine                                    # its newest checkpoint
    python recipes/evaluate.py --checkpoint=runs/mine/checkpoints/best.safetensors --backend=jax --gpus=2
    python recipes/evaluate.py --checkpoint=model.keras --inputs=photos                  # a sub-folder per class
    python recipes/evaluate.py --checkpoint=model.keras --inputs=samples.npz             # arrays x and y
    python recipes/evaluate.py --checkpoint=runs/mine --dataset=my_data.py:load

Expected of the second: accuracy 0.9694 on 360 held-out digits, as at the end of the training.

Writes into --workdir: evaluation.json with loss, accuracy and the accuracy of each class; the confusion matrix as
confusion.csv and confusion.png. Copy this file into your project and change metrics and data as you like.
"""

import kerasdp


def evaluate(runner: "kerasdp.Runner", request: "kerasdp.inference.Request") -> None:
    """Runs in every worker process, after the backend is chosen."""
    import keras

    with runner.scope():
        trained = kerasdp.inference.load_trained(request)
        trained.model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=trained.applied), metrics=["accuracy"]
        )
    samples = kerasdp.inference.open_samples(request, trained)
    kerasdp.inference.check_classes(samples, trained.model.output_shape[-1])
    results = runner.evaluate(trained.model, samples.source, return_dict=True)
    matrix = kerasdp.inference.confusion_matrix(samples, runner.predict(trained.model, samples.source))
    if runner.is_chief:
        facts = {"checkpoint": trained.path, "backend": runner.config.backend, "devices": str(runner.devices)}
        kerasdp.inference.write_evaluation(request.workdir, results, matrix, samples, **facts)
        found = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
        print(f"{found} | {matrix.sum()} samples ({samples.title}) | {trained.path}")
        print(f"{runner.config.backend} on {runner.devices}; files in {request.workdir}")


if __name__ == "__main__":
    kerasdp.main(evaluate, flags="evaluate")
