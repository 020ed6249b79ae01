"""Trains the nets of pipelines.py with gradients that add up over micro-batches, and prints what came out.

python accumulate.py CASES: a JSON list of cases; each holds fields of kerasdp.Config, and
    net: "random" (dropout, penalties, two outputs; sample weights), "subclassed": the same, as no functional model;
        "norms" (batch norm), or "by_hand": the same, its micro-batches one after another in a plain loop
    loss: in place of the net's own, "squares": the same, user-defined; "sum": a sum over the rows, without weights; or
        one that needs the whole batch, "dice" or "against_mean": the run fails, and the result is its error
"""

import functools
import json
import sys

import numpy as np
import pipelines

import kerasdp

NUMBERS = np.random.RandomState(0)
X, KINDS = NUMBERS.randint(0, 256, (36, 12, 12, 3)), NUMBERS.randint(0, 5, 36)
WEIGHTS = NUMBERS.rand(36)


@kerasdp.per_sample
def squares(y, outputs):
    return ((y - outputs) ** 2)[:, 0]


def against_mean(y, outputs):
    from keras import ops

    return ops.square(outputs - ops.mean(outputs, axis=0) - y)


def subclassed(keras):
    """The functional net, behind a `call` of its own."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = pipelines.random(keras)

        def call(self, x, training=False):
            return self.net(x, training=training)

    return Own()


def with_random_layers(runner, net, loss):
    """36 samples in batches of 16: the last one has 4."""
    import keras
    from learn_classes import MaximumLogit, StepLosses

    losses = StepLosses(runner)
    reduction = "sum" if loss == "sum" else "sum_over_batch_size"
    with runner.scope():
        model = subclassed(keras) if net == "subclassed" else pipelines.random(keras)
        model.compile(
            keras.optimizers.SGD(0.02, momentum=0.9, global_clipnorm=0.5),
            {
                "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
                "size": {
                    "squares": squares, "against_mean": against_mean, "sum": keras.losses.MeanSquaredError("sum"),
                }.get(loss, loss or "mse"),
            },
            metrics={"kind": ["accuracy", MaximumLogit()]},
            weighted_metrics={"size": "mae"},
        )  # fmt: skip
    y = {"kind": KINDS, "size": KINDS[:, None].astype("float64")}
    x = X.astype("uint8")
    weights = None if loss == "sum" else WEIGHTS
    data = {"sample_weight": weights, "validation_data": (x, y, WEIGHTS)}
    # A size of its own: the micro-batches are those of these batches.
    history = runner.fit(model, x, y, batch_size=16, epochs=2, callbacks=[losses], **data).history
    return {
        "losses": losses.values,
        "history": history,
        "evaluate": runner.evaluate(model, x, y, sample_weight=WEIGHTS, return_dict=True),
        "outputs": np.asarray(runner.predict(model, x[:7])["kind"]).tolist(),
        "weights": weights_of(keras, model),
    }


def with_batch_norm(runner, by_hand):
    import keras
    from learn_classes import StepLosses

    losses, x = StepLosses(runner), (X / 255)[:32]
    with runner.scope():
        model = pipelines.norms(keras)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if by_hand:
        losses.values = pipelines.by_hand(keras, model, x, KINDS[:32])
    else:
        runner.fit(model, x, KINDS[:32], batch_size=16, epochs=2, shuffle=False, callbacks=[losses])
    return {"losses": losses.values, "weights": weights_of(keras, model)}


def weights_of(keras, model):
    return [keras.ops.convert_to_numpy(weight).astype("float64").flatten().tolist() for weight in model.weights]


def train(runner, net, loss):
    if net in ("norms", "by_hand"):
        return with_batch_norm(runner, net == "by_hand")
    return with_random_layers(runner, net, loss)


def main():
    results = []
    for case in json.loads(sys.argv[1]):
        case = {"device": "cpu", "verbose": 0, "batch_size": 32, "precision": "float64"} | case
        job = functools.partial(train, net=case.pop("net"), loss=case.pop("loss", None))
        try:
            results.append(kerasdp.launch(job, **case))
        except kerasdp.UserError as error:
            results.append(str(error))
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
