"""Trains in two stages on TensorFlow, and prints how often layers were built into graphs, and the order of the work.

python tensorflow_stages.py               # small nets
python tensorflow_stages.py resnet50      # seconds and bytes that ResNet-50 in 12 micro-batches takes to be built
"""

import dataclasses
import functools
import json
import sys
import time

import numpy as np

import kerasdp

CONFIG = kerasdp.Config(backend="tensorflow", device="cpu", strategy="pipeline", num_stages=2, num_devices=2,
                        balance="flops", verbose=0)  # fmt: skip


def noting(keras):
    """A layer that counts its calls, and the gradients of its weight that are computed."""
    import tensorflow as tf

    class Noting(keras.layers.Layer):
        calls, gradients = 0, 0

        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            self.calls += 1

            def note(gradient):
                self.gradients += 1
                return gradient

            def noted(gradient):  # stateless, so that it is left out where nothing needs it
                return tf.reshape(tf.numpy_function(note, [gradient], gradient.dtype, stateful=False), ())

            watched = tf.custom_gradient(lambda value: (tf.identity(value), noted))
            return x * watched(tf.convert_to_tensor(self.scale))

    return Noting


def train(schedule, num_micro_batches, is_frozen, runner):
    import keras

    layer = noting(keras)()
    x = np.random.RandomState(0).randn(12, 4).astype("float32")
    with runner.scope():
        inputs = keras.Input((4,))
        outputs = keras.layers.Dense(2)(layer(keras.layers.Dense(4, name="first")(inputs)))
        model = keras.Model(inputs, outputs)
        layer.trainable = not is_frozen
        model.compile("sgd", "mse")
    known = layer.calls  # by then it was called to build it, and to see what it does
    runner.fit(model, x, x[:, :2], epochs=2)
    calls, gradients = layer.calls - known, layer.gradients
    engine = runner.strategy.stages.engine_of(model)
    engine.timeline = []
    runner.fit(model, x, x[:, :2], steps_per_epoch=1)
    work = sorted(engine.timeline, key=lambda event: event[3])
    orders = [[(kind, number) for at, kind, number, *_ in work if at == stage] for stage in range(2)]
    return {"calls": calls, "gradients": gradients, "orders": orders, "pipeline_schedule": schedule}


def build_resnet50(runner):
    import keras

    data = kerasdp.load_data(runner.config)
    seconds = []
    begin = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seconds.append(-time.perf_counter()),
        on_train_batch_end=lambda batch, logs: seconds.append(seconds.pop() + time.perf_counter()),
    )
    with runner.scope():
        model = kerasdp.build_model(runner.config, data.input_shape, data.num_classes)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = runner.strategy.peak_memory_bytes()
    runner.fit(model, data.train, callbacks=[begin])
    return {"seconds": seconds, "bytes": runner.strategy.peak_memory_bytes() - before}


def main():
    if sys.argv[1:] == ["resnet50"]:
        data = "synthetic(shape=(32,32,3), num_classes=1000, num_samples=48)"
        config = dataclasses.replace(CONFIG, model="resnet50", dataset=data, batch_size=24, micro_batches=12)
        print("RESULT", json.dumps(kerasdp.launch(build_resnet50, config)))
        return
    results = []
    for case in (("gpipe", 2, False), ("gpipe", 6, False), ("1f1b", 6, False), ("1f1b", 6, True)):
        schedule, count, _ = case
        config = dataclasses.replace(
            CONFIG, batch_size=12, pipeline_schedule=schedule, micro_batches=count, cut_at="first", num_stages=None
        )
        results.append(kerasdp.launch(functools.partial(train, *case), config))
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
