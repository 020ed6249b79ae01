"""The models of `own_steps.py` in the form that Keras' guide has for jax: steps are functions of a state."""

import jax
import keras
from keras import layers, ops


class CustomStep(keras.Model):
    """Own loss and metric trackers; data come as `x, y`."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(6, "relu")
        self.drop = layers.Dropout(0.3)
        self.norm = layers.BatchNormalization()
        self.last = layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.tracker, self.error]

    def call(self, x, training=False):
        return self.last(self.drop(self.norm(self.hidden(x), training=training), training=training))

    def loss_and_updates(self, trainable, non_trainable, x, y):
        found, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
        return ops.mean(keras.losses.mean_squared_error(y, found)), (found, non_trainable)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data
        differentiated = jax.value_and_grad(self.loss_and_updates, has_aux=True)
        (loss, (found, non_trainable)), gradients = differentiated(trainable, non_trainable, x, y)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        tracked = self.tracker.stateless_update_state(metrics[:2], loss)
        errors = self.error.stateless_update_state(metrics[2:], y, found)
        logs = {"loss": self.tracker.stateless_result(tracked), "mae": self.error.stateless_result(errors), "raw": loss}
        return logs, (trainable, non_trainable, optimizer, [*tracked, *errors])


class Gan(keras.Model):
    """No `call`, a `compile` of its own, two optimizers, whose variables the model holds; `x` comes alone."""

    def __init__(self):
        super().__init__()
        self.judge = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.LeakyReLU(0.2), layers.Dense(1)])
        self.maker = keras.Sequential([keras.Input((3,)), layers.Dense(8), layers.BatchNormalization(),
                                       layers.LeakyReLU(0.2), layers.Dense(4)])  # fmt: skip
        self.seeds = keras.random.SeedGenerator(7)
        self.of_judge, self.of_maker = keras.metrics.Mean(name="judge"), keras.metrics.Mean(name="maker")

    def compile(self, for_judge, for_maker, loss):
        super().compile()
        self.for_judge, self.for_maker, self.loss_function = for_judge, for_maker, loss
        for_judge.build(self.judge.trainable_variables)
        for_maker.build(self.maker.trainable_variables)
        self.of_optimizers = [*for_judge.variables, *for_maker.variables]

    @property
    def metrics(self):
        return [self.of_judge, self.of_maker]

    def train_step(self, state, real):
        if isinstance(real, tuple):
            real = real[0]
        trainable, non_trainable, unused, metrics = state  # of the optimizer that `compile` makes, if none is given
        values = dict(zip(map(id, self.trainable_variables), trainable, strict=True))
        values |= dict(zip(map(id, self.non_trainable_variables), non_trainable, strict=True))
        variables = {id(variable): variable for variable in self.variables}
        rows = real.shape[0]

        def minimized(loss_of, weights, optimizer):
            def loss_and_updates(own):
                mapping = values | dict(zip(map(id, weights), own, strict=True))
                with keras.StatelessScope([(variables[key], value) for key, value in mapping.items()]) as scope:
                    loss = loss_of()
                return loss, {key: scope.get_current_value(variable) for key, variable in variables.items()}

            own = [values[id(weight)] for weight in weights]
            (loss, updates), gradients = jax.value_and_grad(loss_and_updates, has_aux=True)(own)
            values.update(updates)
            slots = [values[id(slot)] for slot in optimizer.variables]
            own, slots = optimizer.stateless_apply(slots, gradients, own)
            values.update(zip(map(id, [*weights, *optimizer.variables]), [*own, *slots], strict=True))
            return loss

        def judged():
            made = ops.stop_gradient(self.maker(self.noise(rows), training=True))
            labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))])
            labels = labels + 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seeds)
            return self.loss_function(labels, self.judge(ops.concatenate([made, real])))

        def made():
            return self.loss_function(ops.zeros((rows, 1)), self.judge(self.maker(self.noise(rows), training=True)))

        judge = minimized(judged, self.judge.trainable_variables, self.for_judge)
        maker = minimized(made, self.maker.trainable_variables, self.for_maker)
        tracked = self.of_judge.stateless_update_state(metrics[:2], judge)
        others = self.of_maker.stateless_update_state(metrics[2:], maker)
        logs = {"judge": self.of_judge.stateless_result(tracked), "maker": self.of_maker.stateless_result(others)}
        trainable, non_trainable = (
            [values[id(variable)] for variable in own]
            for own in (self.trainable_variables, self.non_trainable_variables)
        )
        return logs, (trainable, non_trainable, unused, [*tracked, *others])

    def noise(self, rows):
        return keras.random.normal((rows, 3), seed=self.seeds)


class Vae(keras.Model):
    """Samples drawn in the step, a `test_step`, a `predict_step`, and a regularized layer."""

    def __init__(self):
        super().__init__()
        first = layers.Dense(8, "relu", kernel_regularizer="l2")
        self.coder = keras.Sequential([keras.Input((4,)), first, layers.Dense(4)])
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(8, "relu"), layers.Dense(4)])
        self.seeds = keras.random.SeedGenerator(5)
        self.total, self.apart = keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="apart")

    @property
    def metrics(self):
        return [self.total, self.apart]

    def losses_of(self, trainable, non_trainable, x):
        mapping = [*zip(self.trainable_variables, trainable, strict=True),
                   *zip(self.non_trainable_variables, non_trainable, strict=True)]  # fmt: skip
        with keras.StatelessScope(mapping) as scope:
            mean, spread = ops.split(self.coder(x), 2, axis=1)
            z = mean + ops.exp(0.5 * spread) * keras.random.normal(ops.shape(mean), seed=self.seeds)
            error = ops.mean(ops.sum(ops.square(x - self.decoder(z)), axis=1))
            apart = ops.mean(ops.sum(-0.5 * (1 + spread - ops.square(mean) - ops.exp(spread)), axis=1))
            total = error + apart + sum(self.losses)
        return total, (apart, [scope.get_current_value(variable) for variable in self.non_trainable_variables])

    def logged(self, metrics, total, apart):
        metrics = [
            *self.total.stateless_update_state(metrics[:2], total),
            *self.apart.stateless_update_state(metrics[2:], apart),
        ]
        logs = {"loss": self.total.stateless_result(metrics[:2]), "apart": self.apart.stateless_result(metrics[2:])}
        return logs, metrics

    def train_step(self, state, x):
        trainable, non_trainable, optimizer, metrics = state
        differentiated = jax.value_and_grad(self.losses_of, has_aux=True)
        (total, (apart, non_trainable)), gradients = differentiated(trainable, non_trainable, x)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = self.logged(metrics, total, apart)
        return logs, (trainable, non_trainable, optimizer, metrics)

    def test_step(self, state, x):
        trainable, non_trainable, metrics = state
        total, (apart, non_trainable) = self.losses_of(trainable, non_trainable, x)
        logs, metrics = self.logged(metrics, total, apart)
        return logs, (trainable, non_trainable, metrics)

    def predict_step(self, state, x):
        trainable, non_trainable = state
        mapping = [*zip(self.trainable_variables, trainable, strict=True),
                   *zip(self.non_trainable_variables, non_trainable, strict=True)]  # fmt: skip
        with keras.StatelessScope(mapping):
            return self.decoder(ops.split(self.coder(x), 2, axis=1)[0]), non_trainable


class Queue(keras.Model):
    """Keeps what it saw in the last step."""

    def __init__(self):
        super().__init__(name="queue")
        self.dense = layers.Dense(3)
        self.seen = self.add_weight(shape=(3,), trainable=False, name="seen", initializer="zeros")

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        trainable, (seen,), optimizer, metrics = state
        x, y = data

        def loss_of(trainable):
            return ops.mean(ops.square(y - self.stateless_call(trainable, [seen], x)[0] - seen))

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        seen = self.stateless_call(trainable, [seen], x)[0][0]
        return {"loss": loss}, (trainable, [seen], optimizer, metrics)


class Sum(keras.Model):
    """A sum over the samples."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, name="dense")

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data

        def loss_of(trainable):
            return ops.sum(ops.square(y - self.stateless_call(trainable, non_trainable, x)[0]))

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, non_trainable, optimizer, metrics)
