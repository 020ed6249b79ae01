"""Trains small models on the given backend and device count, and prints what came out as one line of JSON.

python learn.py BACKEND NUM_DEVICES [PART ...]
"""

import os
import sys
import tempfile

import numpy as np
from learn_layers import batch_norm, float8, random_layers, round_off
from learn_losses import binary, masked_tokens, two_heads
from starting import printed

import kerasdp


def learn(runner):
    """All proofs in one process: starting a framework costs more than training these models."""
    return {name: PARTS[name](runner) for name in sys.argv[3:] or PARTS}


def lenet(runner):
    """40 steps of LeNet over an epoch's end, whose last batch divides by no device count; metrics of many kinds."""
    import keras
    from learn_classes import MaximumLogit, digest_of, fitted

    data = kerasdp.load_data("digits")
    with runner.scope():
        model = kerasdp.build_model("lenet", data.input_shape, data.num_classes)
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3"), MaximumLogit()],
        )
    initial = digest_of(model)
    losses, history = fitted(runner, model, data.train, batch_size=61, epochs=2, validation_data=data.test)
    return {
        "initial": initial,
        "losses": losses[:40],
        "final": {str(place): weight.tolist() for place, weight in enumerate(model.get_weights())},
        "history": history,
        "evaluate": runner.evaluate(model, data.test, batch_size=61, return_dict=True),
        "predictions": runner.predict(model, data.test, batch_size=61).tolist(),
        "alone": model.predict(data.test.inputs(np.arange(360)), verbose=0).tolist(),
    }


def callbacks(runner):
    """Keras' own callbacks: what they decide, and what they write."""
    import keras
    from learn_classes import OddRank

    folder = os.environ["KERASDP_TEST_FOLDER"]
    random = np.random.RandomState(4)
    x, y = random.randn(40, 6).astype("float32"), random.randint(0, 3, 40)
    with runner.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = runner.fit(
        model, x, y, batch_size=16, epochs=12, verbose=0, validation_data=(-x, y),
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5),
            # Of whole models Keras saves more than their weights, for which it imports TensorFlow: seconds.
            keras.callbacks.ModelCheckpoint(f"{folder}/best.weights.h5", save_best_only=True, save_weights_only=True),
            keras.callbacks.CSVLogger(os.path.join(folder, "log.csv")),
            OddRank(runner.strategy.processes.rank),
        ],
    )  # fmt: skip
    return {
        "history": history.history,
        "rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
        "rows": len(open(os.path.join(folder, "log.csv")).readlines()),
        "files": sorted(os.listdir(folder)),
    }


CASES = (lenet, binary, two_heads, masked_tokens, batch_norm, float8, round_off, random_layers, callbacks)
PARTS = {case.__name__: case for case in CASES}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KERASDP_TEST_FOLDER"] = folder
        printed(learn, *sys.argv[1:3])
