"""Private names of TensorFlow, and its layout on GPUs. Private names of torch: tests of captured steps and of ranks."""

import pytest

from tests import helpers

# Of the methods of `BaseOptimizer` that `TFOptimizer` overrides, those that ask for TensorFlow's variables.
OVERRIDDEN = {
    "assign", "assign_add", "assign_sub", "_var_key", "_apply_weight_decay", "_backend_update_step",
    "_overwrite_model_variables_with_average_value", "_backend_increment_gradient_accumulators",
}  # fmt: skip
IN_TENSORFLOW = """
import inspect
import tensorflow as tf
import keras
from kerasdp.backends.tensorflow import private
from kerasdp.backends.tensorflow.devices import _leave_channels_last
from kerasdp.keras_compat.optimizers import _tensorflow_methods, overrides_nothing_of_tensorflow

strategy = tf.distribute.MirroredStrategy(tf.config.list_logical_devices("CPU"))
with strategy.scope():
    variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
plain = tf.Variable(1.0)
assert isinstance(variable, tf.distribute.DistributedValues)
assert private.mirrored_strategy(strategy.extended.worker_devices).extended._collective_key_base == 0
assert private.mirrored_strategy(strategy.extended.worker_devices).extended._collective_key_base == 1000
with private.read_from_first_replica([variable, plain]):
    assert variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    assert plain.aggregation == tf.VariableAggregation.NONE
assert variable.aggregation == tf.VariableAggregation.MEAN

assert "y" in inspect.signature(private.gen_math_ops.batch_mat_mul_v2).parameters
private.fold_matmuls()
one = tf.random.uniform((8, 8))
for shape in ((9, 1, 8, 8), (9, 3, 8, 8), (9, 8, 8)):
    x = tf.random.uniform(shape)
    unknown = tf.function(lambda x: x @ one, input_signature=[tf.TensorSpec([None] * len(shape))])
    products = [op for op in unknown.get_concrete_function().graph.get_operations() if op.type == "BatchMatMulV2"]
    assert products and all(op.inputs[0].shape.rank == 3 for op in products)
    for product in (x @ one, unknown(x), tf.matmul(x, tf.transpose(one)[None], transpose_b=True)):
        assert product.shape == shape and abs(product.numpy() - x.numpy() @ one.numpy()).max() < 1e-5

@tf.custom_gradient
def same(x):
    return tf.identity(x), lambda upstream: upstream

known = set(private.ops.gradient_registry.list())
graph = tf.function(same).get_concrete_function(1.0).graph
assert len(set(private.ops.gradient_registry.list()) - known) == 1
private.forget_gradients(graph)
assert set(private.ops.gradient_registry.list()) == known

given = []
tf.config.get_visible_devices = lambda kind: ["a GPU"]
tf.config.optimizer.set_experimental_options = given.append
for capability in ((7, 5), (9, 0)):  # convolutions of older GPUs do not take images as they are
    tf.config.experimental.get_device_details = lambda gpu: {"device_name": gpu, "compute_capability": capability}
    _leave_channels_last(["a GPU", "another"])
    assert given == [{"layout_optimizer": False}] * (capability == (9, 0)), capability

methods = _tensorflow_methods()
print(*sorted(methods))
assert all(own is not general for own, general in methods.values())
assert overrides_nothing_of_tensorflow(keras.optimizers.Adam())
"""


@pytest.mark.skipif("tensorflow" not in helpers.BACKENDS, reason="needs TensorFlow")
def test_names_of_tensorflow_and_of_its_optimizers(tmp_path):
    """In a process of its own: Keras of this one has another backend."""
    program = tmp_path / "names.py"
    program.write_text(IN_TENSORFLOW)
    done = helpers.run(program, backend="tensorflow")
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) >= OVERRIDDEN
