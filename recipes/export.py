"""Exports a trained model as a .keras file, ONNX, or a SavedModel.

    python recipes/train.py --workdir=runs/mine                                             # trains a model
    python recipes/export.py --checkpoint=runs/mine --to=digits.keras                       # for every backend
    python recipes/export.py --checkpoint=runs/mine --to=digits --backend=tensorflow        # a folder: a SavedModel
    pip install 'kerasdp[onnx]'
    python recipes/export.py --checkpoint=digits.keras --to=digits.onnx --backend=torch

Every backend loads the checkpoints and .keras files of every other backend, and writes .keras files. A SavedModel needs
tensorflow, or jax with TensorFlow installed. ONNX needs torch or tensorflow, or jax after `pip install jax2onnx`.
"""

import os
import tempfile

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", None, "Model: the --workdir of a run, a folder or URL of checkpoints, or a "
                    ".safetensors or .keras file.", required=True)  # fmt: skip
flags.DEFINE_string("to", None, "Target: NAME.keras, NAME.weights.h5, NAME.onnx, or a folder for a SavedModel.",
                    required=True)  # fmt: skip
kerasdp.flags.define("backend", "device")


def export(runner):
    """Exports the model, after the backend is chosen."""
    import keras

    to = FLAGS.to
    if os.path.exists(to):
        raise kerasdp.UserError(f"--to: {to!r} exists already; remove it, or choose another name")
    model = kerasdp.load_model(FLAGS.checkpoint)  # with custom layers: load_model(checkpoint, make_model())
    if to.endswith((".keras", ".weights.h5")):
        kerasdp.export(model, to)
    else:
        with tempfile.TemporaryDirectory() as folder:
            kerasdp.export(model, path := os.path.join(folder, "model.keras"))
            plain = keras.saving.load_model(path, compile=False)  # has Keras layers instead of kerasdp's
        try:
            plain.export(to, format="onnx" if to.endswith(".onnx") else "tf_saved_model", verbose=False)
        except Exception as error:  # converters raise anything
            reason = str(error).strip().partition("\n")[0]
            raise kerasdp.UserError(f"--to: Keras cannot write {to!r} on {runner.config.backend} ({reason})") from error
    print(f"{to}: written with {runner.config.backend} from {FLAGS.checkpoint}")


def main(argv):
    """Starts the export with the flags."""
    kerasdp.launch(export, num_devices=1, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
