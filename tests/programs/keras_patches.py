"""Computes what patches of Keras are for, without them and with them, and prints both beside what is right.

    python keras_patches.py

On the backend of KERAS_BACKEND. Prints, by name: [without, with, right].
"""

import contextlib
import functools
import json

import keras
import numpy as np
from keras import ops

from kerasdp.keras_compat import models, optimizers, settings
from kerasdp.keras_compat.layers import adapters_in_float64
from kerasdp.keras_compat.numerics import same_on_all_backends

BACKEND = keras.backend.backend()
NAN = "an error"


def plain(result):
    """As JSON has it."""
    if ops.is_tensor(result) or isinstance(result, keras.Variable):
        result = ops.convert_to_numpy(ops.stop_gradient(ops.convert_to_tensor(result)))
    return result.tolist() if hasattr(result, "tolist") else result


def gradient(function, x):
    """Of the sum of a function's outputs."""
    if BACKEND == "torch":
        import torch

        x = torch.tensor(x, requires_grad=True)
        return torch.autograd.grad(function(x).sum(), x)[0]
    if BACKEND == "jax":
        import jax

        return jax.grad(lambda x: function(x).sum())(x)
    import tensorflow as tf

    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(function(x))
    return tape.gradient(loss, x)


def both(context, compute, right):
    """The results without and with a patch; an error is one, too."""

    def outcome():
        try:
            return plain(compute())
        except Exception:
            return NAN

    without = outcome()
    with context():
        return [without, outcome(), plain(np.asarray(right)) if not isinstance(right, str) else right]


def copies(convolve):
    """How often the image, with channels last, is copied on torch before it is convolved."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            self.number += operation is torch.ops.aten.clone.default and args[0].numel() == 75
            return operation(*args, **(kwargs or {}))

    image, kernel = (ops.convert_to_tensor(np.ones(shape, "float32")) for shape in ((1, 5, 5, 3), (3, 3, 3, 3)))
    with Counter() as counter:
        convolve(image, kernel, data_format="channels_last")
    return counter.number


def flattened_on_host():
    """How many operations flatten the numbers of a table's rows in int32, which TensorFlow does on the host."""
    import tensorflow as tf

    @tf.function
    def step(table, rows):
        with tf.GradientTape() as tape:
            tape.watch(table)
            found = ops.take(table, rows, axis=0)
        return tf.convert_to_tensor(tape.gradient(found, table))

    graph = step.get_concrete_function(tf.ones((3, 2)), tf.zeros((4,), tf.int32)).graph
    return sum(one.type == "Reshape" and one.outputs[0].dtype == tf.int32 for one in graph.get_operations())


def numbered_in_int64():
    """Whether the gradients of a table's rows are added by numbers of int64."""
    import jax

    def step(table, rows):
        return jax.grad(lambda table: ops.take(table, rows, axis=0).sum())(table)

    with jax.enable_x64(True):
        text = jax.jit(step).lower(np.ones((3, 2), "float32"), np.zeros((4,), "int64")).as_text()
    before, scatter, after = text.partition("stablehlo.scatter")
    assert scatter
    return int("xi64>" in after)


def rows_in_bfloat16():
    """The gradient of a table in a layer that computes in bfloat16: of one row a thousand times 1."""
    layer = keras.layers.Embedding(2, 1, dtype="mixed_bfloat16")
    layer.build()

    def of(table):
        with keras.StatelessScope([(layer.embeddings, table)]):
            return ops.cast(layer(np.full((1, 1000), 1, "int32")), "float32")

    return gradient(of, np.ones((2, 1), "float32"))


def functions():
    """Those of `same_on_all_backends`: at 0, of probabilities that are clipped, where all is masked."""
    half = np.float64(0.5)

    def attention():
        query = ops.convert_to_tensor(np.ones((1, 2, 1, 4), "float32"))
        value = ops.convert_to_tensor(np.arange(8, dtype="float32").reshape(1, 2, 1, 4))
        mask = ops.convert_to_tensor(np.array([[[[True, False], [False, False]]]]))
        return ops.dot_product_attention(query, query, value, mask=mask)

    cases = {"attention": (attention, [[[[0.0, 1, 2, 3]], [[0.0, 0, 0, 0]]]])}
    if BACKEND != "tensorflow":
        cases["take in bfloat16"] = (rows_in_bfloat16, [[0.0], [1000.0]])
    points = np.float32([0, 1, 0, 0, 2, 1]).reshape(1, 1, 6, 1)
    cubic = lambda: ops.image.resize(points, (1, 13), "bicubic", data_format="channels_last")[0, 0, 2:5, 0]  # noqa: E731
    if BACKEND != "jax":  # whose numbers these are
        right = [0.73391, 0.96902, 0.45593]
        cases["cubic resize"] = (lambda: np.round(ops.convert_to_numpy(cubic()).astype(float), 5), right)
    if BACKEND == "torch":
        rows = np.arange(16, dtype="float32").reshape(1, 4, 4, 1)
        cases["average_pool"] = (lambda: ops.average_pool(rows, 3, 2, "same"), [[[[5], [6.5]], [[11], [12.5]]]])
        cases["pad"] = (lambda: ops.pad(np.arange(2.0), ((2, 0),), mode="symmetric"), [1.0, 0.0, 0.0, 1.0])
        one_of_three = np.full((1, 2, 2, 3), 1 / 3, "float32")
        target = np.zeros((1, 2, 2), "int32")
        cases["classes of pixels"] = (
            lambda: ops.round(
                gradient(lambda p: ops.sparse_categorical_crossentropy(ops.convert_to_tensor(target), p), one_of_three)
            ),
            np.float32([-2, 1, 1] * 4).reshape(1, 2, 2, 3),
        )
        cases["copies of a convolution's image"] = (functools.partial(copies, ops.conv), 0)
        cases["copies of its transpose's"] = (functools.partial(copies, ops.conv_transpose), 0)
        return cases
    cases["take"] = ({"jax": numbered_in_int64, "tensorflow": flattened_on_host}[BACKEND], 0)
    if BACKEND == "jax":
        import jax

        def logits_made_one_hot():
            of = lambda x: ops.sparse_categorical_crossentropy(np.zeros((2,), "int32"), x, from_logits=True)  # noqa: E731
            return int("eq" in str(jax.make_jaxpr(of)(np.ones((2, 5), "float32"))).split())

        cases |= {
            "classes by place": (logits_made_one_hot, 0),
            "absolute": (lambda: gradient(ops.absolute, np.float32([0])), [0.0]),
            "abs": (lambda: gradient(ops.abs, np.float32([0])), [0.0]),
            "leaky_relu": (lambda: gradient(ops.leaky_relu, np.float32([0])), [np.float32(0.2)]),
        }
        return cases

    def of_softmax(loss):
        """Of a probability that is clipped, the gradient is 0: Keras looks behind the softmax."""
        return lambda: gradient(lambda x: loss(ops.softmax(x)), np.float32([[-50, 50]]))

    def products_by_sample():
        """Those of a kernel, in the forward and the backward pass."""
        import tensorflow as tf

        x, kernel = tf.ones((7, 2, 3)), tf.ones((3, 2, 2))
        graph = tf.function(lambda: tf.gradients(ops.einsum("abc,cde->abde", x, kernel), [x, kernel]))
        return sum("BatchMatMul" in node.type for node in graph.get_concrete_function().graph.get_operations())

    one_hot, classes = ops.convert_to_tensor(np.float32([[1, 0]])), ops.convert_to_tensor(np.int32([0]))
    binary = ops.convert_to_tensor(np.float32([1]))
    cases |= {
        "categorical_crossentropy": (of_softmax(lambda p: ops.categorical_crossentropy(one_hot, p)), [[0.0, 0]]),
        "sparse_categorical_crossentropy": (
            of_softmax(lambda p: ops.sparse_categorical_crossentropy(classes, p)), [[0.0, 0]],
        ),
        "binary_crossentropy": (
            lambda: gradient(lambda x: ops.binary_crossentropy(binary, ops.sigmoid(x)), np.float32([-50])), [0.0],
        ),
        "einsum": (products_by_sample, 0),
        "gelu": (
            lambda: ops.gelu(ops.convert_to_tensor(half)),
            0.25 * (1 + np.tanh(np.sqrt(2 / np.pi) * (0.5 + 0.044715 * 0.125))),
        ),
        "leaky_relu": (lambda: ops.leaky_relu(ops.convert_to_tensor(-half)), -0.1),
        "resize": (
            lambda: ops.image.resize(np.float64([0.1, 0.2]).reshape(1, 2, 1, 1), (3, 1), data_format="channels_last"),
            np.float64([0.1, 0.15, 0.2]).reshape(1, 3, 1, 1),
        ),
    }  # fmt: skip
    return cases


def on_jax():
    """The value of another host goes through `put`."""
    from keras.src.backend.jax import distribution_lib

    class Elsewhere:
        is_fully_addressable = False

    @contextlib.contextmanager
    def placed():
        settings.place_variables_by(lambda array, sharding: array + 100)  # of an earlier run, which the next one ends
        settings.place_variables_by(lambda array, sharding: array + 1)
        yield

    return {"place_variables_by": both(placed, lambda: distribution_lib.distribute_tensor(1.0, Elsewhere()), 2.0)}


def on_tensorflow():
    """What belongs to `tf.distribute`, to its variables, and to its conversion of numbers."""
    import tensorflow as tf
    from keras.src.backend.tensorflow import trainer

    from kerasdp.backends.tensorflow.gradients import clipping_means
    from kerasdp.backends.tensorflow.train_step import updating_at_once

    strategy = tf.distribute.MirroredStrategy(tf.config.list_logical_devices("CPU"))
    with strategy.scope():
        variable = keras.Variable(np.zeros(2, "float32"))
        mirrored = keras.Variable(2)
        optimizer, loss = keras.optimizers.SGD(1.0), keras.losses.MeanSquaredError()
        optimizer.build([variable])

    def reduced():
        variable.assign([0, 0])
        strategy.run(tf.function(lambda: optimizer.apply([tf.constant([1.0, 2.0])], [variable])))
        return variable

    in_replica = [contextlib.nullcontext]

    def means():
        def of_replica():
            with in_replica[-1]():
                return loss(tf.ones((2, 1)), tf.zeros((2, 1)))

        return strategy.experimental_local_results(strategy.run(tf.function(of_replica)))[0]

    @contextlib.contextmanager
    def whole():
        in_replica.append(models.losses_of_whole_batch)
        yield

    own = keras.Variable(np.zeros(2, "float32"))
    updating = keras.optimizers.SGD(1.0)
    updating.build([own])

    def values():
        with keras.StatelessScope([(own, tf.constant([5.0, 5.0]))]) as scope:
            updating.apply([tf.constant([1.0, 1.0])], [own])
        return [*plain(scope.get_current_value(own)), *plain(own)]

    def in_rows(optimizer):
        """A token that occurs twice: Adagrad takes the square of the sum, not the sum of squares."""
        table = keras.Variable(np.zeros((2, 1), "float32"))
        optimizer.build([table])
        rows = tf.IndexedSlices(tf.ones((2, 1)), tf.constant([0, 0]), tf.constant([2, 1]))
        optimizer.apply([rows], [table])
        return ops.round(optimizer.variables[2] * 100)

    @contextlib.contextmanager
    def numbers():
        models.numbers_of_mirrored_variables()
        yield

    @contextlib.contextmanager
    def exact():
        settings.set_precision("float64")
        assert trainer.tf is tf  # which converts no numbers
        yield
        settings.set_precision("float32")

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    return {
        "no_gradient_sum": both(optimizers.no_gradient_sum, reduced, [-1.0, -2]),
        "losses_of_whole_batch": both(whole, means, 1.0),
        "numbers_of_mirrored_variables": both(numbers, lambda: float(optimizer.learning_rate) + int(mirrored), 3.0),
        "updating_values": both(lambda: optimizers.updating_values(updating), values, [4.0, 4, 0, 0]),
        "updating_at_once": both(updating_at_once, lambda: in_rows(keras.optimizers.Adagrad(1.0)), [[410.0], [10.0]]),
        "set_precision": both(exact, lambda: ops.cast(0.1, "float64"), 0.1),
        "clipping_means": both(
            lambda: clipping_means(lambda gradients: [gradient / 2 for gradient in gradients]),
            lambda: tf.clip_by_global_norm([tf.constant([3.0, 4.0])], 100.0)[1],
            2.5,
        ),
    }


def adapters():
    """Bits of LoRA's numbers beside a kernel of float64."""

    def bits():
        layer = keras.layers.Dense(3, dtype="float64", lora_rank=2)
        layer.build((None, 4))
        return int(layer.lora_kernel_a.dtype[5:])

    return {"bits of adapters": both(adapters_in_float64, bits, 64)}


def outcomes():
    """Of all patches, by name: without, with, what is right."""
    found = {"jax": on_jax, "tensorflow": on_tensorflow, "torch": dict}[BACKEND]() | adapters()
    return found | {name: both(same_on_all_backends, *case) for name, case in functions().items()}


if __name__ == "__main__":
    if BACKEND == "tensorflow":
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    print("RESULT", json.dumps(outcomes()))
