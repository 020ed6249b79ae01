"""Fine-tunes a model with adapters (LoRA), or in full: one of KerasHub, of a file, or of a run.

    python recipes/finetune.py --lora_rank=8                          # no download: a small model, trained first
    python recipes/finetune.py --lora_rank=8 --weights=runs/base --dataset=mine.py:data
    python recipes/finetune.py --lora_rank=8 --preset=bert_tiny_en_uncased --dataset=mine.py:texts
    python recipes/finetune.py --lora_rank=8 --backend=jax --gpus=4 --shard=weights --remat=blocks
    python recipes/finetune.py --lora_rank=8 --checkpoint_weights=trained --workdir=runs/tuned        # then --resume

--dataset is a function of yours that returns (x_train, y_train), (x_test, y_test): arrays, or texts, which a preset
preprocesses. model.keras in the workdir is a plain model, with the adapters in its weights. `add_adapters` says which
layers get them. Copy this file into your project, and text.py beside it.
"""

import functools
import json
import math
import os
import pathlib
import runpy
from pydoc_data.topics import topics

from text import build

import kerasdp


def main(config: kerasdp.Config, preset: str | None, weights: str, lora_rank: int) -> None:
    """Runs on this machine; `train` runs in the workers."""
    file = None if weights == "none" else weights
    kerasdp.launch(functools.partial(train, rank=lora_rank, weights=file, preset=preset), config)


def add_adapters(model, rank):
    """Freezes a model, and adds adapters to its projections to queries and values; call it before `compile`."""
    from keras import layers

    if hasattr(model, "backbone"):  # of KerasHub; what is beside the backbone, as a new head, trains
        model.backbone.enable_lora(rank)
        return
    for weight in model.trainable_variables:
        weight.trainable = False
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False  # its statistics stay, too
    attentions = [layer for layer in model.layers if isinstance(layer, layers.MultiHeadAttention)]
    chosen = [each for layer in attentions for each in (layer.query_dense, layer.value_dense)]
    chosen = chosen or [layer for layer in model.layers if isinstance(layer, layers.Dense)][:-1]
    if not chosen:
        raise kerasdp.UserError(f"--lora_rank: {model.name} has no attention, and no Dense before the last layer")
    for layer in chosen:
        layer.enable_lora(rank)


def windows(text: str, length: int = 32, most: int = 1000):
    """Returns (x, y) to train on, and to evaluate on: codes of characters, and of those that follow."""
    import numpy as np

    codes = np.frombuffer(text.encode("ascii", "ignore"), "uint8")[: most * (length + 1)].astype("int32")
    rows = codes[: len(codes) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    return [(part[:, :-1], part[:, 1:]) for part in (rows[len(rows) // 10 :], rows[: len(rows) // 10])]


def train(runner: "kerasdp.Runner", rank: int, weights: str | None, preset: str | None) -> None:
    """Runs in every worker process, after the backend is chosen."""
    import keras

    config, say = runner.config, print if runner.is_chief and runner.config.verbose != 0 else lambda line: None
    if weights or preset:
        path, _, name = config.dataset.partition(":")
        data = runpy.run_path(path)[name]()
    with runner.scope():
        if preset:
            import keras_hub

            num_classes = int(max(data[0][1])) + 1
            model = keras_hub.models.TextClassifier.from_preset(preset, num_classes=num_classes)
        else:
            model = kerasdp.load_model(weights) if weights else build(128)
    if not (weights or preset):
        fit(runner, model, *windows(" ".join(topics.values())), epochs=2)  # however long the second one is
        data = windows(pathlib.Path(functools.__file__).read_text())
    preprocessor = getattr(model, "preprocessor", None)  # of KerasHub
    if preprocessor is not None:
        data = [keras.utils.unpack_x_y_sample_weight(model.preprocess_samples(*part)) for part in data]
        model.preprocessor = None
    if rank:
        add_adapters(model, rank)
    trained = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    say(f"{trained:,} of {model.count_params():,} weights train")
    before, after = fit(runner, model, *data, epochs=config.epochs)
    if runner.is_chief:
        with open(os.path.join(config.workdir, "evaluation.json"), "w") as file:
            json.dump({"before": before, "after": after}, file, indent=2)
    say("held out: " + ", ".join(f"{name} {value:.4g} -> {after[name]:.4g}" for name, value in before.items()))
    if preprocessor is not None:
        model.preprocessor = preprocessor
    kerasdp.export(model, os.path.join(config.workdir, "model.keras"))


def fit(runner, model, train, test, epochs):
    """Compiles, as after any change of what trains, and fits; returns what an evaluation gives before and after."""
    import keras

    own = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"]}
    is_task = hasattr(model, "backbone")  # of KerasHub, which knows its loss and metrics
    optimizer = kerasdp.make_optimizer(runner.config.optimizer, runner.config.learning_rate)
    model.compile(optimizer, **({} if is_task else own))
    before = runner.evaluate(model, *test, return_dict=True)
    runner.fit(model, *train, validation_data=test, epochs=epochs)
    return before, runner.evaluate(model, *test, return_dict=True)


if __name__ == "__main__":
    kerasdp.main(main, flags="finetune")
