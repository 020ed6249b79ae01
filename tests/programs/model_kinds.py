"""Cases of `any_model.py`: models that are built or called in other ways than most."""

import numpy as np
from model_case import RANDOM, X, Y, case, fit, make, mlp, sums


@case
def never_called(runner):
    """A layer that `call` does not use is never built."""
    import keras

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = keras.layers.Dense(3), keras.layers.Dense(5)

        def call(self, x):
            return self.used(x)

    model = make(runner, Model)
    return fit(runner, model, validation_data=(X, Y)) + list(runner.predict(model, X)[0].tolist())


@case
def compiled_loss_not_used(runner):
    """A `compute_loss` of the model's own, which makes no use of the loss that it is compiled with."""
    import keras

    class Model(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))

    def build():
        inputs = keras.Input((4,))
        return Model(inputs, keras.layers.Dense(3)(inputs))

    return fit(runner, make(runner, build))


@case
def called_in_training(runner):
    """An auxiliary head: Keras builds models by a call that is none of training."""
    import keras

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.head, self.auxiliary = keras.layers.Dense(3), keras.layers.Dense(3)

        def call(self, x, training=False):
            return self.head(x) + self.auxiliary(x * x) if training else self.head(x)

    model = make(runner, Model)
    return fit(runner, model, validation_data=(X, Y)) + sums(model)


@case
def equal_paths(runner):
    """Two towers whose layers have the same names, so that their weights have the same paths."""
    import keras

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.towers = [keras.layers.Dense(6, name="tower") for _ in range(2)]
            self.head = keras.layers.Dense(3)

        def call(self, x):
            left, right = self.towers
            return self.head(keras.ops.relu(left(x)) + keras.ops.tanh(right(x)))

    model = make(runner, Model)
    losses = fit(runner, model)
    assert len({variable.path for variable in model.variables}) < len(model.variables)
    return losses + sums(model)


@case
def only_predicts(runner):
    """Neither compiled nor called before, and without a `build` of its own."""
    import keras

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = keras.layers.Dense(6, "relu"), keras.layers.Dense(3)

        def call(self, x):
            return self.last(self.first(x))

    with runner.scope():
        model = Model()
    with runner.scope():
        built = Model()
    built.build((None, 4))  # in Keras the layers within are not
    return runner.predict(model, X)[5].tolist() + runner.predict(built, X)[5].tolist()


@case
def stateful(runner):
    """Goes on in the second batch where the first one ended: as one batch of sequences twice as long."""
    import keras

    def build(is_stateful):
        layers = [keras.layers.LSTM(6, stateful=is_stateful), keras.layers.Dense(3)]
        model = make(runner, lambda: keras.Sequential(layers))
        x = np.concatenate([x_early, x_late]) if is_stateful else np.concatenate([x_early, x_late], axis=1)
        return model, x, runner.fit(model, x, Y[: len(x)], batch_size=7, shuffle=False, verbose=0).history["loss"]

    x_early, x_late = (RANDOM.randn(7, 3, 4).astype("float32") for _ in range(2))
    (model, x, losses), (other, x_long, _) = build(True), build(False)
    other.set_weights(model.get_weights())
    model.layers[0].reset_state()
    np.testing.assert_allclose(
        runner.predict(model, x, batch_size=7)[7:], runner.predict(other, x_long, batch_size=7), atol=1e-6
    )
    return losses


@case
def nothing_to_train(runner):
    """A model without weights to train, but with moving statistics."""
    import keras

    norm = {"center": False, "scale": False}
    model = make(runner, lambda: keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(**norm)]))
    return fit(runner, model) + sums(model)


def rate(model):
    import keras

    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


@case
def own_fit(runner):
    """A `fit` that adds a callback, and calls `super()`, is heeded, whichever way it is called."""
    import keras

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
def own_loop(runner):
    import keras

    class Model(keras.Sequential):
        def fit(self, *args, **kwargs):
            return "trained somehow"

    return fit(runner, make(runner, lambda: Model(mlp().layers)))


def pipeline_model():
    """A class in the manner of KerasHub's PipelineModel and its tasks."""
    import keras

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
    """Its `fit` would hand the kit's batches to its preprocessor; texts are preprocessed before."""
    losses = []
    for texts in (TEXTS, np.array(TEXTS)):
        with runner.scope():
            model = pipeline_model()
        arguments = {"batch_size": 7, "epochs": 2, "verbose": 0, "validation_data": (texts[:5], Y[:5])}
        losses.append(runner.fit(model, texts, Y, **arguments).history["loss"])
    assert losses[0] == losses[1]
    return losses[0] + [runner.evaluate(model, TEXTS, Y)] + runner.predict(model, TEXTS)[3].tolist()


@case
def method_of_task(runner):
    import keras

    return keras.Model.fit(pipeline_model(), TEXTS, Y)
