"""Runs a training loop in plain TensorFlow; see `protocol.py` for how it is asked for repetitions.

    echo | python benchmarks/tensorflow_loop.py --model=resnet18 --compile      # XLA
    echo | python benchmarks/tensorflow_loop.py --model=convnet --devices=2      # MirroredStrategy

One `tf.function` a step. All samples are kept on the devices as bytes; a step picks its batch there.
"""

import functools
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import protocol  # noqa: E402
import tensorflow as tf  # noqa: E402
from loop_models import find_model  # noqa: E402

UNKNOWN = ("llama", "tagger", "unet", "efficientnet")  # which loop_models.py has for jax_net.py alone


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
        """Moving statistics: each replica's own, and their mean for what reads them."""
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

    def double(self, name: str, x: tf.Tensor, filters: int, bias: bool = False) -> tf.Tensor:
        """Applies a 1x1 convolution that gives 2x2 pixels each."""
        return tf.nn.depth_to_space(self.conv(name, x, 4 * filters, 1, bias=bias), 2)

    def dense(self, name: str, x: tf.Tensor, size: int) -> tf.Tensor:
        """Applies a dense layer."""
        kernel = tf.cast(self.weight(f"{name}/kernel", x.shape[-1], size), self.dtype)
        return tf.nn.bias_add(
            tf.tensordot(x, kernel, 1), tf.cast(self.weight(f"{name}/bias", size, value=0), self.dtype)
        )

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

    def layer_norm(self, name: str, x: tf.Tensor, epsilon: float = 1e-5) -> tf.Tensor:
        """Applies layer norm in float32."""
        gamma, beta = (self.weight(f"{name}/{kind}", x.shape[-1], value=kind == "gamma") for kind in ("gamma", "beta"))
        x = tf.cast(x, tf.float32)
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        return tf.cast(tf.nn.batch_normalization(x, mean, variance, beta, gamma, epsilon), self.dtype)

    def embedding(self, name: str, x: tf.Tensor, count: int, size: int) -> tf.Tensor:
        """Looks up rows."""
        return tf.cast(tf.gather(self.weight(f"{name}/kernel", count, size), x), self.dtype)

    def dropout(self, x: tf.Tensor, rate: float) -> tf.Tensor:
        """Drops at random."""
        return tf.nn.dropout(x, rate) if self.drop else x

    def table(self, name: str, *shape: int) -> tf.Tensor:
        """Returns all rows of an embedding."""
        return tf.cast(self.weight(f"{name}/kernel", *shape), self.dtype)

    def attend(self, qkv: tf.Tensor, is_causal: bool = False, mask: tf.Tensor | None = None) -> tf.Tensor:
        """Attends to all positions, or to those before each; `(batch, length, 3 * width)` becomes `(..., width)`.

        `mask`: `(batch, length)`, 0 where nobody attends to.
        """
        batch, length, size = qkv.shape
        qkv = tf.transpose(tf.reshape(qkv, (batch, length, 3, protocol.NUM_HEADS, -1)), (2, 0, 3, 1, 4))
        query, key, value = tf.unstack(qkv)
        scores = tf.matmul(query * query.shape[-1] ** -0.5, key, transpose_b=True)
        if is_causal:
            scores += tf.constant(np.triu(np.full((length, length), -1e9, "float32"), 1), self.dtype)
        if mask is not None:
            scores += tf.cast(1 - mask[:, None, None], self.dtype) * tf.constant(-1e9, self.dtype)
        return tf.reshape(tf.transpose(tf.nn.softmax(scores) @ value, (0, 2, 1, 3)), (batch, length, size // 3))

    def with_token(self, name: str, x: tf.Tensor) -> tf.Tensor:
        """Puts a token that is trained before all others."""
        batch, _, width = x.shape
        return tf.concat([tf.tile(self.table(name, 1, 1, width), (batch, 1, 1)), x], 1)

    def sequence(self, x: tf.Tensor) -> tf.Tensor:
        """Makes a sequence of an image's pixels."""
        return tf.reshape(x, (x.shape[0], -1, x.shape[-1]))

    def max_pool(self, x: tf.Tensor) -> tf.Tensor:
        """Takes the largest of 3x3 pixels, which halves an image."""
        return tf.nn.max_pool2d(x, 3, 2, [[0, 0], [1, 1], [1, 1], [0, 0]])

    def mean(self, x: tf.Tensor) -> tf.Tensor:
        """Averages all pixels of an image."""
        return tf.reduce_mean(x, (1, 2))

    relu = staticmethod(tf.nn.relu)
    tanh = staticmethod(tf.tanh)
    gelu = staticmethod(tf.nn.gelu)
    gelu_by_tanh = staticmethod(functools.partial(tf.nn.gelu, approximate=True))


def find_devices(args: Any) -> list[str]:
    """Returns the names of the devices; virtual ones on the CPU."""
    gpus = [] if args.device == "cpu" else tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[: args.devices], "GPU")
    if not gpus and args.devices > 1:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * args.devices)
    tf.config.experimental.enable_tensor_float_32_execution(args.precision == "auto")
    return [f"{'GPU' if gpus else 'CPU'}:{number}" for number in range(args.devices)]


class Loop:
    """Trains on all devices that are asked for."""

    def __init__(self, args: Any, drop: bool = True):
        self.args, self.names = args, find_devices(args)
        several = args.devices > 1
        self.strategy = tf.distribute.MirroredStrategy(self.names) if several else tf.distribute.get_strategy()
        precision = tf.bfloat16 if args.precision == "bfloat16" else tf.float32
        self.net = Net(precision, several and args.batch_norm == "sync", drop)
        self.model = find_model(args)
        inputs, labels = protocol.make_data(args)
        with self.strategy.scope():
            self.inputs = protocol.map_inputs(functools.partial(tf.Variable, trainable=False), inputs)
            self.labels = tf.Variable(labels.astype("int64"), trainable=False)
            self.totals = tf.Variable(
                tf.zeros(2), trainable=False, synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )  # fmt: skip
            # The layers make their variables here.
            self.model(self.net, self._rows(tf.constant([0])))
            self.net.is_new = False
            self.momentum = [
                tf.Variable(tf.zeros_like(weight), trainable=False) for weight in self.net.weights.values()
            ]
        self.num_parameters = sum(int(np.prod(weight.shape)) for weight in self.net.weights.values())
        self.batches = protocol.batches(args.model, args.batch_size)
        self.step = tf.function(self._step, jit_compile=args.compile)

    def _rows(self, index: tf.Tensor) -> Any:
        """Returns samples; images as numbers from 0 to 1."""
        x = protocol.map_inputs(lambda array: tf.gather(array, index), self.inputs)
        is_images = not isinstance(x, dict) and x.shape.rank == 4
        return tf.cast(x, self.net.dtype) * tf.constant(1 / 255, self.net.dtype) if is_images else x

    def _step(self, index: tf.Tensor) -> None:
        self.strategy.run(self._replica_step, (index,))

    def _replica_step(self, index: tf.Tensor) -> None:
        context = tf.distribute.get_replica_context()
        rows = self.args.batch_size // self.args.devices
        first = tf.cast(context.replica_id_in_sync_group, tf.int32) * rows
        index = index[first : first + rows]
        index = tf.ensure_shape(index, (rows,))
        x, labels = self._rows(index), tf.gather(self.labels, index)
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
    flags = protocol.parser(__doc__, models=[name for name in protocol.NUM_SAMPLES if name not in UNKNOWN])
    flags.add_argument("--compile", action="store_true", help="XLA; for one device")
    args = protocol.parse(flags)
    if args.compile and args.devices > 1:
        flags.error("--compile: XLA takes no variables of several devices")
    traffic = protocol.traffic_of(args, "tensorflow")
    loop = Loop(args)
    name = "cpu"
    if "GPU" in loop.names[0]:
        name = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])["device_name"]
    protocol.serve(
        loop.repeat, args.steps, first_steps=args.first_steps, parameters=loop.num_parameters, device=name,
        traffic=traffic,
    )  # fmt: skip


if __name__ == "__main__":
    main()
