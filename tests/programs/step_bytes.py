"""Counts the bytes that a device sends in a step, and computes them from the model: step_bytes.py BACKEND CONFIG.

CONFIG: JSON of `kerasdp.Config`.
"""

import dataclasses
import functools
import json
import pathlib
import sys

import kerasdp

BENCHMARKS = str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks")


def train(folder, runner):
    sys.path.insert(0, folder)
    import keras
    import numpy as np
    import traffic
    from step_bytes import step_bytes

    config = runner.config
    if config.backend != "jax":
        traffic.prepare(config.backend)
    data = kerasdp.load_data(config)
    with runner.scope():
        model = kerasdp.build_model(config, data.input_shape, data.num_classes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(kerasdp.make_optimizer(config), loss, metrics=["accuracy"])
    rows = np.arange(config.batch_size)
    x, y = data.train.inputs(rows), data.train.targets(rows)[0]

    def repeat(count):
        runner.fit(model, x, y, steps_per_epoch=count, epochs=1)

    repeat(2)  # DistributedDataParallel (torch 2.13) makes its buckets again in the second step
    counted = traffic.bytes_a_step(config.backend, config.num_devices, repeat)
    computed = step_bytes(model, config, config.num_devices)
    return {"counted": counted, "computed": dataclasses.asdict(computed)}


def main():
    settings = kerasdp.Config(backend=sys.argv[1], **json.loads(sys.argv[2]))
    if settings.backend == "jax":  # before it starts
        sys.path.insert(0, BENCHMARKS)
        import traffic

        traffic.prepare("jax")
    found = kerasdp.launch(functools.partial(train, BENCHMARKS), settings, device="cpu")
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
