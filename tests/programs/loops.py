"""Trains by custom loops, each written once for all backends."""

import chosen_backend  # noqa: F401
import keras
import numpy as np
from keras import layers, ops
from own_steps_base import BATCH, ROWS, main, numbers

import kerasdp

EPOCHS = 5  # of four batches, the last with five rows
IMAGES = (8, 8, 1)


def stepped(runner, step, x, y=None, *, epochs=EPOCHS, each=lambda batch: None):
    """The logs of all steps."""
    found = []
    for batch in runner.batches(x, y, batch_size=BATCH, epochs=epochs):
        logs = step(batch)
        runner.log(logs)
        found.append({name: float(value) for name, value in logs.items()})
        each(batch)
    return found


def minimize(loss_of, model, optimizer, has_aux=False):
    """A step of an optimizer; on the weights of a model, or on a list of variables."""
    weights = getattr(model, "trainable_variables", model)
    found, gradients = kerasdp.value_and_grad(loss_of, weights, has_aux)()
    optimizer.apply(gradients, weights)
    return found


def dense(*sizes, activation="tanh"):
    hidden = [keras.layers.Dense(size, activation) for size in sizes[1:-1]]
    return keras.Sequential([keras.Input((sizes[0],)), *hidden, keras.layers.Dense(sizes[-1])])


def wgan(runner):
    """A gradient penalty, and several steps of the critic for one of the generator: two functions."""
    with runner.scope():
        critic, maker = dense(4, 8, 1), dense(3, 8, 4)
        for_critic, for_maker = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01)
        seeds, seen = keras.random.SeedGenerator(3), keras.metrics.Mean(name="critic")
    for_critic.build(critic.trainable_variables)
    for_maker.build(maker.trainable_variables)
    runner.checkpoint(
        models={"critic": critic, "maker": maker}, optimizers=[for_critic, for_maker], metrics=seen, variables=seeds
    )

    @runner.step
    def of_critic(real):
        rows = ops.shape(real)[0]
        made = ops.stop_gradient(maker(keras.random.normal((rows, 3), seed=seeds)))
        share = keras.random.uniform((rows, 1), seed=seeds)

        def loss_of():
            _, slope = kerasdp.value_and_grad(lambda mixed: ops.sum(critic(mixed)))(share * real + (1 - share) * made)
            penalty = ops.mean(ops.square(ops.sqrt(ops.sum(ops.square(slope), axis=1)) - 1))
            return ops.mean(critic(made)) - ops.mean(critic(real)) + 10.0 * penalty

        loss = minimize(loss_of, critic, for_critic)
        seen.update_state(loss)
        return {"loss": loss, "mean": seen.result()}

    @runner.step
    def of_maker(real):
        noise = keras.random.normal((ops.shape(real)[0], 3), seed=seeds)
        return minimize(lambda: -ops.mean(critic(maker(noise))), maker, for_maker)

    found = []

    def each(batch):
        if batch.number % 2:
            found.append(float(of_maker(batch)))

    return {"critic": stepped(runner, of_critic, numbers(0, ROWS, 4), each=each), "maker": found}


def momentum_contrast(runner):
    """A momentum encoder, and a queue of what it saw, of all rows; two views of each sample."""
    with runner.scope():
        coder, momentum = dense(4, 8, 3), dense(4, 8, 3)
        optimizer, seeds = keras.optimizers.SGD(0.05, momentum=0.9), keras.random.SeedGenerator(2)
        queue = keras.Variable(numbers(7, 20, 3), trainable=False)
        momentum.set_weights(coder.get_weights())

    @runner.step
    def step(x):
        one, other = (x + 0.1 * keras.random.normal(ops.shape(x), seed=seeds) for _ in range(2))
        keys = ops.normalize(momentum(other), axis=1)

        def loss_of():
            found = ops.normalize(coder(one), axis=1)
            alike = ops.concatenate(
                [ops.sum(found * keys, axis=1, keepdims=True), ops.matmul(found, ops.transpose(queue))], axis=1
            )
            return -ops.mean(ops.log_softmax(alike / 0.2, axis=1)[:, 0])

        loss = minimize(loss_of, coder, optimizer)
        for weight, average in zip(coder.weights, momentum.weights, strict=True):
            average.assign(0.95 * average + 0.05 * weight)
        queue.assign(ops.concatenate([kerasdp.all_rows(keys), queue])[:20])
        return {"loss": loss}

    logs = stepped(runner, step, numbers(0, ROWS, 4))
    return {"logs": logs, "queue": ops.convert_to_numpy(queue.value).tolist()}


def style(runner):
    """The pixels of an image are trained: variables that are no weights, by a step without a batch."""
    with runner.scope():
        features = keras.Sequential([keras.Input(IMAGES), layers.Conv2D(4, 3, activation="relu"), layers.Conv2D(4, 3)])
        image, optimizer = keras.Variable(numbers(0, 1, *IMAGES)), keras.optimizers.Adam(0.05)
        content, pattern = (ops.convert_to_tensor(numbers(seed, 1, *IMAGES)) for seed in (1, 2))

    def gram(image):
        found = ops.reshape(features(image), (-1, 4))
        return ops.matmul(ops.transpose(found), found) / 16.0

    @runner.step
    def step():
        def loss_of():
            alike = ops.mean(ops.square(features(image) - features(content)))
            return alike + ops.mean(ops.square(gram(image) - gram(pattern)))

        return minimize(loss_of, [image], optimizer)

    return [float(step()) for _ in range(20)]


def supervised(runner):
    """The loop beside `fit`: the same curve."""
    from learn_classes import StepLosses

    def made():
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.3),
             layers.Dense(3)]
        )  # fmt: skip
        return model, keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    with runner.scope():
        model, optimizer, loss = made()
    with runner.scope():
        fitted, of_fit, loss_of_fit = made()
        fitted.compile(of_fit, loss_of_fit)

    @runner.step
    def step(batch):
        x, y = batch

        def loss_of():
            return loss(y, model(x, training=True))

        return {"loss": minimize(loss_of, model, optimizer)}

    x, y = numbers(0, ROWS, 4), np.arange(ROWS) % 3
    logs, losses = stepped(runner, step, x, y), StepLosses(runner)
    runner.fit(fitted, x, y, batch_size=BATCH, epochs=EPOCHS, callbacks=[losses], verbose=0)
    return {"loop": logs, "fit": [{"loss": loss} for loss in losses.values]}


def norm_of_replicas(runner):
    """Batch norm after a custom loop and after `fit`, with --batch_norm=replica; a row alone ends the epoch."""
    x, y = numbers(0, 3 * BATCH + 1, 8, 8, 3), np.arange(3 * BATCH + 1) % 3
    found = {}
    for way in ("loop", "fit"):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with runner.scope():
            keras.utils.set_random_seed(1)
            norms = [layers.BatchNormalization(momentum=0.5) for _ in range(2)]
            model = keras.Sequential(
                [keras.Input((8, 8, 3)), layers.Conv2D(4, 3), norms[0], layers.Flatten(), layers.Dense(5), norms[1],
                 layers.Dense(3)]
            )  # fmt: skip
            model.compile(keras.optimizers.SGD(0.1), loss)
        model.optimizer.build(model.trainable_variables)
        if way == "loop":

            @runner.step
            def step(batch, model=model, loss=loss):
                inputs, targets = batch
                loss_of = lambda: loss(targets, model(inputs, training=True))  # noqa: E731
                return {"loss": minimize(loss_of, model, model.optimizer)}

            stepped(runner, step, x, y)
        else:
            runner.fit(model, x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
        assert not runner.strategy.diverged_variables(model)
        found[way] = [keras.ops.convert_to_numpy(weight).tolist() for weight in model.weights]
    return found


def scaled(runner):
    """A scaled loss, in a loop whose second batch of each epoch overflows, so that its update is left out."""
    with runner.scope():
        model = dense(4, 8, 3)
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=4.0, dynamic_growth_steps=2
        )
    optimizer.build(model.trainable_variables)

    @runner.step(returns="same")
    def step(x):
        minimize(lambda: optimizer.scale_loss(ops.mean(ops.square(model(x) - 1))), model, optimizer)
        sizes = [ops.sum(ops.square(weight)) for weight in model.trainable_variables]
        return {"size": sum(sizes), "scale": optimizer.dynamic_scale}

    rows = numbers(5, ROWS, 4)
    batches = [rows[at : at + BATCH] for at in range(0, ROWS, BATCH)]
    batches[1][0, 0] = np.inf
    return [{name: float(value) for name, value in step(x).items()} for _ in range(EPOCHS) for x in batches]


if __name__ == "__main__":
    cases = supervised, wgan, momentum_contrast, style, scaled, norm_of_replicas
    main({case.__name__: case for case in cases})
