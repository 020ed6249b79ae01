"""Runs a training loop in plain TensorFlow; see `protocol.py` for how it is asked for repetitions.

    echo | python benchmarks/tensorflow_loop.py --model=resnet18 --compile      # XLA
    echo | python benchmarks/tensorflow_loop.py --model=convnet --devices=2      # MirroredStrategy

One `tf.function` a step. All samples are kept on the devices as bytes; a step picks its batch there.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import protocol  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow_models import Net, convnet, gpt, resnet18, resnet50, segmentation  # noqa: E402


def find_model(args: Any) -> Callable[[Net, tf.Tensor], tf.Tensor]:
    """Returns the model `args.model`."""
    if args.model == "gpt":
        return functools.partial(gpt, vocabulary=args.vocabulary, width=args.width)
    if args.model == "segmentation":
        return functools.partial(segmentation, width=args.width)
    return {"convnet": convnet, "resnet18": resnet18, "resnet50": resnet50}[args.model]


def find_devices(args: Any) -> list[str]:
    """Returns the names of the devices; virtual ones on the CPU."""
    gpus = [] if args.device == "cpu" else tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[: args.devices], "GPU")
    if not gpus and args.devices > 1:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * args.devices)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    return [f"{'GPU' if gpus else 'CPU'}:{number}" for number in range(args.devices)]


class Loop:
    """Trains on all devices that are asked for."""

    def __init__(self, args: Any, drop: bool = True):
        self.args, self.names = args, find_devices(args)
        several = args.devices > 1
        self.strategy = tf.distribute.MirroredStrategy(self.names) if several else tf.distribute.get_strategy()
        self.net = Net(tf.as_dtype(args.precision), several and args.batch_norm == "sync", drop)
        self.model = find_model(args)
        images, labels = protocol.make_data(args)
        with self.strategy.scope():
            self.images = tf.Variable(images, trainable=False)
            self.labels = tf.Variable(labels.astype("int64"), trainable=False)
            self.totals = tf.Variable(
                tf.zeros(2), trainable=False, synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )  # fmt: skip
            # The layers make their variables here.
            dtype = self.net.dtype if images.ndim == 4 else tf.int32
            self.model(self.net, tf.zeros((1, *images.shape[1:]), dtype))
            self.net.is_new = False
            self.momentum = [
                tf.Variable(tf.zeros_like(weight), trainable=False) for weight in self.net.weights.values()
            ]
        self.num_parameters = sum(int(np.prod(weight.shape)) for weight in self.net.weights.values())
        self.batches = protocol.batches(args.model, args.batch_size)
        self.step = tf.function(self._step, jit_compile=args.compile)

    def _step(self, index: tf.Tensor) -> None:
        self.strategy.run(self._replica_step, (index,))

    def _replica_step(self, index: tf.Tensor) -> None:
        context = tf.distribute.get_replica_context()
        rows = self.args.batch_size // self.args.devices
        first = tf.cast(context.replica_id_in_sync_group, tf.int32) * rows
        index = index[first : first + rows]
        x, labels = tf.gather(self.images, index), tf.gather(self.labels, index)
        if x.shape.rank == 4:  # images
            x = tf.cast(x, self.net.dtype) * tf.constant(1 / 255, self.net.dtype)
        x = tf.ensure_shape(x, (rows, *x.shape[1:]))
        weights = list(self.net.weights.values())
        with tf.GradientTape() as tape:
            logits = tf.cast(self.model(self.net, x), tf.float32)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        # Those of embeddings are dense, too: momentum moves rows that the batch does not have.
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, weights)]
        if self.args.devices > 1:
            gradients = context.all_reduce("MEAN", gradients)
        for weight, momentum, gradient in zip(weights, self.momentum, gradients):
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=weight.handle, accum=momentum.handle, lr=protocol.LEARNING_RATE, grad=gradient,
                momentum=protocol.MOMENTUM,
            )  # fmt: skip
        accuracy = tf.reduce_mean(tf.cast(tf.argmax(logits, -1) == labels, tf.float32))
        self.totals.assign_add(tf.stack([loss, accuracy]))

    def repeat(self, steps: int) -> dict[str, float]:
        """Trains; waits for the end."""
        self.totals.assign(tf.zeros(2))
        for _ in range(steps):
            self.step(tf.constant(next(self.batches)))
        loss, accuracy = (self.totals.read_value().numpy() / (steps * self.args.devices)).tolist()
        memory = protocol.peak_memory()
        if "GPU" in self.names[0]:
            memory = max(tf.config.experimental.get_memory_info(name)["peak"] for name in self.names)
        return {"loss": loss, "accuracy": accuracy, "peak_memory_bytes": memory}


def main() -> None:
    """Runs one process for all devices."""
    flags = protocol.parser(__doc__)
    flags.add_argument("--compile", action="store_true", help="XLA; for one device")
    args = protocol.parse(flags)
    if args.compile and args.devices > 1:
        flags.error("--compile: XLA takes no variables of several devices")
    traffic = protocol.traffic_of(args, "tensorflow")
    loop = Loop(args)
    name = "cpu"
    if "GPU" in loop.names[0]:
        name = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])["device_name"]
    protocol.serve(loop.repeat, args.steps, parameters=loop.num_parameters, device=name, traffic=traffic)


if __name__ == "__main__":
    main()
