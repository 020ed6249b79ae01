"""Cases of `any_model.py`: models with methods of their own, tasks with their preprocessing among them."""

import keras
import numpy as np
from model_case import X, Y, case, fit, make, mlp, sums


def rate(model):
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


@case
def own_fit(runner):
    """A `fit` that adds a callback, and calls `super()`, is heeded, whichever way it is called."""

    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = rate(self.model) / 2

    class Model(keras.Sequential):
        def fit(self, *args, callbacks=(), **kwargs):
            return super().fit(*args, callbacks=[*(callbacks or ()), Halve()], **kwargs)

    model, other = (make(runner, lambda: Model(mlp().layers)) for _ in range(2))
    losses = fit(runner, model)
    assert losses == other.fit(X, Y, batch_size=7, epochs=2, verbose=0).history["loss"]
    return [*losses, rate(model)]


@case
def fit_by_fit(runner):
    """In a loop of single epochs, whose samples come in new orders, and with a callback that evaluates."""

    class Evaluate(keras.callbacks.Callback):
        found = 0.0

        def on_epoch_end(self, epoch, logs=None):
            self.found = self.model.evaluate(X, Y, verbose=0)

    model, other, evaluate = make(runner, mlp), make(runner, mlp), Evaluate()
    losses = sum((fit(runner, model, epochs=1, callbacks=[evaluate]) for _ in range(3)), [])
    assert evaluate.found == runner.evaluate(model, X, Y)
    one_by_one = sum((fit(runner, other, epochs=epoch + 1, initial_epoch=epoch) for epoch in range(3)), [])
    third = make(runner, mlp)
    np.testing.assert_allclose(one_by_one, fit(runner, third, epochs=3), rtol=1e-6)
    assert losses[0] == one_by_one[0] and losses[1] != one_by_one[1]
    return losses + one_by_one + sums(model)


@case
def data_that_draws(runner):
    """By `keras.random`, whose numbers Keras makes otherwise with each backend; in threads of its own."""

    class Data(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(3)

        def __len__(self):
            return 3

        def __getitem__(self, number):
            own = slice(number * 7, number * 7 + 7)
            noise = keras.ops.convert_to_numpy(keras.random.normal((7, *X.shape[1:]), seed=self.seed))
            return X[own] + noise, Y[own]

    with runner.scope():
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = runner.fit(model, Data(), validation_data=Data(), epochs=2, shuffle=False).history
    return history["loss"] + history["val_loss"]


@case
def data_of_its_own_kind(runner):
    """Attributes named as a source's, targets that a loss knows to be none, missing numbers that a layer replaces."""

    class Loss(keras.losses.SparseCategoricalCrossentropy):
        def call(self, y_true, y_pred):
            return super().call(keras.ops.maximum(y_true, 0), y_pred)

    class Data(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.inputs, self.targets = X, Y - 1

        def __len__(self):
            return 3

        def __getitem__(self, number):
            own = slice(number * 7, number * 7 + 7)
            return self.inputs[own], self.targets[own]

    with runner.scope():
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), Loss(from_logits=True))

    class Missing(keras.layers.Layer):
        def call(self, x):
            return keras.ops.where(keras.ops.isnan(x), 0.0, x)

    with_missing = make(runner, lambda: keras.Sequential([Missing(), keras.layers.Dense(3)]))
    x = np.where(X > 1, np.nan, X)
    losses = runner.fit(with_missing, x, Y, batch_size=7, verbose=0, validation_data=(x, Y)).history["val_loss"]
    losses += runner.fit(model, Data(), epochs=2, verbose=0).history["loss"]
    return losses + fit(runner, model) + runner.fit(model, X, Y - 1, verbose=0).history["loss"] + sums(model)


@case
def own_loop(runner):
    class Model(keras.Sequential):
        def fit(self, *args, **kwargs):
            return "trained somehow"

    return fit(runner, make(runner, lambda: Model(mlp().layers)))


def pipeline_model():
    """A class in the manner of KerasHub's PipelineModel and its tasks."""

    class PipelineModel(keras.Model):
        def preprocess_samples(self, x, y=None, sample_weight=None):
            return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

        def fit(self, *args, **kwargs):
            raise AssertionError("not with a kit that preprocesses before it splits the data")

        predict = fit

        def evaluate(self, *args, _use_cached_eval_dataset=False, **kwargs):
            if _use_cached_eval_dataset:  # by Keras' fit
                return super().evaluate(*args, _use_cached_eval_dataset=True, **kwargs)
            return self.fit()

    class Task(PipelineModel):
        def __init__(self):
            inputs = {name: keras.Input((5,), dtype="int32", name=name) for name in ("tokens", "mask")}
            hidden = keras.layers.Embedding(30, 6)(inputs["tokens"])
            weights = keras.ops.cast(inputs["mask"], "float32")
            hidden = keras.layers.Dropout(0.2)(keras.ops.einsum("bte,bt->be", hidden, weights))
            super().__init__(inputs, keras.layers.Dense(3)(hidden))
            self.compile()

        def compile(self, optimizer="auto", loss="auto", **kwargs):
            optimizer = keras.optimizers.Adam(0.05) if optimizer == "auto" else optimizer
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if loss == "auto" else loss
            super().compile(optimizer=optimizer, loss=loss, **kwargs)

        def preprocess_samples(self, x, y=None, sample_weight=None):
            lengths = [min(len(text), 5) for text in x]
            tokens = [[ord(letter) % 30 for letter in text[:5]] + [0] * (5 - len(text[:5])) for text in x]
            mask = [[int(place < length) for place in range(5)] for length in lengths]
            x = {
                "tokens": keras.ops.convert_to_tensor(tokens, "int32"),
                "mask": keras.ops.convert_to_tensor(mask, "int32"),
            }
            if y is None:
                y = np.zeros(len(lengths), "int32")  # as a language model makes its targets of its inputs
            return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    return Task()


TEXTS = ["word " * (number % 2) + "abcdefghij"[number % 7 : number % 7 + number % 5 + 1] for number in range(22)]


@case
def task(runner):
    """Its `fit` would preprocess the kit's batches once more."""
    with runner.scope():
        model = pipeline_model()
    x, y, _ = keras.utils.unpack_x_y_sample_weight(model.preprocess_samples(TEXTS, Y))
    model.preprocessor = None
    held_out = keras.tree.map_structure(lambda leaf: leaf[:5], (x, y))
    losses = runner.fit(model, x, y, batch_size=7, epochs=2, verbose=0, validation_data=held_out).history["loss"]
    return losses + [runner.evaluate(model, x, y)] + runner.predict(model, x)[3].tolist()


@case
def raw_texts(runner):
    with runner.scope():
        model = pipeline_model()
    runner.fit(model, TEXTS, Y)


@case
def method_of_task(runner):
    return keras.Model.fit(pipeline_model(), TEXTS, Y)
