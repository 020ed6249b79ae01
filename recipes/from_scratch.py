"""Trains LeNet with data parallelism written by hand, in `keras.ops` and NumPy.

    python recipes/from_scratch.py                   # two GPUs, or one used twice, or two virtual CPU devices
    python recipes/from_scratch.py --gpus=1          # the same losses
    python recipes/from_scratch.py --backend=jax --gpus=4 --batch_size=96 --learning_rate=0.1

Expected of the first two: test accuracy of at least 0.9, in about a minute on 2 cores. The losses are the same as with

    python recipes/train.py --model="lenet(activation='relu')" --batch_size=48 --epochs=8 --optimizer=sgd \\
        --learning_rate=0.05

docs/from-scratch.md explains this recipe. flags/lesson_fashion.flags has the settings of the lesson on d2l.ai.
"""

import functools
import itertools
import json
import os
import time
from typing import Any

import numpy as np
from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_integer("batch_size", 48, "Samples per step, over all devices.", lower_bound=1)
flags.DEFINE_integer("epochs", 8, "Passes over the training data.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.05, "Learning rate.")
flags.DEFINE_string("model", "lenet", "LeNet. Its arguments choose the initial weights.")
flags.DEFINE_string("dataset", "digits", "digits, mnist, fashion_mnist, ...")
kerasdp.flags.define("backend", "gpus", "device", "precision", "seed", "workdir")


def logits_of(parameters: list, images: Any) -> Any:
    """Returns LeNet's logits, one for each image and class. Runs on the device of its arguments."""
    from keras import config, ops

    kernel1, bias1, kernel2, bias2, kernel3, bias3, kernel4, bias4 = parameters
    x = ops.cast(images, config.floatx()) * (1 / 255)
    x = ops.average_pool(ops.relu(ops.conv(x, kernel1) + bias1), 2, 2)  # 20 filters 3x3
    x = ops.average_pool(ops.relu(ops.conv(x, kernel2) + bias2), 2, 2)  # 50 filters 5x5
    x = ops.relu(ops.matmul(ops.reshape(x, (len(images), -1)), kernel3) + bias3)
    return ops.matmul(x, kernel4) + bias4


def loss_of(parameters: list, images: Any, labels: Any) -> Any:
    """Returns the sum of the losses. The sums of all shards add up to the sum of the batch; means would not."""
    from keras import losses, ops

    return ops.sum(losses.sparse_categorical_crossentropy(labels, logits_of(parameters, images), from_logits=True))


@functools.cache
def loss_and_gradients() -> Any:
    """Returns a function that computes the loss and its gradients. Only this code differs between frameworks."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(jax.value_and_grad(loss_of))
    if keras.backend.backend() == "torch":
        import torch

        return lambda *arguments: torch.func.grad_and_value(loss_of)(*arguments)[::-1]
    import tensorflow as tf

    @tf.function
    def with_a_tape(parameters: list, *shard: Any) -> tuple:
        with tf.GradientTape() as tape:
            tape.watch(parameters)
            loss = loss_of(parameters, *shard)
        return loss, tape.gradient(loss, parameters)

    return with_a_tape


def copy_to(device: str, array: Any) -> Any:
    """Copies a NumPy array, or an array of another device, to a device."""
    import keras

    with keras.device(device):
        return keras.ops.copy(array)


def split_and_load(batch: np.ndarray, devices: list) -> list:
    """Splits a batch into equal shards, and copies one to each device."""
    if len(batch) % len(devices):
        expected = f"--batch_size: expected a multiple of {len(devices)}, the number of devices"
        raise kerasdp.UserError(f"{expected}. Received: {len(batch)} samples")
    return [copy_to(device, shard) for device, shard in zip(devices, np.split(batch, len(devices)))]


def allreduce(arrays: list, devices: list) -> list:
    """Adds the arrays of all devices on the first device, and copies the sum to each device."""
    total = sum((copy_to(devices[0], array) for array in arrays[1:]), start=arrays[0])
    return [copy_to(device, total) for device in devices]


def ring_allreduce(vectors: list, devices: list) -> tuple[list, list[int]]:
    """Adds the vectors of all devices in a ring. Returns the sums, and how many values each device sent.

    Each vector is split into one piece for each device. In each step a device sends one piece to the next device. In
    the first round the devices add the pieces. In the second round they pass on the finished sums.
    """
    from keras import ops

    count, pieces = len(devices), [list(ops.array_split(vector, len(devices))) for vector in vectors]
    sent = [0] * count
    for step, device in itertools.product(range(2 * (count - 1)), range(count)):
        number, following = (device - step) % count, (device + 1) % count
        arrived = copy_to(devices[following], pieces[device][number])
        sent[device] += len(arrived)
        pieces[following][number] = arrived + pieces[following][number] if step < count - 1 else arrived
    return [ops.concatenate(own) for own in pieces], sent


def demonstrate(devices: list, weights: list[np.ndarray]) -> None:
    """Calls the functions above on small arrays. Prints the bytes that each device sends for LeNet's gradients."""
    from keras import ops

    small = split_and_load(np.array([[1.0, 1.0], [2.0, 2.0]]), devices[:2])
    print("allreduce:", *(ops.convert_to_numpy(array).tolist() for array in allreduce(small, devices[:2])))
    print("split_and_load:", *(tuple(shard.shape) for shard in split_and_load(np.ones((4, 4)), devices[:2])))
    size, others = sum(array.size for array in weights), len(devices) - 1
    _, sent = ring_allreduce([copy_to(device, np.ones(size)) for device in devices], devices)
    print(f"bytes sent for LeNet's gradients: allreduce {[4 * size * others] + [4 * size] * others}, "
          f"ring {[4 * number for number in sent]}")  # fmt: skip


def train_batch(parameters: list, devices: list, working: list, batch: tuple, learning_rate: float) -> float:
    """Trains with one batch on the `working` devices, and updates the weights on all devices. Returns the mean loss."""
    import keras

    results = []
    for device, own, *shard in zip(working, parameters, *(split_and_load(part, working) for part in batch)):
        with keras.device(device):  # does not wait for results: GPUs work at the same time
            results.append(loss_and_gradients()(own, *shard))
    for number, gradients in enumerate(zip(*(gradients for _, gradients in results))):
        for device, own, total in zip(devices, parameters, allreduce(gradients, devices)):
            with keras.device(device):
                own[number] = own[number] - learning_rate / len(batch[0]) * total  # plain SGD
    return sum(float(loss) for loss, _ in results) / len(batch[0])


def accuracy(parameters: list, devices: list, data: Any, batch_size: int) -> float:
    """Returns the share of correctly classified images. The devices take turns with the batches."""
    import keras

    num_correct, order = 0, kerasdp.Order(num_samples=data.num_samples, batch_size=batch_size, shuffle=False)
    for device, own, rows in zip(itertools.cycle(devices), itertools.cycle(parameters), order.batches(0)):
        with keras.device(device):
            logits = keras.ops.convert_to_numpy(logits_of(own, copy_to(device, data.inputs(rows))))
        num_correct += (logits.argmax(-1) == data.targets(rows)[0]).sum()
    return num_correct / data.num_samples


def main(argv):
    """Trains on all devices from this one process."""
    config = kerasdp.Config(**kerasdp.flags.values(argv))
    if config.precision not in ("auto", "float32", "float64"):
        raise kerasdp.UserError(f"--precision: expected float32 or float64. Received: {config.precision!r}")
    with kerasdp.local_devices(config) as devices:
        data = kerasdp.load_data(FLAGS.dataset)
        weights = kerasdp.build_model(FLAGS.model, data.input_shape, data.num_classes).get_weights()  # as in train.py
        demonstrate(devices, weights)
        parameters = [[copy_to(device, array) for array in weights] for device in devices]
        order = kerasdp.Order(num_samples=data.train.num_samples, batch_size=config.batch_size, seed=config.seed)
        os.makedirs(config.workdir, exist_ok=True)
        with open(os.path.join(config.workdir, "steps.jsonl"), "w") as log:
            for epoch in range(FLAGS.epochs):
                losses, start = [], time.perf_counter()
                for rows in order.batches(epoch):
                    # The last batch of an epoch is shorter and may not divide. The first device trains it alone.
                    working = devices if len(rows) == config.batch_size else devices[:1]
                    batch = data.train.inputs(rows), data.train.targets(rows)[0]
                    losses.append(train_batch(parameters, devices, working, batch, FLAGS.learning_rate))
                    print(json.dumps({"step": epoch * order.num_batches + len(losses), "loss": losses[-1]}), file=log)
                text = f"epoch {epoch + 1}: {time.perf_counter() - start:.1f} s, loss {np.mean(losses):.4f}"
                print(f"{text}, test accuracy {accuracy(parameters, devices, data.test, config.batch_size):.4f}")
        print(f"devices: {', '.join(devices)}; the loss of each step is in {config.workdir}/steps.jsonl")


if __name__ == "__main__":
    app.run(main)
