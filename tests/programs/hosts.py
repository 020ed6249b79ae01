"""Trains in one of several processes; prints what came out, and the bytes that a step sends.

python hosts.py SETTINGS: fields of kerasdp.Config as JSON, and
    num_samples, epochs: of the training
    compile: arguments of `Model.compile`
    signal: that the last process sends itself behind step 5
    fails: the last process raises an error behind step 5; "memory": it has too little
    drift: the last process changes one of its weights at the end of training
    frozen: the first layer with weights is, and a metric has 4,096 numbers
    own_step: trains with a loop of its own instead
    only_gather: trains nothing; gathers the number of each replica instead
"""

import functools
import hashlib
import json
import os
import socket
import sys
import time

import numpy as np

import kerasdp

OWN = ("num_samples", "compile", "signal", "fails", "drift", "frozen", "own_step", "only_gather")
# Of `struct tcp_info` in linux/tcp.h: bytes of data, without headers.
BYTES_SENT = slice(200, 208)


def bytes_sent():
    """What this process has sent to others over TCP, so far, on the connections that are open."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += int.from_bytes(info[BYTES_SENT], sys.byteorder)
        except OSError:  # closed meanwhile
            continue
    return total


def gather(runner):
    """Gathers few and many rows, and differentiates by what each replica gave, as they stand on each."""
    import tensorflow as tf

    from kerasdp.backends.tensorflow import collectives

    def in_replica(width):
        return collectives.gather_rows(tf.fill((1, width), collectives.rank()))

    strategy, found = runner.strategy, []
    for width in (1, 2**19):
        rows = tf.function(lambda width=width: strategy.mirrored.run(in_replica, args=(width,)))()
        copies = strategy.mirrored.experimental_local_results(rows)
        found += [copy.numpy()[:, -1].tolist() for copy in copies]

    def slope():
        own = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(own)
            total = (collectives.rank() + 1.0) * tf.reduce_sum(collectives.gather_statistics(own))
        return tape.gradient(total, own)

    slopes = strategy.mirrored.experimental_local_results(tf.function(lambda: strategy.mirrored.run(slope))())
    return {"rows": found, "slopes": [float(each) for each in slopes]}


def loop(runner):
    """Returns the losses of a loop of its own."""
    import keras

    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64)])
        optimizer = keras.optimizers.Adam()

    @runner.step
    def step(x):
        weights = model.trainable_variables
        loss, gradients = kerasdp.value_and_grad(lambda: keras.ops.mean(model(x)), weights)()
        optimizer.apply(gradients, weights)
        return loss

    return [float(step(batch)) for batch in runner.batches(np.ones((20, 4)))]


def train(settings, runner):
    import keras
    from learn_classes import StepLosses

    rows = settings.get("num_samples", 200)
    data = kerasdp.load_data(runner.config)
    x, y = data.train.inputs(np.arange(rows)), data.train.targets(np.arange(rows))[0]
    with runner.scope():
        model = kerasdp.build_model(runner.config, data.input_shape, data.num_classes)
        metrics = ["accuracy"]
        if "frozen" in settings:
            next(layer for layer in model.layers if layer.weights).trainable = False
            metrics.append(keras.metrics.MeanIoU(64, sparse_y_pred=False))
        model.compile(
            kerasdp.make_optimizer(runner.config),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=metrics,
            **settings.get("compile", {}),
        )
    losses, sent = StepLosses(runner), []
    is_last = runner.strategy.processes.rank == runner.strategy.processes.num_processes - 1

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            sent.append((time.perf_counter(), bytes_sent()))

        def on_train_end(self, logs=None):
            if is_last and "drift" in settings:
                weight = self.model.trainable_weights[1]
                weight.assign(weight + 1e-6)

        def on_train_batch_end(self, batch, logs=None):
            if is_last and len(sent) == 5 and "signal" in settings:
                os.kill(os.getpid(), settings["signal"])
            if is_last and len(sent) == 5 and "fails" in settings:
                if settings["fails"] == "memory":
                    keras.ops.zeros(2**50)
                raise ValueError("bad luck")

    history = runner.fit(model, x, y, epochs=runner.config.epochs, callbacks=[losses, Steps()])
    digest = hashlib.sha256()
    for variable in model.variables:
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable)).tobytes())
    return {
        "losses": losses.values,
        "history": dict(history.history),
        "evaluate": runner.evaluate(model, x[::-1][:131], y[::-1][:131], return_dict=True),
        "predictions": runner.predict(model, x[:77]).tolist(),
        "weights": digest.hexdigest(),
        "gradient_bytes": sum(int(np.prod(weight.shape)) for weight in model.trainable_weights) * 4,
        "steps": sent,
    }


def main():
    settings = json.loads(sys.argv[1])
    fields = {name: value for name, value in settings.items() if name not in OWN}
    fields = {"backend": "tensorflow", "device": "cpu", "verbose": 0, "batch_size": 61, "epochs": 2} | fields
    try:
        function = functools.partial(train, settings)
        function = gather if "only_gather" in settings else loop if "own_step" in settings else function
        result = kerasdp.launch(function, kerasdp.Config(**fields))
    except kerasdp.RunError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
