"""Records the events of callbacks: `events.py keras CASES` of Keras' own `fit`, `events.py BACKEND CASES` of a run's.

CASES is a list of names, in JSON. Writes for each the events with their logs, the history, what `evaluate` and
`predict` return, and the weights.
"""

import json
import sys
import tempfile

import numpy as np

X = np.sin(np.arange(88.0)).reshape(22, 4).astype("float32")
Y = np.cos(np.arange(44.0)).reshape(22, 2).astype("float32")
BATCH = {"batch_size": 5}


def batches(count=None):
    """The batches of an iterator: all of an epoch again and again, or so many."""
    place = 0
    while count is None or place < count:
        first = 5 * (place % 4)
        yield X[first : first + 5], Y[first : first + 5]
        place += 1


def recorder(stop_at=None):
    import keras

    class Recorder(keras.callbacks.Callback):
        """Notes each event; ends training, evaluation or prediction at the one that it was told."""

        def __init__(self):
            super().__init__()
            self.found = []

        def note(self, name, place, logs):
            logs = dict(logs or {})
            if keras.backend.backend() == "torch":
                logs["in the mode of training"] = self.model.training
            if "outputs" in logs:
                logs["outputs"] = float(np.sum(keras.ops.convert_to_numpy(logs["outputs"])))
            self.found.append([name, place, {key: float(logs[key]) for key in sorted(logs)}])
            if [name, place] == stop_at:
                self.model.stop_training = self.model.stop_evaluating = self.model.stop_predicting = True

    def event(name, has_place):
        if has_place:
            return lambda self, place, logs=None: self.note(name, place, logs)
        return lambda self, logs=None: self.note(name, None, logs)

    for kind in ("train", "test", "predict"):
        for at in ("begin", "end"):
            for name in (f"on_{kind}_{at}", f"on_{kind}_batch_{at}"):
                setattr(Recorder, name, event(name, "batch" in name))
    for at in ("begin", "end"):
        setattr(Recorder, f"on_epoch_{at}", event(f"on_epoch_{at}", True))
    return Recorder()


def make(own_step=False, averaged=True, **compiled):
    import keras

    class OwnStep(keras.Sequential):
        """Gives logs that are no metrics."""

        def train_step(self, *args):
            if keras.backend.backend() == "jax":
                logs, state = super().train_step(*args)
                return {"own": logs["loss"] * 2}, state
            return {"own": super().train_step(*args)["loss"] * 2}

    kind = OwnStep if own_step else keras.Sequential
    model = kind([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
    model.set_weights(
        [np.sin(np.arange(weight.size, dtype="float32")).reshape(weight.shape) for weight in model.get_weights()]
    )
    optimizer = keras.optimizers.Adam(0.1, use_ema=averaged, ema_momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return model


def sums(model):
    return [np.sum(weight, dtype="float64").item() for weight in model.get_weights()]


def fitted(model, fit, evaluate, predict, stop_at=None, **options):
    record = recorder(stop_at)
    if "x" not in options:
        options |= {"x": X, "y": Y, **BATCH}
    history = fit(model, callbacks=[record], shuffle=False, verbose=0, **options)
    return {
        "events": record.found,
        "history": history.history,
        "epoch": history.epoch,
        "weights": sums(model),
    }


def restored(make, fit, evaluate, predict):
    """A callback of Keras' lets the second training continue the first."""
    import keras

    with tempfile.TemporaryDirectory() as folder:
        for epochs in (2, 3):
            callback = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
            record = recorder()
            model = make()
            history = fit(model, X, Y, callbacks=[callback, record], shuffle=False, verbose=0, epochs=epochs, **BATCH)
    return {"events": record.found, "epoch": history.epoch, "weights": sums(model)}


def limited(make, *methods):
    """Keras is told to make epochs short: as with `steps_per_epoch`, the next one continues in the data."""
    import keras

    found = []
    for most in (2, 1000):
        keras.config.set_max_steps_per_epoch(most)
        try:
            found += [fitted(make(), *methods, epochs=2), used(make(), *methods)]
        finally:
            keras.config.set_max_steps_per_epoch(None)
    return found


def trained_again(make, runner):
    """Weights and their averages are one array after a training; on jax Keras (3.15) itself fails then."""
    model = make()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            history = runner.fit(model, X, Y, shuffle=False, verbose=0, epochs=1, **BATCH)
            found = [history.history, runner.evaluate(model, X, Y, verbose=0, **BATCH)]
            model.save(f"{folder}/model.keras")
    return {"found": [*found, sums(model)]}


def used(model, fit, evaluate, predict, stop_at=None):
    record = recorder(stop_at)
    of_evaluate = [
        evaluate(model, X, Y, callbacks=[record], verbose=0, return_dict=each, **BATCH) for each in (False, True)
    ]
    outputs = predict(model, X, callbacks=[record], verbose=0, **BATCH)
    return {"events": record.found, "evaluate": of_evaluate, "predict": [outputs.shape, np.sum(outputs).item()]}


SEVERAL = "several steps"


def cases():
    yield "plain", fitted, {}, {"epochs": 2}
    yield "validation", fitted, {}, {"epochs": 4, "validation_data": (X[:7], Y[:7]), "validation_freq": 2}
    yield "validation by list", fitted, {}, {"epochs": 3, "validation_data": (X, Y), "validation_freq": [1, 3]}
    yield "later epochs", fitted, {}, {"epochs": 4, "initial_epoch": 2, "validation_split": 0.25}
    # Keras (3.15) fails with averages of weights that were not trained, on tensorflow.
    yield "no epoch", fitted, {"averaged": False}, {"epochs": 1, "initial_epoch": 1}
    yield "steps of arrays", fitted, {}, {"epochs": 2, "steps_per_epoch": 2}
    yield "an iterator", fitted, {}, {"x": batches(), "epochs": 2, "steps_per_epoch": 3}
    yield "stopped in an epoch", fitted, {}, {"epochs": 3, "stop_at": ["on_train_batch_end", 2]}
    yield "stopped after an epoch", fitted, {}, {"epochs": 3, "stop_at": ["on_epoch_end", 1]}
    yield "own logs", fitted, {"own_step": True}, {"epochs": 2, "validation_data": (X, Y)}
    yield "used", used, {}, {}
    yield "used in part", used, {}, {"stop_at": ["on_test_batch_end", 1]}
    yield "predicted in part", used, {}, {"stop_at": ["on_predict_batch_end", 1]}
    yield "restored by a callback", restored, None, {}
    yield "short epochs", limited, None, {}
    yield SEVERAL, fitted, {"steps_per_execution": 3}, {"epochs": 2, "validation_data": (X, Y)}


def found(make, *methods):
    return {
        name: function(make if of_model is None else make(**of_model), *methods, **options)
        for name, function, of_model, options in cases()
        if name in json.loads(sys.argv[2])
    }


def of_keras():
    import keras

    return found(make, keras.Model.fit, keras.Model.evaluate, keras.Model.predict)


def refused(runner):
    """What a callback may not do, and outputs that cannot be joined."""
    import keras

    import kerasdp

    with runner.scope():
        model, other = make(), make()

    def message(function, *args, **options):
        try:
            function(model, *args, **options)
        except kerasdp.UserError as error:
            return str(error)

    def compiles(epoch, logs):
        if epoch == 1:
            model.compile("sgd", "mse")

    def trains(epoch, logs):
        runner.fit(other, X, Y)

    made = keras.callbacks.LambdaCallback
    return {
        "compiles": message(runner.fit, X, Y, epochs=3, callbacks=[made(on_epoch_begin=compiles)]),
        "trains": message(runner.fit, X, Y, callbacks=[made(on_epoch_end=trains)]),
    }


def of_run(runner):
    if sys.argv[2] == "refused":
        return refused(runner)

    def make_in_scope(**options):
        with runner.scope():
            return make(**options)

    if sys.argv[2] == "again":
        return trained_again(make_in_scope, runner)
    return found(make_in_scope, runner.fit, runner.evaluate, runner.predict)


if __name__ == "__main__":
    if sys.argv[1] == "keras":
        print("RESULT", json.dumps(of_keras()))
    else:
        import kerasdp

        print("RESULT", json.dumps(kerasdp.launch(of_run, backend=sys.argv[1], num_devices=1, check="off")))
