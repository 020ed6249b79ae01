"""Writes a trained model for other programs, and checks the file by loading it there: Keras, TensorFlow, ONNX Runtime.

    python recipes/train.py --workdir=runs/mine                                             # makes one
    python recipes/export.py --checkpoint=runs/mine --to=digits.keras                       # for every backend
    python recipes/export.py --checkpoint=runs/mine --to=digits --backend=tensorflow        # a folder: a SavedModel
    pip install 'kerasdp[onnx]'
    python recipes/export.py --checkpoint=digits.keras --to=digits.onnx --backend=torch

Expected of each: the file, and a line for each program that loaded it, with outputs that differ by at most 1e-5 of the
largest one; more than that is an error.

A checkpoint or .keras file loads on every backend, whichever wrote it. SavedModels are written with tensorflow, and
with jax where TensorFlow is installed, too; ONNX with torch and tensorflow (with jax: pip install jax2onnx).

Copy this file into your project and change what you like.
"""

import functools

import kerasdp


def main(config: kerasdp.Config, request: "kerasdp.inference.Request", path: str) -> None:
    """Runs on this machine; `write` runs where the backend is chosen."""
    inputs, outputs, kind, backend = kerasdp.launch(functools.partial(write, request=request, path=path), config)
    print(f"{path}: {kind}, written with {backend}")
    for line in kerasdp.inference.check_elsewhere(path, kind, inputs, outputs, backend):
        print(line)


def write(runner: "kerasdp.Runner", request: "kerasdp.inference.Request", path: str) -> tuple:
    """Loads the model and writes it; returns a few inputs, the outputs for them, the format and the backend."""
    backend = runner.config.backend
    kind = kerasdp.inference.check_target(path, backend)
    with runner.scope():
        model = kerasdp.inference.load_trained(request).model
    return *kerasdp.inference.convert(model, path, kind), kind, backend


if __name__ == "__main__":
    kerasdp.main(main, flags="export")
