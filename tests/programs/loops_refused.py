"""Uses `runner.step` as it cannot be used, and prints what is said.

python loops_refused.py BACKEND NUM_DEVICES
"""

import sys

import numpy as np
from starting import printed

import kerasdp
from kerasdp.errors import ReplicasDifferError


def said(call):
    try:
        return f"gave {call()}"
    except (kerasdp.UserError, ReplicasDifferError) as error:
        return str(error)


def train(runner):
    import keras
    from keras import layers, ops

    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        optimizer, counts = keras.optimizers.Adam(0.01), keras.Variable(np.arange(3), dtype="int32", trainable=False)
    weights = model.trainable_variables

    def minimized(loss_of):
        loss, gradients = kerasdp.value_and_grad(loss_of, weights)()
        optimizer.apply(gradients, weights)
        return loss

    def makes_variable(x):
        factor = keras.Variable(1.0)
        return minimized(lambda: ops.mean(model(x)) * factor)

    def makes_layer(x):
        last = layers.Dense(2)
        return minimized(lambda: ops.mean(last(model(x))))

    def numpy_inside(x):
        total = float(np.asarray(x).sum())
        return minimized(lambda: ops.mean(model(x)) * total)

    def condition(x):
        loss = minimized(lambda: ops.mean(ops.square(model(x))))
        return loss * 2 if loss > 0.1 else loss

    def other_framework(x):
        if keras.backend.backend() == "torch":
            from jax.nn import relu
        else:
            from torch import relu
        return minimized(lambda: ops.mean(relu(model(x))))

    def gradient_of_integers(x):
        return kerasdp.value_and_grad(lambda: ops.mean(model(x)), [counts])()[0]

    def masked_mean(x):
        chosen = ops.cast(x[:, :1] > 0, "float32")
        return minimized(lambda: ops.sum(ops.square(model(x)) * chosen) / ops.sum(chosen))

    def text(x):
        return "done"

    def integers(x):
        return ops.argmax(model(x), axis=1)

    inner = runner.step(lambda x: ops.mean(model(x)))

    def step_in_step(x):
        return inner(x)

    def sum_of_rows(x):
        return minimized(lambda: ops.sum(ops.square(model(x))))

    def vector(x):
        return ops.mean(model(x), axis=1)

    def largest(x):
        return ops.max(model(x))

    def unseeded(x):
        return ops.mean(model(x + keras.random.normal(ops.shape(x))))

    def nothing(x):
        minimized(lambda: ops.mean(ops.square(model(x))))

    x = np.random.RandomState(0).randn(16, 4).astype("float32")
    steps = (
        makes_variable, makes_layer, numpy_inside, condition, other_framework, gradient_of_integers, text, integers,
        masked_mean, step_in_step, sum_of_rows, vector, largest, unseeded, nothing,
    )  # fmt: skip
    found = {step.__name__: said(lambda step=step: runner.step(step)(x)) for step in steps}
    for name, call in {
        "log": lambda: runner.log({}),
        "not_built": lambda: runner.checkpoint(models=model, optimizers=keras.optimizers.Adam()),
        "no_optimizer": lambda: runner.checkpoint(models=model, optimizers=[]),
        "wrong_part": lambda: runner.checkpoint(models=optimizer, optimizers=optimizer),
        "reduction": lambda: runner.step(nothing, returns="median"),
        "other_arrays": lambda: runner.step(nothing)(x + runner.is_chief),
        "rows_of_trial": lambda: runner.step(lambda x: ops.mean(model(x) + ops.zeros((16, 3))))(x),
    }.items():
        found[name] = said(call)
    # In the order of the function, and of the data, whatever is read ahead; with loops within loops.
    keys = runner.step(lambda batch: {"z": ops.mean(batch[0]), "a": ops.mean(batch[1])})
    rows = np.arange(29.0)[:, None]
    seen = []
    for batch in runner.batches((rows[at : at + 8], -rows[at : at + 8]) for at in range(0, 29, 8)):
        seen += [f"{name} {float(value):g}" for name, value in keys(batch).items()]
        within = [f"{float(keys(inner)['z']):g}" for inner in runner.batches(rows, -rows, batch_size=15, shuffle=False)]
    found["order"] = " ".join([*seen, *within])
    found["read"] = f"{float(optimizer.learning_rate):g} {int(optimizer.iterations)}"

    def parted():
        for _ in runner.steps(1):
            runner.step(nothing)(x)
            weights[0].assign(ops.ones((4, 3)) * runner.is_chief)

    found["parted"] = said(parted)  # the last, since the models differ then
    return found


if __name__ == "__main__":
    printed(train, *sys.argv[1:])
