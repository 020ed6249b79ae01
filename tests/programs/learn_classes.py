"""User-defined classes that `learn.py` trains with. Imported within a run, when the backend is chosen."""

import hashlib

import keras
import numpy as np
from keras import ops


class MaximumLogit(keras.metrics.Metric):
    """A metric that no sum over the replicas could give."""

    def __init__(self):
        super().__init__(name="maximum")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self):
        return self.value * 1.0  # not the variable itself, which the next evaluation overwrites


class Rows(keras.metrics.Metric):
    """A count in whole numbers, which adds up."""

    def __init__(self):
        super().__init__(name="rows")
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(self.count + ops.shape(y_pred)[0])

    def result(self):
        return ops.cast(self.count, "float32")


class LastOutputs(keras.metrics.Metric):
    """The last three outputs as they are, dropout included."""

    def __init__(self, shape):
        super().__init__(name="last")
        self.value = self.add_variable(shape, "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(y_pred[-3:])

    def result(self):
        return ops.sum(self.value)

    def reset_state(self):
        pass


class StepLosses(keras.callbacks.Callback):
    """The loss of each step: Keras' logs hold the mean of the epoch so far."""

    def __init__(self, runner):
        super().__init__()
        self.runner, self.values = runner, []

    def on_train_begin(self, logs=None):
        self.runner.state.add_listener(self.listen)

    def on_train_end(self, logs=None):
        self.runner.state.remove_listener(self.listen)

    def listen(self, loss, learning_rate, num_rows):
        self.values.append(float(loss))


def fitted(runner, model, *data, callbacks=(), **options):
    """Trains as `runner.fit` does; returns the loss of each step, and Keras' history."""
    losses = StepLosses(runner)
    history = runner.fit(model, *data, callbacks=[losses, *callbacks], **options).history
    return losses.values, history


def digest_of(model):
    """Of all its variables: equal where all are, bit by bit."""
    values = (np.ascontiguousarray(keras.ops.convert_to_numpy(variable)) for variable in model.variables)
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


class OddRank(keras.callbacks.Callback):
    """Decides differently on each rank, as one that looks at the clock may."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 6 + self.rank:
            self.model.stop_training = True
