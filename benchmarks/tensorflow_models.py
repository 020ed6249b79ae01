"""Builds the models of kerasdp/models and of keras_models.py in plain TensorFlow, for `tensorflow_loop.py`."""

import numpy as np
import protocol
import tensorflow as tf


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

    def layer_norm(self, name: str, x: tf.Tensor) -> tf.Tensor:
        """Applies layer norm in float32."""
        gamma, beta = (self.weight(f"{name}/{kind}", x.shape[-1], value=kind == "gamma") for kind in ("gamma", "beta"))
        x = tf.cast(x, tf.float32)
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        return tf.cast(tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-5), self.dtype)

    def embedding(self, name: str, x: tf.Tensor, count: int, size: int) -> tf.Tensor:
        """Looks up rows."""
        return tf.cast(tf.gather(self.weight(f"{name}/kernel", count, size), x), self.dtype)

    def dropout(self, x: tf.Tensor, rate: float) -> tf.Tensor:
        """Drops at random."""
        return tf.nn.dropout(x, rate) if self.drop else x


def convnet(net: Net, x: tf.Tensor) -> tf.Tensor:
    """Builds what `convnet` of kerasdp/models/classifiers.py builds."""
    x = tf.nn.relu(net.norm("norm1", net.conv("conv1", x, 12, 3, bias=False), scale=False))
    x = tf.nn.relu(net.norm("norm2", net.conv("conv2", x, 24, 6, 2, bias=False, is_padded=False), scale=False))
    x = tf.nn.relu(net.norm("norm3", net.conv("conv3", x, 32, 6, 2), scale=False))
    x = tf.nn.relu(net.dense("dense1", tf.reduce_mean(x, (1, 2)), 256))
    return net.dense("logits", net.dropout(x, 0.5), protocol.NUM_CLASSES)


def resnet18(net: Net, x: tf.Tensor) -> tf.Tensor:
    """Builds what `resnet18` of kerasdp/models/classifiers.py builds."""
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
    """Builds what `resnet50` of kerasdp/models/classifiers.py builds."""

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


def gpt(net: Net, x: tf.Tensor, vocabulary: int, width: int) -> tf.Tensor:
    """Builds what keras_models.py builds."""
    batch, length = x.shape
    x = net.embedding("tokens", x, vocabulary, width) + net.embedding("positions", tf.range(length), length, width)
    hidden = tf.constant(np.triu(np.full((length, length), -1e9, "float32"), 1), net.dtype)
    for number in range(1, protocol.NUM_BLOCKS + 1):
        name = f"block{number}"
        qkv = net.dense(f"{name}_qkv", net.layer_norm(f"{name}_norm1", x), 3 * width)
        qkv = tf.transpose(tf.reshape(qkv, (batch, length, 3, protocol.NUM_HEADS, -1)), (2, 0, 3, 1, 4))
        query, key, value = tf.unstack(qkv)
        scores = tf.matmul(query * query.shape[-1] ** -0.5, key, transpose_b=True) + hidden
        attended = tf.reshape(tf.transpose(tf.nn.softmax(scores) @ value, (0, 2, 1, 3)), x.shape)
        x = x + net.dense(f"{name}_out", attended, width)
        y = net.dense(f"{name}_up", net.layer_norm(f"{name}_norm2", x), 4 * width)
        x = x + net.dense(f"{name}_down", tf.nn.gelu(y), width)
    return net.dense("logits", net.layer_norm("norm", x), vocabulary)


def segmentation(net: Net, x: tf.Tensor, width: int) -> tf.Tensor:
    """Builds what keras_models.py builds."""

    def halve(name: str, x: tf.Tensor, filters: int) -> tf.Tensor:
        return tf.nn.relu(net.norm(f"{name}_norm", net.conv(name, x, filters, 4, 2, bias=False)))

    def join(name: str, x: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(net.norm(f"{name}_norm", net.double(name, x, other.shape[-1])) + other)

    half = halve("down1", x, width)
    quarter = halve("down2", half, 2 * width)
    x = halve("down3", quarter, 4 * width)
    x = join("up2", join("up1", x, quarter), half)
    return net.double("logits", x, protocol.SEGMENTATION_CLASSES, bias=True)
