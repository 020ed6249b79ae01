"""Counts the runs of graphs in a loop of one's own on torch, in float64, and gives the mean of its losses so far.

python compiled_loop.py COMPILE
"""

import json
import sys

import numpy as np

import kerasdp


def train(runner):
    import keras

    from kerasdp.backends.torch.compiled_step import CompiledStep

    run, runs = CompiledStep._run, []

    def counted(self, graph, data):
        runs.append(graph)
        return run(self, graph, data)

    CompiledStep._run = counted
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer, mean = keras.optimizers.SGD(0.01), keras.metrics.Mean()

    @runner.step
    def step(x):
        loss_of = kerasdp.value_and_grad(lambda: keras.ops.mean(keras.ops.square(model(x))), model.trainable_variables)
        loss, gradients = loss_of()
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(loss)
        return mean.result()

    means = [float(step(batch)) for batch in runner.batches(np.ones((32, 4)), batch_size=8, epochs=2)]
    return {"means": means, "runs": len(runs), "graphs": len(set(map(id, runs)))}


if __name__ == "__main__":
    settings = {"backend": "torch", "num_devices": 1, "device": "cpu", "precision": "float64", "verbose": 0}
    print("RESULT " + json.dumps(kerasdp.launch(train, compile=sys.argv[1], **settings)))
