"""Cases of `any_model.py`: models that are built or called in other ways than most."""

import keras
import numpy as np
from model_case import RANDOM, X, Y, case, compile_it, fit, make, mlp, sums

import kerasdp


@case
def never_called(runner):
    """A layer that `call` does not use is never built."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = keras.layers.Dense(3), keras.layers.Dense(5)

        def call(self, x):
            return self.used(x)

    model = make(runner, Model)
    return fit(runner, model, validation_data=(X, Y)) + list(runner.predict(model, X)[0].tolist())


@case
def called_in_training(runner):
    """An auxiliary head: Keras builds models by a call that is none of training."""

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
def mask_and_unused_weights(runner):
    """Outputs that carry a mask, one of them without a loss, so that some weights are not trained."""

    def build():
        inputs = keras.Input((6,), dtype="int32")
        hidden = keras.layers.LSTM(4, return_sequences=True)(keras.layers.Embedding(20, 4, mask_zero=True)(inputs))
        return keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(hidden) for name in ("a", "b")})

    with runner.scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.5), {"a": "mse"})
    tokens = np.where(np.arange(6) <= np.arange(22)[:, None] % 5, np.arange(132).reshape(22, 6) % 19 + 1, 0)
    targets = {"a": np.sin(np.arange(132)).reshape(22, 6, 1)}
    history = runner.fit(model, tokens, targets, batch_size=7, epochs=2, verbose=0).history
    return history["loss"] + sums(model)


@case
def weight_of_the_loss(runner):
    """A weight that the loss alone uses, beside some that nothing does."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.head, self.unused = keras.layers.Dense(3), keras.layers.Dense(5, kernel_regularizer="l2")
            self.balance = self.add_weight(shape=(), initializer="zeros", name="balance")

        def build(self, shape):
            self.head.build(shape)
            self.unused.build(shape)

        def call(self, x):
            return self.head(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            return loss * keras.ops.exp(-self.balance) + self.balance

    model = make(runner, Model)
    return fit(runner, model) + sums(model)


@case
def used_from_the_second_epoch_on(runner):
    """A branch that is switched on later: its weights have no gradients before."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.head, self.late, self.is_on = keras.layers.Dense(3), keras.layers.Dense(3), False

        def build(self, shape):
            self.head.build(shape)
            self.late.build(shape)

        def call(self, x):
            return self.head(x) + self.late(x * x) if self.is_on else self.head(x)

    model = make(runner, Model, keras.optimizers.SGD(0.1))
    losses = fit(runner, model)
    model.is_on = True
    if runner.config.backend != "torch":  # which has no compiled step here, and takes the branch at once
        with runner.scope():
            compile_it(model, keras.optimizers.SGD(0.1))
    return losses + fit(runner, model) + sums(model)


@case
def loss_that_draws(runner):
    """With a seed generator that the model holds, so that each backend keeps its state."""

    class Model(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            noise = keras.random.normal(keras.ops.shape(y_pred), seed=self.noise)
            return super().compute_loss(x, y, y_pred + 0.3 * noise, sample_weight, training)

    def build():
        model = Model([keras.Input((4,)), keras.layers.Dense(3)])
        model.noise = keras.random.SeedGenerator(3)
        return model

    model = make(runner, build)
    return fit(runner, model) + sums(model)


@case
def loss_whose_generator_the_model_does_not_hold(runner):
    """Refused on jax, where each step would draw the same numbers; elsewhere each draws others."""
    with runner.scope():
        noise = keras.random.SeedGenerator(3)
        model = mlp()
        model.compile(
            keras.optimizers.SGD(0.0),
            lambda y, outputs: keras.ops.sum(keras.random.normal(keras.ops.shape(outputs), seed=noise) - outputs, -1),
        )
    if runner.config.backend == "jax":
        refused(lambda: runner.fit(model, X, Y, verbose=0), "draws with a SeedGenerator that the model does not hold")
    else:
        losses = runner.fit(model, X, Y, epochs=2, verbose=0).history["loss"]
        assert losses[0] != losses[1]
    return []


@case
def own_batch_norm(runner):
    """A class of the user's, which adds nothing; and the model is a plain one of Keras after its training."""

    class Norm(keras.layers.BatchNormalization):
        pass

    model = make(runner, lambda: keras.Sequential([keras.Input((4,)), Norm(), keras.layers.Dense(3)]))
    losses = fit(runner, model)
    changed = {"train_function", "test_function", "_symbolic_build", "call"}
    assert not changed & {name for name, value in vars(model).items() if value is not None}
    return losses + sums(model)


@case
def assigned_in_call(runner):
    """A layer that assigns to a weight that is trained: of values the gradient would be another."""

    class Normed(keras.layers.Dense):
        def call(self, inputs, training=False):
            if training:
                self.kernel.assign(self.kernel / keras.ops.norm(self.kernel))
            return super().call(inputs)

    model = make(runner, lambda: keras.Sequential([Normed(3)]))
    if runner.config.backend == "jax":
        refused(lambda: fit(runner, model), "a layer assigns to")
        return []
    fit(runner, model)
    return []


def refused(function, words):
    try:
        function()
    except kerasdp.UserError as error:
        assert words in str(error), error
    else:
        raise AssertionError("it trained")


@case
def layers_of_their_own_kind(runner):
    """One that gives a number with its tensor, a batch norm that is never in training, a `call` bound to one layer."""

    class Patches(keras.layers.Layer):
        def __init__(self, name):
            super().__init__(name=name)
            self.dense = keras.layers.Dense(6)

        def call(self, x):
            return self.dense(x), 3

    class FrozenNorm(keras.layers.BatchNormalization):
        def call(self, x, training=None):
            return super().call(x, training=False)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.patches, self.norm = Patches("patches"), FrozenNorm()
            self.noise, self.head = keras.layers.GaussianNoise(0.1), keras.layers.Dense(3)
            own = self.noise.call
            self.noise.call = lambda x, training=False: 2 * own(x, training=training)

        def call(self, x, training=False):
            x, number = self.patches(x)
            return self.head(self.noise(self.norm(x) / number, training=training))

    model = make(runner, Model)
    return fit(runner, model, validation_data=(X, Y)) + sums(model) + runner.predict(model, X)[3].tolist()


@case
def only_predicts(runner):
    """Neither compiled nor called before, and without a `build` of its own."""

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
    layers = [keras.layers.LSTM(6, stateful=True), keras.layers.Dense(3)]
    model = make(runner, lambda: keras.Sequential(layers))
    x = RANDOM.randn(14, 3, 4).astype("float32")
    return runner.fit(model, x, Y[:14], batch_size=7, shuffle=False, verbose=0).history["loss"]
