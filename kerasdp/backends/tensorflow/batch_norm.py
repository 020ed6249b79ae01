"""Fused batch norm for training, over one replica's rows or over the global batch."""

from collections.abc import Callable

import tensorflow as tf

from kerasdp.backends.tensorflow.collectives import sum_gradients
from kerasdp.backends.tensorflow.xla import compiled


def normalize(
    x: tf.Tensor,
    axis: int,
    scale: tf.Tensor | None,
    offset: tf.Tensor | None,
    epsilon: float,
    num_rows: int | None = None,
    gather: Callable[[tf.Tensor], tf.Tensor] | None = None,
    weight: float = 1.0,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalizes `x`, as `kerasdp.backends.torch.batch_norm.normalize`.

    Not by TensorFlow's own kernel but on GPUs: on the CPU (2.21) its outputs, mean, variance and gradients of 61 images
    of 28x28 are wrong by 3e-6 to 8e-6; here by 1e-7 to 4e-7.
    """
    is_of_images = len(x.shape) == 4 and axis == 3 and x.dtype != tf.float64
    if gather is None and num_rows is None and is_of_images and tf.config.get_visible_devices("GPU"):
        return _by_kernel(x, scale, offset, epsilon)
    wide = x if x.dtype in (tf.float32, tf.float64) else tf.cast(x, tf.float32)
    channels = tf.shape(wide)[axis : axis + 1]
    scale = tf.ones(channels, wide.dtype) if scale is None else tf.cast(scale, wide.dtype)
    offset = tf.zeros(channels, wide.dtype) if offset is None else tf.cast(offset, wide.dtype)
    # Gradients flow through the custom gradient only; gradients of gradients also through the statistics it uses.
    if gather is None:
        count, mean, variance, inverse = _alone(wide, axis, num_rows, epsilon)
    else:
        count, mean, variance, inverse = _together(gather(_own(wide, axis, num_rows)), epsilon)

    @tf.custom_gradient
    def standardize(wide: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            sums, for_scale, for_offset = _sums(upstream, wide, mean, inverse, axis)
            if gather is not None:
                sums = sum_gradients(sums, gather, weight)
            for_wide = _for_x(upstream, wide, mean, inverse, scale, sums, count, axis, num_rows)
            return for_wide, for_scale, for_offset

        return _standardized(wide, mean, inverse, scale, offset, axis), gradient

    outputs = standardize(wide, scale, offset)
    return tf.cast(outputs, x.dtype), tf.stop_gradient(mean), tf.stop_gradient(variance)


def _by_kernel(
    x: tf.Tensor, scale: tf.Tensor | None, offset: tf.Tensor | None, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalizes images by one operation, which Grappler knows.

    Around operations that XLA compiles, it leaves each float32 convolution its own layout: of four of them with their
    gradients, 44 transposes a step instead of 4 (TensorFlow 2.21, graphs optimized for an H100).
    """
    channels = x.shape[-1]
    scale = tf.ones(channels) if scale is None else tf.cast(scale, tf.float32)
    offset = tf.zeros(channels) if offset is None else tf.cast(offset, tf.float32)
    outputs, mean, unbiased, *_ = tf.raw_ops.FusedBatchNormV3(
        x=x, scale=scale, offset=offset, mean=tf.zeros(0), variance=tf.zeros(0), epsilon=epsilon
    )
    count = tf.cast(tf.reduce_prod(tf.shape(x)[:3]), tf.float32)
    return outputs, tf.stop_gradient(mean), tf.stop_gradient(unbiased * (count - 1) / count)


# XLA makes of each of these one operation, of few passes. Values of channels have shape `(channels,)` outside.


def _total(x: tf.Tensor, axis: int) -> tf.Tensor:
    """Sums per channel, one axis after the other.

    In a long sum round-off piles up: of 61 images of 28x28 it is 1e-7 so, 4e-6 otherwise. XLA would merge the sums into
    one, number by number, but for what is added to each: 0, which it does not know, since 0 times infinity is not.
    """
    zero = 0 * tf.reshape(x, [-1])[0] if x.shape.num_elements() != 0 else 0
    for other in reversed(range(len(x.shape))):
        if other != axis and x.shape[other] != 1:
            x = tf.reduce_sum(x, other, keepdims=True) + zero
    return tf.reshape(x, [-1])


def _along(axis: int, x: tf.Tensor, *values: tf.Tensor) -> list[tf.Tensor]:
    """Reshapes values of channels so that they broadcast with `x`."""
    shape = [-1 if index == axis else 1 for index in range(len(x.shape))]
    return [tf.reshape(value, shape) for value in values]


def _statistics(x: tf.Tensor, axis: int, num_rows: int | None) -> tf.Tensor:
    """Returns count, mean and squared deviations of each channel, `(3, channels)`."""
    real = x if num_rows is None else x[:num_rows]
    count = tf.cast(tf.size(real) / tf.shape(real)[axis], x.dtype)
    mean = _total(real, axis) / tf.maximum(count, 1.0)
    squares = _total(tf.square(real - _along(axis, x, mean)[0]), axis)
    return tf.stack([tf.fill(tf.shape(mean), count), mean, squares])


def _joined(statistics: tf.Tensor, epsilon: float) -> tuple[tf.Tensor, ...]:
    """Joins statistics of all replicas, `(replicas, 3, channels)`, to count, mean, variance and 1 / deviation."""
    count, mean, squares = tf.unstack(statistics, 3, 1)
    if statistics.shape[0] == 1:
        count, mean, squares = count[0], mean[0], squares[0]
    else:
        # Chan et al. 1979: joins means and squared deviations without the cancellation of E[x^2] - E[x]^2.
        counts, means = count, mean
        count = tf.reduce_sum(counts, 0)
        mean = tf.reduce_sum(counts * means, 0) / count
        squares = tf.reduce_sum(squares + counts * tf.square(means - mean), 0)
    variance = squares / count
    return count, mean, variance, tf.math.rsqrt(variance + epsilon)


@compiled
def _alone(x: tf.Tensor, axis: int, num_rows: int | None, epsilon: float) -> tuple[tf.Tensor, ...]:
    return _joined(_statistics(x, axis, num_rows)[None], epsilon)


_own = compiled(_statistics)
_together = compiled(_joined)


@compiled
def _standardized(
    x: tf.Tensor, mean: tf.Tensor, inverse: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, axis: int
) -> tf.Tensor:
    mean, factor, offset = _along(axis, x, mean, inverse * scale, offset)
    return (x - mean) * factor + offset


@compiled
def _sums(
    upstream: tf.Tensor, x: tf.Tensor, mean: tf.Tensor, inverse: tf.Tensor, axis: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns sums of the gradient, and of it times the deviations, `(2, channels)`; gradients of scale and offset."""
    total = _total(upstream, axis)
    products = _total(upstream * (x - _along(axis, x, mean)[0]), axis)
    return tf.stack([total, products]), products * inverse, total


@compiled
def _for_x(
    upstream: tf.Tensor, x: tf.Tensor, mean: tf.Tensor, inverse: tf.Tensor, scale: tf.Tensor, sums: tf.Tensor,
    count: tf.Tensor, axis: int, num_rows: int | None,
) -> tf.Tensor:  # fmt: skip
    if len(sums.shape) == 3:  # of all replicas
        sums = tf.reduce_sum(sums, 0)
    # What is left once the mean of the outputs and their spread are held.
    for_mean, for_spread = tf.unstack(sums / count, 2)
    values = _along(axis, x, mean, inverse * scale, for_mean, for_spread * tf.square(inverse))
    mean, factor, for_mean, for_spread = values
    for_x = factor * (upstream - ((x - mean) * for_spread + for_mean))
    if num_rows is None:
        return for_x
    padding = [[0, tf.shape(x)[0] - num_rows]] + [[0, 0]] * (len(x.shape) - 1)  # which has no gradient
    return tf.pad(for_x[:num_rows], padding)
