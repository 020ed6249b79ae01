"""Runs a training loop in plain TensorFlow; see `protocol.py` for how it is asked for repetitions.

    echo | python benchmarks/tensorflow_loop.py --model=resnet18 --compile      # XLA
    echo | python benchmarks/tensorflow_loop.py --model=convnet --devices=2      # MirroredStrategy

One `tf.function` a step. All samples are kept on the devices as bytes; a step picks its batch there.
"""

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import protocol  # noqa: E402
import tensorflow as tf  # noqa: E402


class Net:
    """Weights and moving statistics by layer, made in the first call (`is_new`), and what is done with them.

    Args:
        dtype: of the arithmetic.
        is_synchronized: whether batch norm is over the batches of all replicas.
        drop: whether dropout drops.
    """

    def __init__(self, dtype: tf.DType = tf.float32, is_synchronized: bool = False, drop: bool = True):
        self.dtype, self.is_synchronized, self.drop = dtype, is_synchronized, drop
        self.is_new = True
        self.weights: dict[str, tf.Variable] = {}
        self.statistics: dict[str, tf.Variable] = {}
        self.random = np.random.default_rng(0)

    def weight(self, name: str, *shape: int, value: float | None = None) -> tf.Variable:
        """A weight; a kernel, made with He's normal distribution, if there is no `value`."""
        if name not in self.weights:
            deviation = (2 / np.prod(shape[:-1])) ** 0.5
            start = self.random.normal(0, deviation, shape) if value is None else np.full(shape, value)
            self.weights[name] = tf.Variable(start.astype("float32"), name=name.replace("/", "_"))
        return self.weights[name]

    def statistic(self, name: str, size: int, value: float) -> tf.Variable:
        """Moving statistics: each replica's own, and their mean for whoever reads them."""
        if name not in self.statistics:
            self.statistics[name] = tf.Variable(
                tf.fill([size], value), trainable=False, synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.MEAN,
            )  # fmt: skip
        return self.statistics[name]

    def conv(
        self, name: str, x: tf.Tensor, filters: int, size: int, strides: int = 1, bias: bool = True,
        is_padded: bool = True,
    ) -> tf.Tensor:  # fmt: skip
        """Applies a convolution that pads equally on all sides, or not at all."""
        # Not by the operation's own explicit padding, which is slow on the CPU; "SAME" with a stride pads an odd
        # kernel's images more on one side.
        is_same = is_padded and (strides == 1 or size % 2 == 0)
        if is_padded and not is_same:
            x = tf.pad(x, [[0, 0], [size // 2] * 2, [size // 2] * 2, [0, 0]])
        kernel = tf.cast(self.weight(f"{name}/kernel", size, size, x.shape[-1], filters), self.dtype)
        x = tf.nn.conv2d(x, kernel, strides, "SAME" if is_same else "VALID")
        return tf.nn.bias_add(x, tf.cast(self.weight(f"{name}/bias", filters, value=0), self.dtype)) if bias else x

    def dense(self, name: str, x: tf.Tensor, size: int) -> tf.Tensor:
        """Applies a dense layer."""
        kernel = tf.cast(self.weight(f"{name}/kernel", x.shape[-1], size), self.dtype)
        return tf.nn.bias_add(x @ kernel, tf.cast(self.weight(f"{name}/bias", size, value=0), self.dtype))

    def norm(
        self, name: str, x: tf.Tensor, scale: bool = True, epsilon: float = 1e-3, momentum: float = 0.99
    ) -> tf.Tensor:
        """Applies batch norm in float32."""
        size = x.shape[-1]
        beta = self.weight(f"{name}/beta", size, value=0)
        gamma = self.weight(f"{name}/gamma", size, value=1) if scale else tf.ones(size)
        moving = [self.statistic(f"{name}/mean", size, 0.0), self.statistic(f"{name}/variance", size, 1.0)]
        if self.is_synchronized and not self.is_new:
            rows = tf.cast(x, tf.float32)
            sums = tf.stack([tf.reduce_mean(rows, (0, 1, 2)), tf.reduce_mean(tf.square(rows), (0, 1, 2))])
            mean, squares = tf.unstack(tf.distribute.get_replica_context().all_reduce("MEAN", sums))
            found = mean, squares - tf.square(mean)
            x = tf.cast(tf.nn.batch_normalization(rows, *found, beta, gamma, epsilon), self.dtype)
        else:
            x, *found = tf.raw_ops.FusedBatchNormV3(
                x=x, scale=gamma, offset=beta, mean=[], variance=[], epsilon=epsilon, is_training=True
            )[:3]
        for old, new in [] if self.is_new else zip(moving, found):
            old.assign(old * momentum + new * (1 - momentum))
        return x

    def dropout(self, x: tf.Tensor, rate: float) -> tf.Tensor:
        """Drops at random."""
        return tf.nn.dropout(x, rate) if self.drop else x


def convnet(net: Net, x: tf.Tensor) -> tf.Tensor:
    """Builds what kerasdp/models/convnet.py builds."""
    x = tf.nn.relu(net.norm("norm1", net.conv("conv1", x, 12, 3, bias=False), scale=False))
    x = tf.nn.relu(net.norm("norm2", net.conv("conv2", x, 24, 6, 2, bias=False, is_padded=False), scale=False))
    x = tf.nn.relu(net.norm("norm3", net.conv("conv3", x, 32, 6, 2), scale=False))
    x = tf.nn.relu(net.dense("dense1", tf.reduce_mean(x, (1, 2)), 256))
    return net.dense("logits", net.dropout(x, 0.5), protocol.NUM_CLASSES)


def resnet18(net: Net, x: tf.Tensor) -> tf.Tensor:
    """Builds what kerasdp/models/resnet18.py builds."""
    x = tf.nn.relu(net.norm("stem_norm", net.conv("stem_conv", x, 64, 3)))
    for stage, filters in enumerate((64, 128, 256, 512), 1):
        for block in (1, 2):
            name, strides = f"stage{stage}_block{block}", 2 if block == 1 and stage > 1 else 1
            y = tf.nn.relu(net.norm(f"{name}_norm1", net.conv(f"{name}_conv1", x, filters, 3, strides)))
            y = net.norm(f"{name}_norm2", net.conv(f"{name}_conv2", y, filters, 3))
            if strides != 1:
                x = net.conv(f"{name}_shortcut", x, filters, 1, strides)
            x = tf.nn.relu(x + y)
    return net.dense("logits", tf.reduce_mean(x, (1, 2)), protocol.NUM_CLASSES)


def resnet50(net: Net, x: tf.Tensor) -> tf.Tensor:
    """Builds what kerasdp/models/resnet50.py builds."""

    def conv_norm(name: str, x: tf.Tensor, filters: int, size: int, strides: int = 1) -> tf.Tensor:
        x = net.conv(f"{name}_conv", x, filters, size, strides, bias=False)
        return net.norm(f"{name}_norm", x, epsilon=1e-5, momentum=0.9)

    x = tf.nn.relu(conv_norm("stem", x, 64, 7, 2))
    x = tf.nn.max_pool2d(x, 3, 2, [[0, 0], [1, 1], [1, 1], [0, 0]])
    for stage, (filters, num_blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
        for block in range(1, num_blocks + 1):
            name, strides = f"stage{stage}_block{block}", 2 if block == 1 and stage > 1 else 1
            y = tf.nn.relu(conv_norm(f"{name}_1", x, filters, 1))
            y = tf.nn.relu(conv_norm(f"{name}_2", y, filters, 3, strides))
            y = conv_norm(f"{name}_3", y, 4 * filters, 1)
            if block == 1:
                x = conv_norm(f"{name}_shortcut", x, 4 * filters, 1, strides)
            x = tf.nn.relu(x + y)
    return net.dense("logits", tf.reduce_mean(x, (1, 2)), protocol.NUM_CLASSES)


MODELS = {"convnet": convnet, "resnet18": resnet18, "resnet50": resnet50}


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
        images, labels = protocol.make_data(args.model)
        with self.strategy.scope():
            self.images = tf.Variable(images, trainable=False)
            self.labels = tf.Variable(labels.astype("int64"), trainable=False)
            self.totals = tf.Variable(
                tf.zeros(2), trainable=False, synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )  # fmt: skip
            # The layers make their variables here.
            MODELS[args.model](self.net, tf.zeros((1, *protocol.input_shape(args.model)), self.net.dtype))
            self.net.is_new = False
            self.momentum = [
                tf.Variable(tf.zeros_like(weight), trainable=False) for weight in self.net.weights.values()
            ]
        self.num_parameters = sum(int(np.prod(weight.shape)) for weight in self.net.weights.values())
        self.batches = protocol.batches(args.batch_size)
        self.step = tf.function(self._step, jit_compile=args.compile)

    def _step(self, index: tf.Tensor) -> None:
        self.strategy.run(self._replica_step, (index,))

    def _replica_step(self, index: tf.Tensor) -> None:
        context = tf.distribute.get_replica_context()
        rows = self.args.batch_size // self.args.devices
        first = tf.cast(context.replica_id_in_sync_group, tf.int32) * rows
        index = index[first : first + rows]
        x = tf.cast(tf.gather(self.images, index), self.net.dtype) * tf.constant(1 / 255, self.net.dtype)
        x, labels = tf.ensure_shape(x, (rows, *x.shape[1:])), tf.gather(self.labels, index)
        weights = list(self.net.weights.values())
        with tf.GradientTape() as tape:
            logits = tf.cast(MODELS[self.args.model](self.net, x), tf.float32)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, weights)
        if self.args.devices > 1:
            gradients = context.all_reduce("MEAN", gradients)
        for weight, momentum, gradient in zip(weights, self.momentum, gradients):
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=weight.handle, accum=momentum.handle, lr=protocol.LEARNING_RATE, grad=gradient,
                momentum=protocol.MOMENTUM,
            )  # fmt: skip
        accuracy = tf.reduce_mean(tf.cast(tf.argmax(logits, 1) == labels, tf.float32))
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
    loop = Loop(args)
    name = "cpu"
    if "GPU" in loop.names[0]:
        name = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])["device_name"]
    protocol.serve(loop.repeat, args.steps, parameters=loop.num_parameters, device=name)


if __name__ == "__main__":
    main()
