"""Cases of `any_model.py`: models that change between two fits, or were made or are called somewhere else."""

import keras
import numpy as np
from model_case import X, Y, case, compile_it, fit, make, mlp, sums


@case
def all_frozen(runner):
    """Nothing to train: passes without an update; batch norm keeps its statistics, as a frozen one does in Keras."""

    model = make(runner, mlp)
    model.trainable = False
    return fit(runner, model) + sums(model)


@case
def lora(runner):
    """Enabled between two fits, with a second `compile`."""
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
def unfrozen_without_compile(runner):
    """The optimizer was built without the weights of the layer that was frozen."""
    model = make(runner, mlp)
    model.get_layer("first").trainable = False
    fit(runner, model)
    model.get_layer("first").trainable = True
    return fit(runner, model)


@case
def session_cleared(runner):
    """With `keras.utils.clear_session()` before the second model, which gets a seed generator when it is trained."""

    class DropPath(keras.layers.Layer):
        def call(self, x, training=False):
            return x * keras.ops.floor(0.5 + keras.random.uniform((keras.ops.shape(x)[0], 1))) if training else x

    losses = fit(runner, make(runner, mlp))
    keras.utils.clear_session()
    model = make(runner, lambda: keras.Sequential([*mlp().layers, DropPath()]))
    return losses + fit(runner, model) + sums(model)


@case
def methods_of_the_model(runner):
    """`model.fit`, `evaluate` and `predict` mean the runner's."""
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


@case
def several_optimizers(runner):
    each = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    return fit(runner, make(runner, mlp, keras.optimizers.MultiOptimizer(each)))


MADE_BEFORE = []


@case
def made_before_launch(runner):
    return fit(runner, MADE_BEFORE[0])


@case
def optimizer_made_before_launch(runner):
    return fit(runner, make(runner, mlp, MADE_BEFORE[1]))


def make_before():
    """In each process of a run, as the top of a script would."""
    MADE_BEFORE[:] = [mlp(), keras.optimizers.SGD(0.1)]
    compile_it(MADE_BEFORE[0], keras.optimizers.SGD(0.1))
