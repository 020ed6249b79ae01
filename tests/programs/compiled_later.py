"""Trains on batches of two shapes, whose number nobody tells; a step is captured once three of its shape are done.

python compiled_later.py [NUM_DEVICES, --compile, whether the step is user-defined]...

Each argument is a run, in JSON. Inductor, which takes long, is left out.
"""

import functools
import json
import sys

import numpy as np

import kerasdp


def batches():
    numbers = np.random.RandomState(0)
    for length in (3, 5) * 8:
        x = numbers.rand(6, length, 2)
        yield x, x.sum((1, 2))[:, None]


def train(is_own, runner):
    import keras
    from learn_classes import StepLosses

    from kerasdp.backends.torch import compiled_step, data_parallel

    data_parallel._WORTH_COMPILING = {"cpu": 3}
    compiled_step.compile_with_inductor = lambda graph, inputs, options: graph
    captured, run = [], compiled_step.CompiledStep._run

    def counted(self, graph, data):
        captured.append(self.name)
        return run(self, graph, data)

    compiled_step.CompiledStep._run = counted

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


def main():
    found = []
    settings = {"backend": "torch", "device": "cpu", "precision": "float64", "verbose": 0}
    for num_devices, compiles, is_own in map(json.loads, sys.argv[1:]):
        run = functools.partial(train, is_own)
        found.append(kerasdp.launch(run, num_devices=num_devices, compile=compiles, **settings))
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
