"""On GPUs TensorFlow's convolutions keep one layout around batch norm."""

import collections

import pytest

from tests.helpers import BACKENDS

pytestmark = pytest.mark.skipif("tensorflow" not in BACKENDS, reason="tensorflow is not installed")

PLACE = "/job:localhost/replica:0/task:0/device:GPU:0"


def optimized(dtype, *, layout=True, gather=None):
    """Counts the operations that Grappler leaves, for an H100, of four convolutions with batch norm and gradients.

    `layout`: whether it may choose that of images. `gather`: as in `normalize`.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2, rewriter_config_pb2
    from tensorflow.python.grappler import cluster, tf_optimizer

    from kerasdp.backends.tensorflow.batch_norm import normalize

    graph = tf.Graph()
    with graph.as_default(), tf.device(PLACE):
        x = tf.compat.v1.placeholder(dtype, (256, 28, 28, 64))
        kernels = [tf.compat.v1.placeholder(dtype, (3, 3, 64, 64)) for _ in range(4)]
        for kernel in kernels:
            x = tf.nn.conv2d(x, kernel, 1, "SAME")
            x, _, _ = normalize(x, 3, tf.ones(64), tf.zeros(64), 1e-3, gather=gather)
            x = tf.nn.relu(x)
        loss = tf.reduce_mean(tf.square(tf.cast(x, tf.float32)))
        wanted = [tf.identity(each) for each in (loss, *tf.gradients(loss, kernels))]
    whole = meta_graph_pb2.MetaGraphDef(graph_def=graph.as_graph_def(add_shapes=True))
    whole.collection_def["train_op"].node_list.value.extend(each.op.name for each in wanted)
    gpu = device_properties_pb2.DeviceProperties(
        type="GPU", vendor="NVIDIA", model="H100", frequency=1980, num_cores=132, memory_size=80 << 30,
        bandwidth=3352320000, environment={"architecture": "9.0"},
    )  # fmt: skip
    cpu = device_properties_pb2.DeviceProperties(type="CPU", frequency=2000, num_cores=8)
    named = [(PLACE, gpu), (PLACE.replace("GPU", "CPU"), cpu)]
    devices = [device_properties_pb2.NamedDevice(name=name, properties=properties) for name, properties in named]
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.min_graph_nodes = -1
    options.layout_optimizer = getattr(rewriter_config_pb2.RewriterConfig, "ON" if layout else "OFF")
    if layout:
        options.optimizers.append("layout")  # and nothing else
    machine = cluster.Cluster(
        allow_soft_placement=True, disable_detailed_stats=True, disable_timeline=True, devices=devices
    )
    found = tf_optimizer.OptimizeGraph(config, whole, cluster=machine, verbose=False)
    return collections.Counter(node.op for node in found.node)


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_with_statistics_of_all_rows_images_stay_as_they_are(capability, monkeypatch):
    """Where convolutions take them so, which older GPUs' do not: there each would transpose by itself."""
    import tensorflow as tf

    from kerasdp.backends.tensorflow.devices import _leave_channels_last

    given = []
    details = {"device_name": "a GPU", "compute_capability": capability}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details)
    monkeypatch.setattr(tf.config.optimizer, "set_experimental_options", given.append)
    _leave_channels_last(["a GPU", "another"])
    assert given == ([{"layout_optimizer": False}] if capability == (9, 0) else [])
    gather = lambda statistics: tf.stack([statistics, statistics])  # noqa: E731
    found = optimized(tf.float32, layout=not given, gather=gather)
    assert found["Transpose"] == (0 if given else 44) and found["Conv2D"] == 4
