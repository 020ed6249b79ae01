"""Starts jax as a run does, in a process of its own, and prints what became of its options.

python jax_devices.py limit | kept_for_the_cpu | deterministic | late | precisions | as_tpus | hosts NUMBER PORT
"""

import json
import os
import sys

import jax

from kerasdp.backends.jax import devices
from kerasdp.config import Config
from kerasdp.errors import RunError, say_flags
from kerasdp.processes import hardware
from kerasdp.processes.devices import AlreadyStartedError, Devices


def error_of(function, *arguments):
    try:
        return str(function(*arguments))
    except (RunError, AlreadyStartedError) as error:
        return f"{type(error).__name__}: {error}"


def limit():
    """What jax may see, before it starts, for each number of devices, on a machine whose driver has four GPUs."""
    seen, devices.num_gpus = {}, lambda: 4
    hardware.num_gpus = devices.num_gpus
    for count in (1, 2, 4, 5, None):
        jax.config.update("jax_cuda_visible_devices", "all")
        devices._choose_platforms(Config(num_devices=count))
        seen[str(count)] = jax.config.values["jax_cuda_visible_devices"]
    jax.config.update("jax_cuda_visible_devices", "2,3")  # the user's choice
    devices._choose_platforms(Config(num_devices=1))
    seen["chosen"] = jax.config.values["jax_cuda_visible_devices"]
    jax.config.update("jax_cuda_visible_devices", "all")
    seen["started before"] = devices.has_started()
    seen["devices"] = error_of(devices.make_devices, Config(backend="jax", num_devices=2))
    seen["of the run"] = jax.config.values["jax_cuda_visible_devices"]
    return seen


def kept_for_the_cpu():
    """A run on the CPU, and then one in the same process that may have GPUs."""
    first = error_of(devices.make_devices, Config(backend="jax", device="cpu"))
    return [first, error_of(devices.make_devices, Config(backend="jax"))]


def deterministic():
    """The flags before and after, and the sum that jax then computes: XLA ends the process at a flag that it lacks."""
    import numpy as np

    devices.make_deterministic()
    devices.make_deterministic()
    devices.make_devices(Config(backend="jax", num_devices=1))
    return [os.environ["XLA_FLAGS"], float(jax.jit(lambda x: x.sum())(np.ones(5)))]


def late():
    """Once jax has started."""
    jax.devices()
    return [error_of(devices.make_deterministic), os.environ.get("XLA_FLAGS", "")]


def precisions():
    """What `start_jax` sets, by kind and precision; the devices are the CPU's under another name."""
    cpu = jax.devices()
    devices._devices_of = lambda kind: cpu
    found = {}
    for kind in ("cpu", "gpu", "tpu"):
        for choice in ("auto", "float32", "tf32", "bfloat16"):
            jax.config.update("jax_default_matmul_precision", None)
            devices.start_jax(Devices(kind=kind, count=1), Config(backend="jax", precision=choice))
            found[f"{kind} {choice}"] = str(jax.config.values["jax_default_matmul_precision"])
    exact = Config(backend="jax", deterministic=True)
    devices.set_precision_of_products("gpu", exact)
    found["deterministic"] = str(jax.config.values["jax_default_matmul_precision"])
    return found


def as_tpus():
    """A run on two virtual CPU devices that it takes for TPUs."""
    import numpy as np

    import kerasdp

    def train(runner):
        import keras

        keras.utils.clear_session()
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        runner.fit(model, np.ones((8, 4), "float32"), np.zeros((8, 2)), batch_size=4)
        return {
            "devices": str(runner.devices), "kind": runner.devices.kind,
            "flash attention": keras.config.is_flash_attention_enabled(),
            "precision": str(jax.config.values["jax_default_matmul_precision"]),
        }  # fmt: skip

    jax.config.update("jax_num_cpu_devices", 2)
    cpus = jax.devices("cpu")
    devices._devices_of = lambda kind: cpus
    devices.make_devices = lambda config, cluster: Devices(kind="tpu", count=2)
    return kerasdp.launch(train, backend="jax", num_devices=2, verbose=0)


def hosts():
    """One of two processes that a script has joined by itself."""
    from kerasdp.backends.jax.processes import find_cluster

    jax.distributed.initialize(f"localhost:{sys.argv[3]}", num_processes=2, process_id=int(sys.argv[2]))
    cluster = find_cluster()
    return [
        cluster.source,
        cluster.process,
        error_of(devices.make_devices, Config(backend="jax", device="cpu"), cluster),
    ]


if __name__ == "__main__":
    say_flags()
    print("RESULT " + json.dumps(globals()[sys.argv[1]]()))
