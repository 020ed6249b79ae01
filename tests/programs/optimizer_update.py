"""Updates variables on TensorFlow as Keras does and as one compiled operation, and prints how far they are apart.

python optimizer_update.py
"""

import json

import keras
import numpy as np
import tensorflow as tf

from kerasdp.backends.tensorflow.train_step import can_update_at_once, update_at_once


def updated(optimizer, is_one):
    """Variables after three updates, and whether they can be one operation."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    answers = []

    @tf.function
    def step(size):
        gradients = [tf.fill(variable.shape, size) for variable in model.trainable_variables]
        answers.append(can_update_at_once(optimizer, model.trainable_weights))

        def update():
            optimizer.apply(gradients, model.trainable_variables)

        if is_one:
            update_at_once(optimizer, [*model.variables, *optimizer.variables], update)
        else:
            update()

    for size in SIZES[hasattr(optimizer, "inner_optimizer")]:
        step(tf.constant(size))
    return [np.array(variable) for variable in [*model.variables, *optimizer.variables]], answers[0]


# Of the gradients in each step; with a scaled loss one overflows.
SIZES = ((1.0, 1.0, 1.0), (1.0, float("inf"), 2.0))


class Own(keras.optimizers.SGD):
    pass


POSSIBLE = {
    "accumulated": lambda: keras.optimizers.Adam(
        0.1, gradient_accumulation_steps=2, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2
    ),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), initial_scale=4.0, dynamic_growth_steps=1
    ),
    "adamw": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 5), clipnorm=0.5),
}
IMPOSSIBLE = {
    "own": lambda: Own(0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
}

if __name__ == "__main__":
    differences = {}
    for name, make in POSSIBLE.items():
        (plain, _), (one, answer) = updated(make(), False), updated(make(), True)
        pairs = zip(plain, one, strict=True)
        differences[name] = [answer, max(float(np.abs(own - other).max()) for own, other in pairs)]
    refused = {name: updated(make(), False)[1] for name, make in IMPOSSIBLE.items()}
    print("RESULT " + json.dumps({"differences": differences, "refused": refused}))
