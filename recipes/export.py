"""Writes a trained model for other programs, as Keras does: a .keras file, ONNX, or a SavedModel.

    python recipes/train.py --workdir=runs/mine                                             # makes one
    python recipes/export.py --checkpoint=runs/mine --to=digits.keras                       # for every backend
    python recipes/export.py --checkpoint=runs/mine --to=digits --backend=tensorflow        # a folder: a SavedModel
    pip install 'kerasdp[onnx]'
    python recipes/export.py --checkpoint=digits.keras --to=digits.onnx --backend=torch

A checkpoint or .keras file loads on every backend, whichever wrote it. SavedModels are written with tensorflow, and
with jax where TensorFlow is installed, too; ONNX with torch and tensorflow (with jax: pip install jax2onnx).

Copy this file into your project and change what you like.
"""

import os
import tempfile

import kerasdp


def export(runner: "kerasdp.Runner", checkpoint: str, to: str) -> None:
    """Runs where the backend is chosen."""
    import keras

    if os.path.exists(to):
        raise kerasdp.UserError(f"--to: {to!r} is there already: remove it, or choose another name")
    model = kerasdp.load_model(checkpoint)  # of layers of your own: load_model(checkpoint, build_it())
    if to.endswith((".keras", ".weights.h5")):
        kerasdp.export(model, to)
    else:
        with tempfile.TemporaryDirectory() as folder:
            kerasdp.export(model, path := os.path.join(folder, "model.keras"))
            plain = keras.saving.load_model(path, compile=False)  # with Keras' layers instead of the kit's
        try:
            plain.export(to, format="onnx" if to.endswith(".onnx") else "tf_saved_model", verbose=False)
        except Exception as error:  # converters raise anything
            reason = str(error).strip().partition("\n")[0]
            raise kerasdp.UserError(f"--to: Keras cannot write {to!r} on {runner.config.backend} ({reason})") from error
    print(f"{to}: written with {runner.config.backend} from {checkpoint}")


if __name__ == "__main__":
    kerasdp.main(export, flags="export")
