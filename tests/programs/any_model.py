"""Trains subclasses of `keras.Model` of many kinds: what each gives, or why it is refused.

python any_model.py BACKEND NUM_DEVICES [CASE...]
"""

import functools
import json
import os
import sys

import numpy as np

import kerasdp

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(22, 4).astype("float32"), (np.arange(22) % 3).astype("int32")
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def train(runner, names):
    left_out = () if MADE_BEFORE else ("made_before_launch", "optimizer_made_before_launch")
    return {name: outcome(CASES[name], runner) for name in names or CASES if name not in left_out}


def outcome(function, runner):
    try:
        return function(runner)
    except kerasdp.UserError as error:
        return str(error)
    except Exception as error:
        return f"a crash: {type(error).__name__}: {error}"


def make(runner, build, optimizer=None, metrics=None):
    import keras

    with runner.scope():
        model = build()
        compile_it(model, optimizer or keras.optimizers.SGD(0.1, momentum=0.9), metrics)
    return model


def compile_it(model, optimizer, metrics=None):
    import keras

    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=metrics)


def fit(runner, model, **kwargs):
    return runner.fit(model, X, Y, **({"batch_size": 7, "epochs": 2, "verbose": 0} | kwargs)).history["loss"]


def sums(model):
    """Of each weight: equal where the weights are, up to round-off."""
    import keras

    return sorted(float(np.abs(keras.ops.convert_to_numpy(weight).astype("float64")).sum()) for weight in model.weights)


def mlp():
    import keras

    layers = [
        keras.layers.Dense(8, "relu", name="first"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(3, name="last"),
    ]
    return keras.Sequential([keras.Input((4,)), *layers])


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
def all_frozen(runner):
    """Nothing to train: passes without an update; batch norm keeps its statistics, as a frozen one does in Keras."""

    model = make(runner, mlp)
    model.trainable = False
    return fit(runner, model) + sums(model)


@case
def nothing_to_train(runner):
    """A model without weights to train, but with moving statistics."""
    import keras

    norm = {"center": False, "scale": False}
    model = make(runner, lambda: keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(**norm)]))
    return fit(runner, model) + sums(model)


@case
def lora(runner):
    """Enabled between two fits, with a second `compile`."""
    import keras

    model = make(runner, mlp)
    losses = fit(runner, model)
    with runner.scope():
        model.get_layer("first").enable_lora(2)
        compile_it(model, keras.optimizers.Adam(0.01))
    return losses + fit(runner, model) + sums(model)


@case
def lora_without_compile(runner):
    model = make(runner, mlp)
    fit(runner, model)
    model.get_layer("first").enable_lora(2)
    return fit(runner, model)


@case
def frozen_between_fits(runner):
    """Without a second `compile`: takes effect at once, whatever the backend."""
    model = make(runner, mlp)
    losses = fit(runner, model)
    model.get_layer("first").trainable = False
    before = sums(model.get_layer("first"))
    losses += fit(runner, model)
    assert sums(model.get_layer("first")) == before
    model.get_layer("first").trainable = True
    losses += fit(runner, model)
    assert sums(model.get_layer("first")) != before
    return losses + sums(model)


@case
def frozen_by_callback(runner):
    import keras

    class Freeze(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.get_layer("first").trainable = epoch == 1

    model = make(runner, mlp)
    return fit(runner, model, epochs=4, callbacks=[Freeze()]) + sums(model)


@case
def unfrozen_without_compile(runner):
    """The optimizer was built without the weights of the layer that was frozen."""
    model = make(runner, mlp)
    model.get_layer("first").trainable = False
    fit(runner, model)
    model.get_layer("first").trainable = True
    return fit(runner, model)


@case
def quantized(runner):
    """After building; the kernel of the layer is int8 then, and not trained."""
    import keras

    def build():
        model = mlp()
        model.get_layer("first").quantize("int8")
        return model

    return fit(runner, make(runner, build, keras.optimizers.Adam(0.01)))


@case
def no_scope(runner):
    """Model, optimizer and metric made outside of `runner.scope()`, as in most scripts."""
    import keras

    optimizer = keras.optimizers.Adam(0.01)
    model = mlp()
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return fit(runner, model) + sums(model)


@case
def twice(runner):
    """The same model twice, with a `compile` between, then another model."""
    import keras

    model = make(runner, mlp)
    losses = fit(runner, model) + fit(runner, model)
    with runner.scope():
        compile_it(model, keras.optimizers.Adam(0.01))
    losses += fit(runner, model)
    other = make(runner, mlp)
    return losses + fit(runner, other) + fit(runner, model) + sums(model) + sums(other)


@case
def methods_of_the_model(runner):
    """`model.fit`, `evaluate` and `predict` mean the runner's."""
    import keras

    model, other = (make(runner, mlp) for _ in range(2))
    arguments = {"batch_size": 7, "epochs": 2, "verbose": 0, "validation_data": (X, Y)}
    histories = [model.fit(X, Y, **arguments).history, runner.fit(other, X, Y, **arguments).history]
    assert histories[0] == histories[1]
    evaluated = [float(model.evaluate(X, Y, 7, verbose=0)), float(runner.evaluate(other, X, Y, 7))]
    assert evaluated[0] == evaluated[1]
    predictions = model.predict(X, verbose=0)
    np.testing.assert_array_equal(predictions, runner.predict(other, X))
    assert model.predict_on_batch(X).shape == (22, 3)
    keras.ops.convert_to_numpy(model(X))  # still a function of tensors
    return histories[0]["loss"] + evaluated + predictions[0].tolist()


@case
def train_on_batch(runner):
    return float(make(runner, mlp).train_on_batch(X, Y))


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


MADE_BEFORE = []


@case
def made_before_launch(runner):
    return fit(runner, MADE_BEFORE[0])


@case
def optimizer_made_before_launch(runner):
    return fit(runner, make(runner, mlp, MADE_BEFORE[1]))


def make_before():
    """In each process of a run, as the top of a script would."""
    import keras

    MADE_BEFORE[:] = [mlp(), keras.optimizers.SGD(0.1)]
    compile_it(MADE_BEFORE[0], keras.optimizers.SGD(0.1))


if __name__ == "__main__":
    backend, num_devices, *names = sys.argv[1:]
    settings = {"backend": backend, "num_devices": int(num_devices), "device": "cpu", "verbose": 0}
    os.environ["KERAS_BACKEND"] = backend
    if backend == "torch" or num_devices == "1":  # else launch refuses a framework that was started before
        make_before()
    result = kerasdp.launch(functools.partial(train, names=names), **settings)
    print("RESULT " + json.dumps(result))
elif sys.argv[1:2] == ["torch"]:
    make_before()
