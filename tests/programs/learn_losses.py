"""Losses and metrics of many kinds, as cases of `learn.py`."""

import numpy as np


def binary(runner):
    """AUC, precision, recall, mean IoU and a loss that is a sum; dense, with a weight penalty and sample weights."""
    import keras
    from keras import metrics
    from learn_classes import fitted

    random = np.random.RandomState(0)
    x, weights = random.randn(101, 8).astype("float32"), random.rand(101).astype("float32")
    y = (x.sum(-1, keepdims=True) + random.randn(101, 1) > 0).astype("float32")
    penalties = {"kernel_regularizer": "l2", "activity_regularizer": keras.regularizers.L2(1e-3)}
    with runner.scope():
        model = keras.Sequential([keras.layers.Dense(16, "tanh", **penalties), keras.layers.Dense(1, "sigmoid")])
        counts = [metrics.Precision(name="precision"), metrics.Recall(name="recall"), metrics.BinaryIoU(name="iou")]
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0),
            keras.losses.BinaryCrossentropy(reduction="sum"),
            metrics=[metrics.AUC(name="auc"), *counts],
            weighted_metrics=["accuracy"],
        )
    # The last batch has one sample: fewer than devices.
    losses, history = fitted(runner, model, x, y, sample_weight=weights, batch_size=10, epochs=3)
    classes = runner.fit(model, x, y, class_weight={0: 1.0, 1: 3.0}, validation_split=0.25, batch_size=16, verbose=0)
    return {"losses": losses, "history": history, "classes": classes.history}


def two_heads(runner):
    """Two inputs, two outputs with loss weights, from a PyDataset."""
    import keras
    from learn_classes import Rows

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
            metrics={"number": ["mae", Rows()], "kind": ["accuracy"]},
        )
    untrained = runner.predict(model, {"a": a, "b": b}, batch_size=16)  # loss and metrics are not built
    history = runner.fit(model, Batches(workers=1), epochs=4, verbose=0)
    return {
        "untrained": untrained["number"].tolist(),
        "history": history.history,
        "evaluate": runner.evaluate(model, {"a": a, "b": b}, y, batch_size=16, return_dict=True),
        "predictions": runner.predict(model, {"a": a, "b": b}, batch_size=16)["number"].tolist(),
    }


def masked_tokens(runner):
    """A loss and a metric for each token but the padding, of which each shard of a batch has another share."""
    import keras
    from learn_classes import fitted

    random = np.random.RandomState(5)
    lengths = random.randint(1, 8, 29)
    x = np.where(np.arange(7) < lengths[:, None], random.randint(1, 12, (29, 7)), 0)
    with runner.scope():
        tokens = keras.layers.Embedding(12, 6, mask_zero=True)
        model = keras.Sequential([keras.Input((7,), dtype="int32"), tokens, keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
    losses, history = fitted(runner, model, x, x % 4, batch_size=8, epochs=2)
    evaluation = runner.evaluate(model, x, x % 4, batch_size=8, return_dict=True)
    return {"losses": losses, "history": history, "evaluate": evaluation}
