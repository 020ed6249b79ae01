"""Prints how many bytes benchmarks/traffic.py counts for a step that sums 1,000 float32 numbers and gathers 2 x 10."""

import json
import os
import pathlib
import sys

BACKEND = sys.argv[1]
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))


def torch_step():
    import torch
    import torch.distributed as dist

    def step():
        dist.all_reduce(torch.ones(1000))
        dist.all_gather([torch.empty(10), torch.empty(10)], torch.ones(10))

    return step


def jax_step():
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = Mesh(np.array(jax.devices()), ("batch",))

    def shard(x, y):
        return jax.lax.psum(x, "batch"), jax.lax.all_gather(y, "batch", tiled=True)

    split, whole = PartitionSpec("batch"), PartitionSpec()
    shards = jax.jit(
        jax.shard_map(shard, mesh=mesh, in_specs=(split, split), out_specs=(whole, whole), check_vma=False)
    )
    return lambda: jax.block_until_ready(shards(jnp.ones(2000), jnp.ones(20)))


def tensorflow_step():
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    names = ["CPU:0", "CPU:1"]
    collective = tf.distribute.MirroredStrategy(names)
    on_one = tf.distribute.MirroredStrategy(names, tf.distribute.ReductionToOneDevice())

    def sums():  # its gatherings have shapes that only running tells, which is an error
        tf.distribute.get_replica_context().all_reduce("SUM", tf.ones(900))

    def on_one_device():
        context = tf.distribute.get_replica_context()
        context.all_reduce("SUM", tf.ones(100))
        context.all_gather(tf.ones(10), 0)

    return tf.function(lambda: (collective.run(sums), on_one.run(on_one_device)))


def work(rank, port):
    import traffic

    if BACKEND == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    traffic.prepare(BACKEND)
    step = {"torch": torch_step, "jax": jax_step, "tensorflow": tensorflow_step}[BACKEND]()

    def repeat(steps):
        for _ in range(steps):
            step()

    repeat(1)
    found = traffic.bytes_a_step(BACKEND, 2, repeat)
    if rank == 0:
        print(json.dumps(found))


def main():
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    if BACKEND != "torch":
        work(0, 0)
        return
    import torch
    import torch_loop

    torch.multiprocessing.spawn(work, (torch_loop.free_port(),), 2)


if __name__ == "__main__":
    main()
