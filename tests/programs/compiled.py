"""Trains nets with layers that can and cannot be captured, and prints what came out.

python compiled.py CASES: see `starting.each_case`; beside fields of kerasdp.Config they hold
    layer: "plain", "reading" (Python asks for a number), "slower" (a callback changes the rate), "frozen" (a callback
        freezes a layer), "swapping" (variables change places), "scaled" (float16, whose first losses are scaled until
        they overflow)
    no_compiler_on_rank: the rank, if there is one, that finds no C++ compiler
"""

import numpy as np
from starting import each_case


def train(runner, layer, no_compiler_on_rank=None):
    import keras
    import torch._inductor.config
    from learn_classes import fitted

    if runner.strategy.processes.rank == no_compiler_on_rank:
        torch._inductor.config.cpp.cxx = "/nowhere"  # torch has read $CXX by now
    ops = keras.ops
    calls = 0

    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.one = self.add_weight(name="one", initializer="zeros", trainable=False)
            self.other = self.add_weight(name="other", initializer="ones", trainable=False)

        def call(self, x):
            nonlocal calls
            calls += 1
            if layer == "reading":
                return x * (2.0 if float(ops.mean(x)) > 0 else 1.0)
            if layer == "swapping":  # two variables exchange their values
                before = ops.copy(self.other)
                self.other.assign(self.one)
                self.one.assign(before)
                return x + self.one - 0.5 * self.other
            return x

    class Slower(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            nonlocal calls
            calls = 0  # to find out shapes took some

        def on_epoch_end(self, epoch, logs=None):
            if layer == "frozen":
                self.model.layers[0].trainable = False
            if layer == "slower":
                self.model.optimizer.learning_rate = 1e-3

    with runner.scope():
        layers = [keras.layers.Dense(8, "gelu"), Counting(name="counting"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(0.01)
        if layer == "scaled":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**20, dynamic_growth_steps=3)
        model.compile(optimizer, loss, metrics=["accuracy"])
    numbers = np.random.RandomState(0)
    x, y = numbers.rand(61, 6).astype("float32"), numbers.randint(0, 3, 61)
    losses, history = fitted(runner, model, x, y, epochs=4, callbacks=[Slower()])
    found = {"losses": losses, "accuracy": history["accuracy"], "calls": calls}
    if layer == "scaled":
        found |= {
            "state": [float(variable) for variable in (optimizer.dynamic_scale, optimizer.step_counter)],
            "iterations": int(optimizer.iterations),
            "weights": [weight.tolist() for weight in model.get_weights()],
        }
    return found


if __name__ == "__main__":
    each_case(train, backend="torch", device="cpu", verbose=0, batch_size=16)
