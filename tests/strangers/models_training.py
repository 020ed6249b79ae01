"""What people put around a model: callbacks, data sets, optimizers, wrappers."""

from typing import Any

import numpy as np

from tests.real_code.cases import BATCH, CLASSES, EPOCHS, ROWS, Ready, case, classes, rows

KIND = "training"


def small() -> Any:
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(CLASSES)])


def with_callback(name: str) -> Any:
    """Registers a function that makes a callback."""

    def register(make_callback: Any) -> Any:
        @case(KIND, name)
        def make(random: np.random.RandomState) -> Ready:
            callback = make_callback()
            return Ready(model=small(), x=rows(random), y=classes(random), fit={"callbacks": [callback]})

        return make_callback

    return register


@with_callback("callback that clips weights")
def clipping() -> Any:
    import keras

    class Clip(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            for weight in self.model.trainable_variables:
                weight.assign(keras.ops.clip(weight, -0.3, 0.3))

    return Clip()


@with_callback("callback that averages weights")
def averaging() -> Any:
    """At each epoch's end the weights become the mean of all epochs' so far."""
    import keras

    class Average(keras.callbacks.Callback):
        kept: list[Any] = []  # noqa: RUF012

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.kept = [*self.kept, self.model.get_weights()]
            self.model.set_weights([np.mean(parts, axis=0) for parts in zip(*self.kept, strict=True)])

    return Average()


@with_callback("keras.callbacks.LearningRateScheduler")
def scheduling() -> Any:
    import keras

    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)


@with_callback("callback with the rate of a batch")
def warm_up() -> Any:
    import keras

    class WarmUp(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.01 * (batch + 1)

    return WarmUp()


@with_callback("callback that draws noise")
def noise() -> Any:
    """With NumPy's generator, of a seed."""
    import keras

    class Noise(keras.callbacks.Callback):
        random = np.random.RandomState(3)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            kernel = self.model.layers[-1].kernel
            kernel.assign_add(0.01 * self.random.randn(*kernel.shape).astype("float32"))

    return Noise()


@case(KIND, "callback that predicts and stops")
def stopping(random: np.random.RandomState) -> Ready:
    """Predicts by itself at the end of an epoch, and stops the training; with validation."""
    import keras

    x, y = rows(random), classes(random)

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.predict(x, batch_size=BATCH, verbose=0)
            self.model.stop_training = epoch == 1

    return Ready(model=small(), x=x, y=y, fit={"callbacks": [Stop()], "validation_data": (x, y)})


def batches(random: np.random.RandomState, kind: str) -> Any:
    import keras

    x, y = rows(random), classes(random)

    class Batches(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__()
            self.random, self.order = np.random.RandomState(5), np.arange(ROWS)

        def __len__(self) -> int:
            return ROWS // BATCH

        def __getitem__(self, index: int) -> Any:
            chosen = self.order[index * BATCH :][:BATCH]
            noise = self.random.randn(BATCH, 6) if kind == "noise" else np.zeros(1)
            return (x[chosen] + 0.1 * noise).astype("float32"), y[chosen]

        def on_epoch_end(self) -> None:
            if kind == "order":
                self.random.shuffle(self.order)

    return Batches()


@case(KIND, "PyDataset that draws noise", draws=True)
def noisy_batches(random: np.random.RandomState) -> Ready:
    return Ready(model=small(), x=batches(random, "noise"))


@case(KIND, "PyDataset that shuffles itself", draws=True)
def shuffled_batches(random: np.random.RandomState) -> Ready:
    return Ready(model=small(), x=batches(random, "order"))


@case(KIND, "generator that draws rows")
def generator(random: np.random.RandomState) -> Ready:
    def endless() -> Any:
        draw = np.random.RandomState(7)
        while True:
            yield draw.randn(BATCH, 6).astype("float32"), draw.randint(0, CLASSES, BATCH)

    return Ready(model=small(), x=endless(), fit={"steps_per_epoch": 2})


@case(KIND, "sparse rows of scipy")
def sparse_rows(random: np.random.RandomState) -> Ready:
    import keras
    import scipy.sparse

    x = rows(random) * (random.rand(ROWS, 6) > 0.7)
    inputs = keras.Input((6,), sparse=True)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(inputs))
    return Ready(model=model, x=scipy.sparse.csr_matrix(x.astype("float32")), y=classes(random),
                 fit={"batch_size": BATCH})  # fmt: skip


@case(KIND, "ragged rows of tensorflow")
def ragged_rows(random: np.random.RandomState) -> Ready:
    import keras
    import tensorflow as tf

    lengths = random.randint(2, 7, ROWS)
    ids = tf.RaggedTensor.from_row_lengths(random.randint(1, 9, lengths.sum()), lengths)
    inputs = keras.Input((None,), ragged=True, dtype="int64")
    x = keras.ops.mean(keras.layers.Embedding(9, 4)(inputs), axis=1)
    data = tf.data.Dataset.from_tensor_slices((ids, classes(random))).batch(BATCH)
    return Ready(model=keras.Model(inputs, keras.layers.Dense(CLASSES)(x)), x=data)


@case(KIND, "two optimizers in one")
def two_optimizers(random: np.random.RandomState) -> Ready:
    """Kernels by one, biases by another, within an Optimizer."""
    import keras

    class Two(keras.optimizers.Optimizer):
        def __init__(self) -> None:
            super().__init__(learning_rate=0.01)
            self.parts = [keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.01, epsilon=1e-3)]

        def build(self, variables: Any) -> None:
            super().build(variables)
            for part, rank in zip(self.parts, (2, 1), strict=True):
                part.build([each for each in variables if len(each.shape) == rank])

        @property
        def variables(self) -> Any:
            return super().variables + [each for part in getattr(self, "parts", []) for each in part.variables]

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            variables = trainable_variables or self._trainable_variables
            if not self.built:
                self.build(variables)
            for part, rank in zip(self.parts, (2, 1), strict=True):
                chosen = [(g, v) for g, v in zip(grads, variables, strict=True) if len(v.shape) == rank]
                part.apply(*map(list, zip(*chosen, strict=True)))
            self.iterations.assign_add(1)
            return self.iterations

    return Ready(model=small(), x=rows(random), y=classes(random), compile={"optimizer": Two()})


@case(KIND, "optimizer by hand")
def own_optimizer(random: np.random.RandomState) -> Ready:
    """Signs of a running mean of gradients, with centred gradients and slots of its own."""
    import keras
    from keras import ops

    class Signs(keras.optimizers.Optimizer):
        def build(self, variables: Any) -> None:
            super().build(variables)
            self.means = [self.add_variable_from_reference(each, name="mean") for each in variables]

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            mean = self.means[self._get_variable_index(variable)]
            self.assign(mean, 0.9 * mean + 0.1 * (gradient - ops.mean(gradient)))
            self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * ops.tanh(100 * mean))

    return Ready(model=small(), x=rows(random), y=classes(random), compile={"optimizer": Signs(0.01)})


def scikeras_case(name: str, wrapper: str) -> None:
    @case(KIND, name)
    def make(random: np.random.RandomState) -> Ready:
        import keras
        import scikeras.wrappers

        x, y = rows(random), classes(random)

        def train(record: Any) -> Any:
            loss = "mse"
            if wrapper == "KerasClassifier":
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            else:
                model.pop()
                model.add(keras.layers.Dense(1))
            estimator = getattr(scikeras.wrappers, wrapper)(
                model, loss=loss, optimizer=keras.optimizers.SGD(0.003), batch_size=BATCH, epochs=EPOCHS, verbose=0,
                shuffle=False, callbacks=[record], metrics=[])  # fmt: skip
            return estimator.fit(x, y).model_

        model = small()
        return Ready(model=model, x=x, y=y, train=train)


scikeras_case("scikeras KerasClassifier", "KerasClassifier")
scikeras_case("scikeras KerasRegressor", "KerasRegressor")


@case(KIND, "a custom compute_loss")
def own_loss(random: np.random.RandomState) -> Ready:
    """Keras' loss and a penalty on the outputs."""
    import keras

    class Penalized(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # noqa: ANN001, ANN201
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            return loss + 0.01 * keras.ops.mean(keras.ops.square(y_pred))

    model = Penalized([keras.Input((6,)), keras.layers.Dense(CLASSES)])
    return Ready(model=model, x=rows(random), y=classes(random))
