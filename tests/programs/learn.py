"""Trains small models on the given backend and device count, and prints what came out as one line of JSON.

python learn.py BACKEND NUM_DEVICES FOLDER [PART ...]
"""

import hashlib
import json
import os
import sys

import numpy as np

import kerasdp


def learn(runner):
    """All proofs in one process: starting a framework costs more than training these models."""
    return {name: PARTS[name](runner) for name in sys.argv[4:] or PARTS}


def lenet(runner):
    """40 steps of LeNet over an epoch's end, whose last batch divides by no device count; metrics of many kinds."""
    import keras
    from learn_classes import MaximumLogit, StepLosses

    data = kerasdp.load_data(runner.config)
    with runner.scope():
        model = kerasdp.build_model(runner.config, data.input_shape, data.num_classes)
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3"), MaximumLogit()],
        )
    initial = digest(model)
    losses = StepLosses(runner)
    history = runner.fit(model, data.train, batch_size=61, epochs=2, callbacks=[losses], validation_data=data.test)
    return {
        "initial": initial,
        "losses": losses.values[:40],
        "final": [weight.tolist() for weight in model.get_weights()],
        "history": history.history,
        "evaluate": runner.evaluate(model, data.test, batch_size=61, return_dict=True),
        "predictions": runner.predict(model, data.test, batch_size=61).tolist(),
        "alone": model.predict(data.test.inputs(np.arange(360)), verbose=0).tolist(),
    }


def binary(runner):
    """AUC, precision, recall, mean IoU and a loss that is a sum; dense, with a weight penalty and sample weights."""
    import keras
    from learn_classes import StepLosses

    random = np.random.RandomState(0)
    x, weights = random.randn(101, 8).astype("float32"), random.rand(101).astype("float32")
    y = (x.sum(-1, keepdims=True) + random.randn(101, 1) > 0).astype("float32")
    with runner.scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(
                    16, "tanh", kernel_regularizer="l2", activity_regularizer=keras.regularizers.L2(1e-3)
                ),
                keras.layers.Dense(1, "sigmoid"),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0),
            keras.losses.BinaryCrossentropy(reduction="sum"),
            metrics=[
                keras.metrics.AUC(name="auc"),
                keras.metrics.Precision(name="precision"),
                keras.metrics.Recall(name="recall"),
                keras.metrics.BinaryIoU(name="iou"),
            ],
            weighted_metrics=["accuracy"],
        )
    losses = StepLosses(runner)
    # The last batch has one sample: fewer than devices.
    history = runner.fit(model, x, y, sample_weight=weights, batch_size=10, epochs=3, verbose=0, callbacks=[losses])
    classes = runner.fit(model, x, y, class_weight={0: 1.0, 1: 3.0}, validation_split=0.25, batch_size=16, verbose=0)
    return {"losses": losses.values, "history": history.history, "classes": classes.history}


def two_heads(runner):
    """Two inputs, two outputs with loss weights, from a PyDataset."""
    import keras

    random = np.random.RandomState(1)
    a, b = random.randn(50, 6).astype("float32"), random.randn(50, 5).astype("float32")
    y = {"number": a[:, :1] * 2, "kind": (b[:, 0] > 0).astype("int32")}

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            rows = slice(11 * index, 11 * index + 11)  # the last batch has 6
            return {"a": a[rows], "b": b[rows]}, {name: values[rows] for name, values in y.items()}

    with runner.scope():
        inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((5,), name="b")}
        x = keras.layers.Dense(8, "tanh")(keras.layers.Concatenate()(list(inputs.values())))
        model = keras.Model(
            inputs,
            {"number": keras.layers.Dense(1, name="number")(x), "kind": keras.layers.Dense(2, name="kind")(x)},
        )
        model.compile(
            keras.optimizers.SGD(0.05),
            loss={"number": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
            loss_weights={"number": 0.3, "kind": 1.0},
            metrics={"number": ["mae"], "kind": ["accuracy"]},
        )
    untrained = runner.predict(model, {"a": a, "b": b}, batch_size=16)  # loss and metrics are not built
    history = runner.fit(model, Batches(workers=1), epochs=4, verbose=0)
    return {
        "untrained": untrained["number"].tolist(),
        "history": history.history,
        "evaluate": runner.evaluate(model, {"a": a, "b": b}, y, batch_size=16, return_dict=True),
        "predictions": runner.predict(model, {"a": a, "b": b}, batch_size=16)["number"].tolist(),
    }


def unused_weights(runner):
    """An output without a loss: its weights have no gradient, and stay. Dropout, which nothing may advance twice."""
    import keras
    from learn_classes import StepLosses

    x = np.random.RandomState(6).randn(30, 5).astype("float32")
    with runner.scope():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dropout(0.3)(keras.layers.Dense(6, "tanh")(inputs))
        outputs = {"learns": keras.layers.Dense(1, name="learns")(hidden), "idle": keras.layers.Dense(2)(hidden)}
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.05), loss={"learns": "mse", "idle": None})
    losses = StepLosses(runner)
    runner.fit(model, x, {"learns": x[:, :1]}, batch_size=8, epochs=2, verbose=0, callbacks=[losses])
    return {"losses": losses.values, "weights": [float(np.abs(weight).sum()) for weight in model.get_weights()]}


def contrastive(runner):
    """A loss of the user's own that needs inputs, and every sample together with every other."""
    import keras
    from keras import ops
    from learn_classes import StepLosses

    class Contrast(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)

        def call(self, x):
            return self.dense(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            near = ops.matmul(x, ops.transpose(x))
            return ops.mean(ops.square(ops.matmul(y_pred, ops.transpose(y_pred)) - near))

    x = np.random.RandomState(2).randn(33, 6).astype("float32")
    with runner.scope():
        model = Contrast()
        model.compile(keras.optimizers.SGD(0.002))
    losses = StepLosses(runner)
    runner.fit(model, x, batch_size=7, epochs=2, verbose=0, callbacks=[losses])
    return {"losses": losses.values}


def batch_norm(runner):
    """Batch norm over the global batch, and over each replica's part."""
    import keras
    from learn_classes import StepLosses

    random = np.random.RandomState(3)
    x, y = random.randint(0, 255, (45, 8, 8, 3)).astype("uint8"), random.randint(0, 5, 45)

    def one(statistics):
        with runner.scope():
            model = keras.Sequential(
                [
                    keras.Input((8, 8, 3)),
                    keras.layers.Rescaling(1 / 255),
                    keras.layers.Conv2D(6, 3),
                    keras.layers.BatchNormalization(),
                    keras.layers.Activation("tanh"),
                    keras.layers.Conv2D(6, 3, strides=2),
                    keras.layers.BatchNormalization(scale=False),
                    keras.layers.Flatten(),
                    keras.layers.Dense(5),
                ]
            )
            model.compile(
                keras.optimizers.SGD(0.05, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            )
        kept, losses = runner.config, StepLosses(runner)
        runner.config = __import__("dataclasses").replace(kept, batch_norm=statistics)
        history = runner.fit(
            model, x, y, batch_size=14, epochs=3, verbose=0, callbacks=[losses], validation_data=(x, y)
        )
        runner.config = kept
        moving = [np.asarray(v).sum().item() for v in model.non_trainable_variables]
        return {"losses": losses.values, "val_loss": history.history["val_loss"], "moving": moving}

    many = random.rand(61, 28, 28, 3).astype("float32") * (random.rand(61, 28, 28, 1) > 0.6)
    layer = kerasdp.layers.BatchNormalization(momentum=0.0)
    layer(many, training=True)
    variance = keras.ops.convert_to_numpy(layer.moving_variance)
    round_off = np.abs(variance / many.astype("float64").var((0, 1, 2)) - 1).max().item()
    return {statistics: one(statistics) for statistics in ("sync", "replica")} | {"round_off": round_off}


def random_layers(runner):
    """Dropout of all kinds, and Keras' other random layers: masks bit for bit, and what is learned through them."""
    import keras
    from keras import layers
    from learn_classes import Jitter, LastOutputs, StepLosses

    random = np.random.RandomState(5)
    x, y = random.rand(45, 6, 6, 4).astype("float32"), random.randint(0, 5, 45)

    def mask(make_layers):
        with runner.scope():
            inputs = keras.Input((6, 6, 4))
            outputs = layers.PReLU()(keras.ops.ones_like(inputs))  # something to train, which leaves the ones alone
            for layer in make_layers():
                outputs = layer(outputs)
            model = keras.Model(inputs, outputs)
            model.compile("sgd", loss=lambda y, outputs: keras.ops.mean(outputs), metrics=[LastOutputs((3, 6, 6, 4))])
        runner.fit(model, x, x, batch_size=14, epochs=2, verbose=0)
        (last,) = [variable for variable in model.metrics_variables if variable.path.startswith("last")]
        dropped = keras.ops.convert_to_numpy(last) == 0
        return [np.packbits(dropped).tobytes().hex(), float(dropped.mean())]

    def learned(make_layers, of_inputs=False):
        with runner.scope():
            # Images are changed before the first weight: TensorFlow's gradient of moving one is only roughly right.
            body = [*make_layers(), layers.Conv2D(6, 3)] if of_inputs else [layers.Conv2D(6, 3), *make_layers()]
            model = keras.Sequential([*body, layers.Flatten(), layers.Dense(5)])
            model.compile(
                keras.optimizers.SGD(0.02, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            )
        losses = StepLosses(runner)
        runner.fit(model, x, y, batch_size=14, epochs=3, verbose=0, callbacks=[losses])
        return losses.values

    return {
        "masks": {
            "dropout": mask(lambda: [layers.Dropout(0.3, seed=4), layers.Dropout(0.3)]),
            "one_for_all": mask(lambda: [layers.Dropout(0.5, noise_shape=(1, 6, None, 4))]),
            "one_for_axes": mask(
                lambda: [layers.Dropout(0.3, noise_shape=(None, 1, 6, 4)), layers.SpatialDropout2D(0.4)]
            ),
        },
        "losses": {
            "noise": learned(
                lambda: [
                    layers.Dropout(0.3),
                    layers.GaussianNoise(0.3),
                    layers.GaussianDropout(0.3),
                    layers.AlphaDropout(0.3),
                    Jitter(),
                ]
            ),
            "images": learned(
                lambda: [layers.RandomFlip(), layers.RandomTranslation(0.2, 0.2), layers.RandomBrightness(0.2, (0, 1))],
                of_inputs=True,
            ),
            "lstm": learned(lambda: [layers.Reshape((4, 24)), layers.LSTM(5, dropout=0.3, recurrent_dropout=0.2)]),
        },
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
            keras.callbacks.ModelCheckpoint(os.path.join(folder, "best.keras"), save_best_only=True),
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


def digest(model):
    return [hashlib.sha256(np.ascontiguousarray(weight).tobytes()).hexdigest()[:16] for weight in model.get_weights()]


PARTS = {
    "lenet": lenet,
    "binary": binary,
    "two_heads": two_heads,
    "unused_weights": unused_weights,
    "contrastive": contrastive,
    "batch_norm": batch_norm,
    "random_layers": random_layers,
    "callbacks": callbacks,
}

if __name__ == "__main__":
    backend, num_devices, folder = sys.argv[1:4]
    os.environ["KERASDP_TEST_FOLDER"] = folder
    result = kerasdp.launch(learn, backend=backend, num_devices=int(num_devices), device="cpu", verbose=0)
    print("RESULT " + json.dumps(result))
