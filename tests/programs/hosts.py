"""Trains in one of several processes; prints what came out.

python hosts.py SETTINGS: fields of kerasdp.Config as JSON, and
    fails: the last process raises an error behind step 5
    frozen: the first layer with weights is, and a metric has 4,096 numbers
    own_step: trains with a loop of its own instead
"""

import functools
import json
import sys

import numpy as np

import kerasdp

OWN = ("fails", "frozen", "own_step", "dataset", "model", "optimizer", "learning_rate", "epochs")


def loop(runner):
    """Returns the losses of a loop of its own."""
    import keras

    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64)])
        optimizer = keras.optimizers.Adam()

    @runner.step
    def step(x):
        weights = model.trainable_variables
        loss, gradients = kerasdp.value_and_grad(lambda: keras.ops.mean(model(x)), weights)()
        optimizer.apply(gradients, weights)
        return loss

    return [float(step(batch)) for batch in runner.batches(np.ones((20, 4)))]


def train(settings, runner):
    import keras
    from learn_classes import StepLosses

    rows = 200
    data = kerasdp.load_data(settings.get("dataset", "digits"))
    x, y = data.train.inputs(np.arange(rows)), data.train.targets(np.arange(rows))[0]
    with runner.scope():
        model = kerasdp.build_model(settings.get("model", "lenet"), data.input_shape, data.num_classes)
        metrics = ["accuracy"]
        if "frozen" in settings:
            next(layer for layer in model.layers if layer.weights).trainable = False
            metrics.append(keras.metrics.MeanIoU(64, sparse_y_pred=False))
        model.compile(
            kerasdp.make_optimizer(
                settings.get("optimizer", "sgd(learning_rate=0.03, momentum=0.9)"), settings.get("learning_rate")
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=metrics,
        )
    losses, steps = StepLosses(runner), []
    is_last = runner.strategy.processes.rank == runner.strategy.processes.num_processes - 1

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)
            if is_last and len(steps) == 5 and "fails" in settings:
                raise ValueError("bad luck")

    runner.fit(model, x, y, epochs=settings.get("epochs", 2), callbacks=[losses, Steps()])
    return {
        "losses": losses.values,
        "evaluate": runner.evaluate(model, x[::-1][:131], y[::-1][:131], return_dict=True),
        "predictions": runner.predict(model, x[:77]).tolist(),
        "gradient_bytes": sum(int(np.prod(weight.shape)) for weight in model.trainable_weights) * 4,
    }


def main():
    settings = json.loads(sys.argv[1])
    fields = {name: value for name, value in settings.items() if name not in OWN}
    fields = {"backend": "tensorflow", "device": "cpu", "verbose": 0, "batch_size": 61} | fields
    function = loop if "own_step" in settings else functools.partial(train, settings)
    print("RESULT", json.dumps(kerasdp.launch(function, kerasdp.Config(**fields))))


if __name__ == "__main__":
    main()
