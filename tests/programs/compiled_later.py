"""Trains on batches of two shapes, whose number nobody tells; a step is captured once three of its shape are done.

python compiled_later.py CASES: see `starting.each_case`; beside fields of kerasdp.Config they hold
    is_own: whether the step is user-defined

Inductor, which takes long, is left out.
"""

import numpy as np
from starting import each_case

import kerasdp


def batches():
    numbers = np.random.RandomState(0)
    for length in (3, 5) * 8:
        x = numbers.rand(6, length, 2)
        yield x, x.sum((1, 2))[:, None]


def train(runner, is_own=False):
    import keras
    import torch
    from learn_classes import StepLosses

    from kerasdp.backends.torch import compiled_step, data_parallel

    data_parallel._WORTH_COMPILING = {"cpu": 3}
    compiled_step.compile_with_inductor = lambda graph, *_: torch.no_grad()(graph)
    captured, call = [], compiled_step.CompiledStep.__call__

    def counted(self, *args):
        result = call(self, *args)
        if result is not None:
            captured.append(self.name)
        return result

    compiled_step.CompiledStep.__call__ = counted

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            weights = self.trainable_weights
            compute = kerasdp.value_and_grad(lambda: keras.ops.mean((self(x, training=True) - y) ** 2), weights)
            loss, gradients = compute()
            self.optimizer.apply(gradients, weights)
            return {"loss": loss}

    layers = keras.layers
    x = keras.Input((None, 2))
    y = layers.Dense(1)(layers.GlobalAveragePooling1D()(layers.Dropout(0.2)(layers.BatchNormalization()(x))))
    model = (Own if is_own else keras.Model)(x, y)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    losses = StepLosses(runner)
    model.fit(batches(), callbacks=[losses], verbose=0)
    evaluated = float(model.evaluate(batches(), verbose=0))
    predicted = model.predict((x[0] for x in batches()), verbose=0)
    kinds = [captured.count(name) for name in ("train", "test", "predict")]
    return {"numbers": [*losses.values, evaluated, float(predicted.std())], "captured": kinds}


if __name__ == "__main__":
    each_case(train, backend="torch", device="cpu", precision="float64", verbose=0)
