"""Trains one model in a worker process and records what it learned."""

import gc
import hashlib
import time
import traceback
from typing import Any

import keras
import numpy as np

import kerasdp
from tests.real_code.cases import BATCH, EPOCHS, OTHER_STEPS, Case, Ready, Steps, load_cases

PROJECTIONS = 8


class Losses(keras.callbacks.Callback):
    """The loss of each step: Keras' logs hold the mean of the epoch so far."""

    def __init__(self, runner: Any):
        super().__init__()
        self.runner, self.values, self.initial = runner, [], {}

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial = values_of(self.model)
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
        line |= fit(runner, load_cases()[name], optimizer)
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


def fit(runner: Any, case: Case, optimizer: str) -> dict[str, Any]:
    with runner.scope():
        ready: Ready = case.make(np.random.RandomState(0))
        made = make_optimizer(optimizer, OTHER_STEPS.get(case.name, Steps()))
        loss = ready.loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        ready.model.compile(made, **{"loss": loss} | ready.compile)
    losses = Losses(runner)
    runner.fit(
        ready.model, ready.x, ready.y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[losses], **ready.fit
    )
    initial, final = losses.initial, values_of(ready.model)
    trained = {key for key, weight in weights_of(ready.model).items() if weight.trainable}
    # By value: the path of a seed generator's state is another on torch.
    # Whole numbers are of 32 or of 64 bits, as the backend likes.
    values = [value.astype("int64") if value.dtype.kind in "iu" else value for value in initial.values()]
    digest = hashlib.sha256(b"".join(sorted(value.tobytes() for value in values)))
    return {"losses": losses.values, "weights": sum(value.size for value in initial.values())} | {
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
