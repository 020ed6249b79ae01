"""Searches with Optuna or keras_tuner, around the runs or within one.

python search.py optuna|keras_tuner around|inside BACKEND NUM_DEVICES FOLDER
"""

import json
import os
import sys

import keras
import numpy as np

import kerasdp

tool, place, backend, num_devices, folder = sys.argv[1:]
if tool == "optuna":
    import optuna
else:
    import keras_tuner
X = np.random.RandomState(0).rand(120, 8).astype("float32")
Y = (X.sum(axis=1) > 4).astype("int32")


def build(units, rate):
    keras.utils.clear_session()  # as many do between trials, and keras_tuner does
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss)
    return model


def fit(model):
    return model.fit(X, Y, batch_size=30, epochs=2, validation_split=0.2, verbose=0).history["val_loss"][-1]


def launch(train):
    return kerasdp.launch(train, backend=backend, num_devices=int(num_devices), device="cpu", verbose=0)


def with_optuna(value_of, num_trials):
    def objective(trial):
        return value_of(trial.suggest_int("units", 2, 16), trial.suggest_float("rate", 1e-4, 1e-1, log=True))

    # The same seed on each rank: they see the same values, so they ask for the same ones next.
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1, n_startup_trials=2))
    study.optimize(objective, n_trials=num_trials)
    return [(trial.params, trial.value) for trial in study.trials]


def build_for(hp):
    return build(hp.Int("units", 2, 16), hp.Float("rate", 1e-4, 1e-1, sampling="log"))


def with_keras_tuner(kind, where, *args, **kwargs):
    options = {"max_trials": 2, "seed": 1, "directory": os.path.join(folder, where)}
    tuner = kind(build_for, keras_tuner.Objective("val_loss", "min"), **options)
    tuner.search(*args, **kwargs)
    return [(trial.hyperparameters.values, float(trial.score)) for trial in tuner.oracle.trials.values()]


def inside(runner):
    rank = runner.strategy.processes.rank
    if tool == "optuna":
        found = with_optuna(lambda units, rate: fit(build(units, rate)), 4)
    else:  # each rank has its own folder
        data = {"batch_size": 30, "epochs": 2, "validation_split": 0.2, "verbose": 0}
        found = with_keras_tuner(keras_tuner.RandomSearch, f"rank-{rank}", X, Y, **data)
    with open(os.path.join(folder, f"trials-{rank}.json"), "w") as file:
        json.dump(found, file)
    return found


if place == "inside":
    trials = launch(inside)
elif tool == "optuna":
    trials = with_optuna(lambda units, rate: launch(lambda runner: fit(build(units, rate))), 2)
else:

    class Search(keras_tuner.RandomSearch):
        def run_trial(self, trial, *args, **kwargs):
            hp = trial.hyperparameters
            return launch(lambda runner: fit(build_for(hp)))

    trials = with_keras_tuner(Search, "around")
print("RESULT " + json.dumps(trials))
