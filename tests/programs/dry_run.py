"""Trains what a dry run has told of, on virtual CPU devices, and prints both: python dry_run.py BACKEND CONFIG.

CONFIG: JSON of `kerasdp.Config`. What was found on each rank: the rows that each replica got of each training batch,
steps, bytes that a device sends in a step, bytes of the first checkpoint, numbers that model and optimizer hold.
"""

import functools
import json
import os
import pathlib
import sys
import tempfile

import kerasdp

BENCHMARKS = str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks")


def fit(runner, model, epochs, **more):
    data = kerasdp.load_data(runner.config)
    return runner.fit(model, data.train, validation_data=data.test, epochs=epochs, **more)


def build(runner):
    import keras

    data = kerasdp.load_data(runner.config)
    with runner.scope():
        model = kerasdp.build_model(runner.config, data.input_shape, data.num_classes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(kerasdp.make_optimizer(runner.config), loss, metrics=["accuracy"])
    return model


def train(folder, runner):
    if runner.config.dry_run:
        fit(runner, build(runner), runner.config.epochs)  # does not return
    sys.path.insert(0, folder)
    import keras
    import numpy as np
    import traffic

    config, shards = runner.config, []
    if config.backend != "jax":
        traffic.prepare(config.backend)
    model, shard_batch = build(runner), runner.strategy.shard_batch

    def noted(batch):
        shards.append((len(batch.indices), len(keras.tree.flatten(batch.inputs)[0])))
        return shard_batch(batch)

    runner.strategy.shard_batch = noted
    fit(runner, model, config.epochs)
    steps, own = runner.state.step, list(shards)

    source, rows = kerasdp.load_data(config).train, np.arange(config.batch_size)
    x, y = source.inputs(rows), source.targets(rows)[0]  # a full batch, to which a step's bytes belong

    def repeat(count):
        runner.fit(model, x, y, steps_per_epoch=count, epochs=1)

    sent = traffic.bytes_a_step(config.backend, config.num_devices, repeat)
    held = [*model.variables, *model.optimizer.variables]
    arrays = [keras.ops.convert_to_numpy(variable) for variable in {id(each): each for each in held}.values()]
    found = {
        "steps": steps, "shards": own, "sent": sent, "held": sum(np.asarray(array).nbytes for array in arrays),
        "num_processes": runner.strategy.processes.num_processes,
    }  # fmt: skip
    return runner.strategy.processes.all_gather_object(found)


def main():
    settings = kerasdp.Config(backend=sys.argv[1], **json.loads(sys.argv[2]))
    job = functools.partial(train, BENCHMARKS)
    if settings.backend == "jax":  # before it starts
        sys.path.insert(0, BENCHMARKS)
        import traffic

        traffic.prepare("jax")
    with tempfile.TemporaryDirectory() as folder:
        found = kerasdp.launch(job, settings, workdir=folder, device="cpu")
        checkpoints = sorted(pathlib.Path(folder, "checkpoints").glob("step-*"))
        size = os.path.getsize(checkpoints[0])
    told = kerasdp.launch(job, settings, dry_run=True)
    print("RESULT", json.dumps({"told": told, "found": found, "checkpoint_bytes": size}))


if __name__ == "__main__":
    main()
