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

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", None, "The --workdir of a run, a folder or URL of checkpoints, a .safetensors or "
                    ".keras file.", required=True)  # fmt: skip
flags.DEFINE_string("to", None, "File to write: NAME.keras, NAME.weights.h5, NAME.onnx, or a folder, for a SavedModel.",
                    required=True)  # fmt: skip
kerasdp.flags.define("backend", "device")


def export(runner):
    """Runs once the backend is chosen."""
    import keras

    to = FLAGS.to
    if os.path.exists(to):
        raise kerasdp.UserError(f"--to: {to!r} is there already: remove it, or choose another name")
    model = kerasdp.load_model(FLAGS.checkpoint)  # with custom layers: load_model(checkpoint, make_model())
    if to.endswith((".keras", ".weights.h5")):
        kerasdp.export(model, to)
    else:
        with tempfile.TemporaryDirectory() as folder:
            kerasdp.export(model, path := os.path.join(folder, "model.keras"))
            plain = keras.saving.load_model(path, compile=False)  # with Keras' layers instead of kerasdp's
        try:
            plain.export(to, format="onnx" if to.endswith(".onnx") else "tf_saved_model", verbose=False)
        except Exception as error:  # converters raise anything
            reason = str(error).strip().partition("\n")[0]
            raise kerasdp.UserError(f"--to: Keras cannot write {to!r} on {runner.config.backend} ({reason})") from error
    print(f"{to}: written with {runner.config.backend} from {FLAGS.checkpoint}")


def main(argv):
    """Runs in the process that was started."""
    kerasdp.launch(export, num_devices=1, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
