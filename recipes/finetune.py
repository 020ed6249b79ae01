"""Fine-tunes a trained model with LoRA adapters, or in full.

    python recipes/finetune.py --lora_rank=8                          # no download: a small model, trained first
    python recipes/finetune.py --lora_rank=8 --weights=runs/base --dataset=mine.py:data
    python recipes/finetune.py --lora_rank=8 --preset=bert_tiny_en_uncased --dataset=mine.py:texts
    python recipes/finetune.py --lora_rank=8 --checkpoint_weights=trained --workdir=runs/tuned        # then --resume

Expected of the first command: accuracy on upside-down digits rises from 0.4 to 0.9, in half a minute. --dataset is a
function that returns (x_train, y_train), (x_test, y_test): arrays, or texts for a preset. model.keras in the workdir is
a plain Keras model with merged adapters. `add_adapters` chooses their layers. Copy this file and edit it.
"""

import json
import math
import os
import runpy

import numpy as np
from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_string("preset", None, "KerasHub preset: a name (downloaded), or a folder written by save_to_preset.")
flags.DEFINE_string("weights", None, "Model: the --workdir of a run, or a .safetensors or .keras file.")
flags.DEFINE_string("dataset", None, "Data for --preset or --weights, as file.py:function.")
flags.DEFINE_integer("lora_rank", 0, "Rank of the LoRA adapters. 0: no adapters, all weights train.", lower_bound=0)
flags.DEFINE_integer("batch_size", 32, "Samples per step, over all devices.", lower_bound=1)
flags.DEFINE_integer("epochs", 4, "Passes over the training data.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.003, "Learning rate.")
kerasdp.flags.define()  # --backend, --gpus, --precision, --workdir, --resume, and the other arguments of `launch`


def add_adapters(model, rank):
    """Freezes a model, and adds LoRA adapters to its query and value projections. Call this function before `compile`.

    A model without attention gets adapters in all Dense layers except the last one.
    """
    from keras import layers

    if hasattr(model, "backbone"):  # a KerasHub task, whose head also trains
        model.backbone.enable_lora(rank)
        return
    for weight in model.trainable_variables:
        weight.trainable = False
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False  # keeps its moving statistics
    attentions = [layer for layer in model.layers if isinstance(layer, layers.MultiHeadAttention)]
    chosen = [each for layer in attentions for each in (layer.query_dense, layer.value_dense)]
    chosen = chosen or [layer for layer in model.layers if isinstance(layer, layers.Dense)][:-1]
    if not chosen:
        raise kerasdp.UserError(f"--lora_rank: {model.name} has no attention or hidden Dense layer; use --lora_rank=0")
    for layer in chosen:
        layer.enable_lora(rank)


def make_model_and_data(runner):
    """Returns the model to fine-tune, the training data (x, y) and the test data (x, y)."""
    if not (FLAGS.weights or FLAGS.preset):  # first trains on digits, then fine-tunes on upside-down digits
        digits = kerasdp.load_data("digits")
        parts = [(part, np.arange(part.num_samples)) for part in (digits.train, digits.test)]
        training, held_out = ((part.inputs(rows), part.targets(rows)[0]) for part, rows in parts)
        with runner.scope():
            model = kerasdp.build_model("lenet", digits.input_shape, digits.num_classes)
        fit(runner, model, training, held_out, epochs=3)
        return model, *((x[:, ::-1], y) for x, y in (training, held_out))
    path, _, name = FLAGS.dataset.partition(":")
    training, held_out = runpy.run_path(path)[name]()
    with runner.scope():
        if FLAGS.weights:
            return kerasdp.load_model(FLAGS.weights), training, held_out
        import keras_hub

        model = keras_hub.models.TextClassifier.from_preset(FLAGS.preset, num_classes=int(max(training[1])) + 1)
    return model, training, held_out


def train(runner):
    """Trains the model, after the backend is chosen. With torch this function runs in one process for each device."""

    model, *data = make_model_and_data(runner)
    preprocessor = getattr(model, "preprocessor", None)  # of a KerasHub task
    if preprocessor is not None:
        data = [model.preprocess_samples(*part)[:2] for part in data]
        model.preprocessor = None
    if FLAGS.lora_rank:
        add_adapters(model, FLAGS.lora_rank)
    num_trained = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    before, after = fit(runner, model, *data, epochs=FLAGS.epochs)
    if runner.is_chief:
        print(f"{num_trained:,} of {model.count_params():,} weights train")
        print("held out: " + ", ".join(f"{name} {value:.4g} -> {after[name]:.4g}" for name, value in before.items()))
        with open(os.path.join(runner.config.workdir, "evaluation.json"), "w") as file:
            json.dump({"before": before, "after": after}, file, indent=2)
    if preprocessor is not None:
        model.preprocessor = preprocessor
    kerasdp.export(model, os.path.join(runner.config.workdir, "model.keras"))


def fit(runner, model, training, held_out, epochs):
    """Compiles and trains a model. Returns its loss and accuracy on held-out data before and after the training."""
    import keras

    optimizer = keras.optimizers.Adam(FLAGS.learning_rate)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    before = runner.evaluate(model, *held_out, return_dict=True)
    runner.fit(model, *training, batch_size=FLAGS.batch_size, epochs=epochs, validation_data=held_out)
    return before, runner.evaluate(model, *held_out, return_dict=True)


def main(argv):
    """Starts the training with the flags."""
    given = kerasdp.flags.values(argv)
    if FLAGS.preset and FLAGS.weights:
        raise kerasdp.UserError("--preset and --weights both name the model: leave out one of them")
    if bool(FLAGS.preset or FLAGS.weights) != bool(FLAGS.dataset):
        raise kerasdp.UserError("use --dataset=FILE.py:FUNCTION together with --weights or --preset")
    kerasdp.launch(train, **given)


if __name__ == "__main__":
    app.run(main)
