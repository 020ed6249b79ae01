"""Layers that compute the same on every backend and number of devices.

A run uses these layers instead of the layers of Keras: see `kerasdp.portable`.

Example:
    ```python
    import keras
    import kerasdp

    model = keras.Sequential([
        keras.Input((8,)),
        keras.layers.Dense(16),
        kerasdp.layers.BatchNormalization(momentum=0.9),
        keras.layers.Dense(1),
    ])
    ```
"""

import importlib
from typing import Any

import keras
from keras import ops

from kerasdp.data.sampling import replica_rows
from kerasdp.keras_compat.saving import saved_as_keras
from kerasdp.same import replica_context
from kerasdp.same.replica_context import RowOrder

__all__ = ["BatchNormalization"]


@saved_as_keras
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` with the same statistics on every backend.

    The statistics are computed over the global batch, or over the shard of each replica. In Keras, the choice depends
    on the backend: jax uses the global batch, torch and tensorflow use the shard of each replica. Keras 3.15 raises an
    error for `synchronized=True` on torch and jax. The arguments, the weights and the config of the layer are the same
    as in Keras.

    Attributes:
        statistics: `"sync"`: statistics over the global batch. Gradients flow through these statistics. `"replica"`:
            statistics over the shard of each replica. The moving statistics are then the mean over the replicas,
            weighted by rows, and the same on all replicas. A run sets this attribute to `batch_norm` of its
            `kerasdp.Config`.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        def train(runner):
            layers = [keras.Input((8,)), kerasdp.layers.BatchNormalization(), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
            model.fit(np.random.rand(64, 8), np.random.rand(64, 1))
            print(model.layers[0].statistics)  # "replica"

        kerasdp.launch(train, num_devices=2, device="cpu", batch_norm="replica")
        ```
    """

    statistics = "sync"

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalizes `inputs` like `keras.layers.BatchNormalization`."""
        context = replica_context.current()
        if context is None or context.rows is None or not training:
            return self._call(inputs, training, mask, context)
        order = context.row_order(("statistics", id(self)), inputs, f"layer {self.name}")
        if context.is_trial:
            return super().call(inputs, training=False, mask=mask)
        context_of_inputs = context.of_tensor(order, inputs.shape[0])
        # The positions of the rows matter only for padding.
        if order is not RowOrder.LAST or context.num_rows == context.rows:
            return self._call(inputs, training, mask, context_of_inputs)
        inputs, mask = (None if each is None else order.rows_first(each, context.rows) for each in (inputs, mask))
        return order.rows_back(self._call(inputs, training, mask, context_of_inputs), context.rows)

    def _call(
        self, inputs: Any, training: bool | None, mask: Any, context: replica_context.ReplicaContext | None
    ) -> Any:
        whole_batch = context is None or (context.gather is None and self.statistics == "sync")
        is_plain = training and self.trainable and mask is None and not self.renorm
        if is_plain and self._has_fused_kernel(context):
            return self._fused(inputs, context)
        # Keras' code is correct for a whole batch, but inaccurate on TensorFlow: see `_sum`.
        as_keras = whole_batch and (keras.backend.backend() != "tensorflow" or self.renorm)
        if as_keras or not (training and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        if self.renorm:
            raise ValueError("batch renormalization on several devices is not supported; set renorm=False")
        x = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        mean, variance = self._statistics(x, mask, None if whole_batch else context)
        scale = ops.rsqrt(variance + self.epsilon)
        if self.scale:
            scale = scale * self._along_channels(ops.cast(self.gamma, x.dtype))
        outputs = (x - mean) * scale
        if self.center:
            outputs = outputs + self._along_channels(ops.cast(self.beta, x.dtype))
        return ops.cast(outputs, self.compute_dtype)

    def _has_fused_kernel(self, context: replica_context.ReplicaContext | None) -> bool:
        """Returns whether the backend has a fused kernel for these statistics. On jax, XLA fuses the code of Keras."""
        if keras.backend.backend() == "jax":
            return False
        # Statistics of a replica must leave out its padding. Only the code without a fused kernel does so.
        return context is None or self.statistics == "sync" or _is_without_padding(context)

    def _fused(self, inputs: Any, context: replica_context.ReplicaContext | None) -> Any:
        scale, offset = self.gamma.value if self.scale else None, self.beta.value if self.center else None
        axis = self.axis % len(inputs.shape)
        if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(inputs.dtype)):
            inputs = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        together: tuple[Any, ...] = ()
        if context is not None and self.statistics == "sync":
            num_rows = None if context.num_rows == context.rows else context.num_rows
            together = num_rows, context.gather, context.weight
        kernel = importlib.import_module(f"kerasdp.backends.{keras.backend.backend()}.batch_norm")
        outputs, mean, variance = kernel.normalize(inputs, axis, scale, offset, self.epsilon, *together)
        if context is None or together:
            self.move(mean, variance)
        else:
            count = ops.broadcast_to(self._count(inputs, mean.dtype), ops.shape(mean))
            self._move_by_all(count, mean, count * variance, context)
        return ops.cast(outputs, self.compute_dtype)

    def move(self, mean: Any, variance: Any) -> None:
        """Updates the moving statistics with the mean and the variance of a batch, each of shape `(channels,)`."""
        for variable, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            variable.assign(variable * self.momentum + ops.cast(value, variable.dtype) * (1.0 - self.momentum))

    def _move_by_all(self, count: Any, mean: Any, squares: Any, context: replica_context.ReplicaContext) -> None:
        """Updates the moving statistics with the mean of the statistics over the replicas.

        If `context.moving` is a list, the update is done at the end of the pass.
        """
        sums = ops.stop_gradient(ops.stack([count, count * mean, squares]))
        if context.moving is not None:
            context.moving.append((self, sums))
        elif context.gather is not None:  # a user-defined step may read them
            move_together([(self, sums)], ops.reshape(ops.sum(context.gather(sums), axis=0), (-1,)))

    def _statistics(self, x: Any, mask: Any, context: replica_context.ReplicaContext | None) -> tuple[Any, Any]:
        """Updates the moving statistics; returns the mean and the variance to normalize with.

        The returned tensors broadcast with `x`.
        """
        weights = None if mask is None else ops.cast(ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(x)), x.dtype)
        if context is None:
            count, mean, squares = self._sums(x, weights)
            variance = squares / ops.maximum(count, 1.0)
            self.move(mean, variance)
            return self._along_channels(mean), self._along_channels(variance)
        if context.gather is None:
            return self._statistics_of_each(x, weights, context.num_replicas)
        own = self._sums(x[: context.num_rows], None if weights is None else weights[: context.num_rows])
        if self.statistics == "replica":
            self._move_by_all(*own, context)
            return self._along_channels(own[1]), self._along_channels(own[2] / ops.maximum(own[0], 1.0))
        # One collective for the three: its latency is what synchronized batch norm costs.
        counts, means, squares = ops.unstack(context.gather(ops.stack(own)), 3, axis=1)
        # Chan et al. 1979: joins means and squared deviations without the cancellation of E[x^2] - E[x]^2.
        total = ops.sum(counts, axis=0)
        mean = ops.sum(counts * means, axis=0) / total
        variance = ops.sum(squares + counts * ops.square(means - mean), axis=0) / total
        self.move(mean, variance)
        return self._along_channels(mean), self._along_channels(variance)

    def _statistics_of_each(self, x: Any, weights: Any, num_replicas: int) -> tuple[Any, Any]:
        """Computes separate statistics for each replica, in one program that has the rows of all replicas.

        Updates the moving statistics; returns the mean and the variance for each row of `x`.
        """
        rows = x.shape[0]
        size = replica_rows(rows, num_replicas)
        if missing := size * num_replicas - rows:
            widths = [(0, missing)] + [(0, 0)] * (len(x.shape) - 1)
            weights = ops.pad(ops.ones_like(x) if weights is None else weights, widths)
            x = ops.pad(x, widths)
        # With a new axis, each device keeps its rows; slices would move between devices.
        parts = tuple(
            None if each is None else ops.reshape(each, (num_replicas, size, *x.shape[1:])) for each in (x, weights)
        )
        counts, means, squares = ops.vectorized_map(lambda part: self._sums(*part), parts)
        total = ops.sum(counts, axis=0)
        self.move(ops.sum(counts * means, axis=0) / total, ops.sum(squares, axis=0) / total)

        def for_each_row(values: Any) -> Any:
            """Repeats the value of each replica for each of its rows."""
            shape = ops.shape(self._along_channels(values[0]))[1:]
            values = ops.reshape(values, (num_replicas, 1, *shape))
            values = ops.broadcast_to(values, (num_replicas, size, *shape))
            return ops.reshape(values, (num_replicas * size, *shape))[:rows]

        return for_each_row(means), for_each_row(squares / ops.maximum(counts, 1.0))

    def _sums(self, x: Any, weights: Any) -> tuple[Any, Any, Any]:
        """Returns count, mean and sum of squared deviations per channel, each of shape `(channels,)`.

        If `x` is empty, all values are 0.
        """

        def total(values: Any) -> Any:
            return self._sum(values if weights is None else weights * values)

        if weights is None:
            count = ops.broadcast_to(self._count(x, x.dtype), (x.shape[self.axis],))
        else:
            count = self._sum(weights)
        mean = total(x) / ops.maximum(count, 1.0)
        return count, mean, total(ops.square(x - self._along_channels(mean)))

    def _count(self, x: Any, dtype: Any) -> Any:
        """Returns the number of values of `x` in each channel."""
        count = ops.cast(1.0, dtype)
        for axis in self._reduction_axes:
            count = count * ops.cast(ops.shape(x)[axis], dtype)
        return count

    def _sum(self, x: Any) -> Any:
        """Returns the sum per channel, by summing one axis after the other.

        TensorFlow (2.21, on the CPU) adds the values of a sum one by one. Over 61 images of 28x28, the variance is then
        wrong by 3e-4. Short sums accumulate less rounding error: the variance is wrong by 2e-7, in half the time.
        """
        for axis in sorted(self._reduction_axes, reverse=True):
            x = ops.sum(x, axis=axis)
        return x

    def _along_channels(self, values: Any) -> Any:
        """Reshapes values of shape `(channels,)` so that they broadcast with the inputs."""
        shape = [1] * (len(self._reduction_axes) + 1)
        shape[self.axis] = -1
        return ops.reshape(values, shape)


def _is_without_padding(context: replica_context.ReplicaContext) -> bool:
    return (context.moving is not None or context.gather is not None) and context.num_rows == context.rows


def pack_moving(moving: list[tuple[Any, Any]]) -> Any:
    """Packs the tensors of `ReplicaContext.moving` into one flat tensor, which is then summed over the replicas."""
    dtype = keras.backend.result_type(*(sums.dtype for _, sums in moving))
    return ops.concatenate([ops.reshape(ops.cast(sums, dtype), (-1,)) for _, sums in moving])


def move_together(moving: list[tuple[Any, Any]], packed: Any) -> None:
    """Updates the moving statistics of the layers in `moving`.

    Args:
        moving: see `ReplicaContext`.
        packed: the result of `pack_moving`, summed over the replicas.
    """
    first = 0
    for layer, sums in moving:
        size = 3 * sums.shape[1]
        own = ops.reshape(packed[first : first + size], (3, -1))
        count = ops.maximum(own[0], 1.0)
        layer.move(own[1] / count, own[2] / count)
        first += size
