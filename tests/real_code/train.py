"""Trains one model in a worker process and records what it learned."""

import gc
import hashlib
import time
import traceback
from typing import Any

import keras
import numpy as np

import kerasdp
from tests.real_code.cases import BATCH, EPOCHS, Ready, load_cases

PROJECTIONS = 8


class Losses(keras.callbacks.Callback):
    """The loss of each step: Keras' logs hold the mean of the epoch so far."""

    def __init__(self, runner: Any):
        super().__init__()
        self.runner, self.values, self.initial = runner, [], {}

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial = weights_of(self.model)
        self.runner.state.add_listener(self.listen)

    def on_train_end(self, logs: Any = None) -> None:
        self.runner.state.remove_listener(self.listen)

    def listen(self, loss: Any, learning_rate: Any, num_rows: int) -> None:
        self.values.append(float(loss))


def train_one(runner: Any, name: str, optimizer: str) -> dict[str, Any]:
    """A line of the results: losses and what the weights learned, or the error in a line."""
    line: dict[str, Any] = {"model": name, "optimizer": optimizer}
    started = time.time()
    try:
        keras.utils.set_random_seed(runner.config.seed)
        line |= fit(runner, load_cases()[name].make, optimizer)
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


def fit(runner: Any, make: Any, optimizer: str) -> dict[str, Any]:
    with runner.scope():
        ready: Ready = make(np.random.RandomState(0))
        rate = ready.rates[optimizer]
        made = keras.optimizers.SGD(rate, momentum=0.9) if optimizer == "sgd" else keras.optimizers.Adam(rate)
        loss = ready.loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        ready.model.compile(made, **{"loss": loss} | ready.compile)
    losses = Losses(runner)
    runner.fit(
        ready.model, ready.x, ready.y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[losses], **ready.fit
    )
    initial, final = losses.initial, weights_of(ready.model)
    # By value: the path of a seed generator's state is another on torch.
    # Whole numbers are of 32 or of 64 bits, as the backend likes.
    values = [value.astype("int64") if value.dtype.kind in "iu" else value for value in initial.values()]
    digest = hashlib.sha256(b"".join(sorted(value.tobytes() for value in values)))
    return {"losses": losses.values, "weights": sum(value.size for value in initial.values())} | {
        "initial": digest.hexdigest()[:16],
        "learned": learned(initial, final),
    }


def weights_of(model: keras.Model) -> dict[str, np.ndarray]:
    """The weights by path, whatever their order; those of one path are told apart by their order."""
    values: dict[str, np.ndarray] = {}
    for weight in model.weights:
        key, number = weight.path, 2
        while key in values:
            key, number = f"{weight.path} ({number})", number + 1
        # A copy: on some backends the array is a view of the weight.
        values[key] = np.array(keras.ops.convert_to_numpy(weight))
    return values


def learned(initial: dict[str, np.ndarray], final: dict[str, np.ndarray]) -> list[float]:
    """The length of the way that all weights went, and its projections on random directions."""
    numbers, squares, projections = np.random.RandomState(7), 0.0, np.zeros(PROJECTIONS)
    for key in sorted(final):
        if final[key].dtype.kind != "f":
            continue
        way = final[key].astype("float64").ravel() - initial[key].astype("float64").ravel()
        squares += float(way @ way)
        projections += np.array([way @ numbers.choice((-1.0, 1.0), way.size) for _ in range(PROJECTIONS)])
    return [float(np.sqrt(squares)), *projections.tolist()]
