"""Compiles for devices that are not there: XLA's compilers for GPUs and TPUs come with the wheels.

pip install --no-deps --target DIR libtpu==0.0.42 jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2; PYTHONPATH=DIR
"""

import functools
import os
import re

import jax
import numpy as np
from jax.experimental import topologies

# What XLA wants to know of an H100 (SXM), xla/stream_executor/device_description.proto.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H100"
"""
# libtpu asks the machine what it is, unless it is told.
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
}  # fmt: skip


@functools.cache
def devices_of(platform):
    """Returns four H100, or four TPU v5e, for which XLA can compile."""
    if platform == "tpu":
        return topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu").devices
    shape = "1x1x4"  # slices, hosts, GPUs
    return topologies.get_topology_desc(shape, platform="cuda", topology=shape, target_config=H100).devices


def compiled_for(platform, jitted, arguments, donated):
    """Compiles a program that was made for other devices, with its shardings and donations."""
    exported = jax.export.export(jitted, platforms=(platform,))(*arguments)
    found = np.array(devices_of(platform)[: exported.nr_devices])

    def there(leaf, aval):
        """Describes an argument on those devices."""
        old = getattr(leaf, "sharding", None)
        if old is None:  # a number
            mesh, spec = jax.sharding.Mesh(found, ("batch",)), jax.sharding.PartitionSpec()
        else:
            mesh, spec = jax.sharding.Mesh(found.reshape(old.mesh.devices.shape), old.mesh.axis_names), old.spec
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    leaves = [there(*pair) for pair in zip(jax.tree.leaves(arguments), exported.in_avals, strict=True)]
    arguments, _ = jax.tree.unflatten(exported.in_tree, leaves)
    return jax.jit(lambda *given: exported.call(*given), donate_argnums=donated).lower(*arguments).compile()


def algorithms(text):
    """Returns what computes products and convolutions in a program that was compiled for a GPU."""
    return sorted(set(re.findall(r'custom_call_target="([^"]+)"', text)))
