"""Trains one model in a worker process and records what it learned."""

import contextlib
import functools
import gc
import hashlib
import pathlib
import time
import traceback
from typing import Any

import keras
import numpy as np

import kerasdp
from tests.real_code.cases import BATCH, EPOCHS, OTHER_STEPS, Case, Ready, Steps

PROJECTIONS = 8


class Record(keras.callbacks.Callback):
    """The logs of each step, Keras' own: the means of the epoch so far; and the weights before the first step.

    Keras' own `fit` begins with the weights of the file `initial`, which kerasdp on one device made.
    """

    def __init__(self, runner: Any, initial: pathlib.Path | None):
        super().__init__()
        self.runner, self.file, self.values, self.initial = runner, initial, [], {}

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.runner and self.file and self.file.exists():
            with np.load(self.file) as stored:
                self.model.set_weights(list(stored.values()))
        self.initial = self.initial or values_of(self.model)
        if self.runner and self.file and self.runner.config.num_devices == 1:
            np.savez(self.file, *self.initial.values())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.values += [float(value) for _, value in sorted((logs or {}).items())]


def train_one(runner: Any, case: Case, optimizer: str, initial: pathlib.Path | None) -> dict[str, Any]:
    """A line of the results: losses and what the weights learned, or the error in a line.

    Without a `runner`, in Keras' own `fit`, from the weights in the file `initial`, if it is there. With that file the
    samples come in their own order.
    """
    line: dict[str, Any] = {"model": case.name, "optimizer": optimizer}
    started = time.time()
    try:
        keras.utils.set_random_seed(0)
        line |= fit(runner, case, optimizer, initial)
    except kerasdp.UserError as error:
        line["refused"] = str(error)
    except Exception as error:  # whatever happens, the next model is trained
        traceback.print_exc()
        line["error"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:300]}"
    line["seconds"] = round(time.time() - started, 2)
    keras.utils.clear_session()
    if keras.backend.backend() == "jax":
        import jax

        jax.clear_caches()
    gc.collect()
    return line


def fit(runner: Any, case: Case, optimizer: str, initial_file: pathlib.Path | None) -> dict[str, Any]:
    with runner.scope() if runner else contextlib.nullcontext():
        ready: Ready = case.make(np.random.RandomState(0))
        made = make_optimizer(optimizer, OTHER_STEPS.get(case.name, Steps()))
        loss = ready.loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if ready.train is None:
            ready.model.compile(**{"optimizer": made, "loss": loss} | ready.compile)
    record = Record(runner, initial_file)
    if ready.train is not None:
        ready.model = ready.train(record)
    else:
        arguments: dict[str, Any] = {"epochs": EPOCHS, "verbose": 0, "shuffle": initial_file is None} | ready.fit
        arguments["callbacks"] = [*arguments.get("callbacks", []), record]
        if isinstance(ready.x, (np.ndarray, list, dict)):
            arguments["batch_size"] = BATCH
        # Not the model's own where there is a run: KerasHub's tasks would preprocess in it.
        train = functools.partial(runner.fit, ready.model) if runner else ready.model.fit
        train(ready.x, ready.y, **arguments)
    initial, final = record.initial, values_of(ready.model)
    trained = {key for key, weight in weights_of(ready.model).items() if weight.trainable}
    # By value: the path of a seed generator's state is another on torch.
    # Whole numbers are of 32 or of 64 bits, as the backend likes.
    values = [value.astype("int64") if value.dtype.kind in "iu" else value for value in initial.values()]
    digest = hashlib.sha256(b"".join(sorted(value.tobytes() for value in values)))
    return {"losses": record.values, "weights": sum(value.size for value in initial.values())} | {
        "initial": digest.hexdigest()[:16],
        # Apart, because batch norm's statistics go further in a step than all that is trained.
        "learned": [learned(initial, final, trained), learned(initial, final, set(final) - trained)],
    }


def make_optimizer(optimizer: str, steps: Steps) -> keras.optimizers.Optimizer:
    if optimizer == "sgd":
        return keras.optimizers.SGD(steps.sgd, momentum=0.9)
    return keras.optimizers.Adam(steps.adam, epsilon=steps.epsilon)


def weights_of(model: keras.Model) -> dict[str, keras.Variable]:
    """The weights by path, whatever their order; those of one path are told apart by their order."""
    weights: dict[str, keras.Variable] = {}
    for weight in model.weights:
        key, number = weight.path, 2
        while key in weights:
            key, number = f"{weight.path} ({number})", number + 1
        weights[key] = weight
    return weights


def values_of(model: keras.Model) -> dict[str, np.ndarray]:
    # Copies: on some backends the array is a view of the weight.
    return {key: np.array(keras.ops.convert_to_numpy(weight)) for key, weight in weights_of(model).items()}


def learned(initial: dict[str, np.ndarray], final: dict[str, np.ndarray], keys: set[str]) -> list[float]:
    """The length of the way that these weights went, and its projections on random directions."""
    numbers, squares, projections = np.random.RandomState(7), 0.0, np.zeros(PROJECTIONS)
    for key in sorted(keys):
        if final[key].dtype.kind != "f":
            continue
        way = final[key].astype("float64").ravel() - initial[key].astype("float64").ravel()
        squares += float(way @ way)
        projections += np.array([way @ numbers.choice((-1.0, 1.0), way.size) for _ in range(PROJECTIONS)])
    return [float(np.sqrt(squares)), *projections.tolist()]
