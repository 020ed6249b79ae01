"""What the devices of a step exchange: computed from the model, and counted in a run."""

import json

import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run

# Of a message through the sockets of torch's virtual devices.
HEAD = 16


@pytest.mark.proof
@pytest.mark.parametrize(
    ("backend", "count", "model", "batch_norm"),
    [
        (name, count, *case)
        for name in BACKENDS
        for count in (2, 4)
        for case in (("convnet", "sync"), ("convnet", "replica"), ("lenet", "sync"), ("resnet18", "sync"))
    ],
)
def test_a_device_sends_what_is_computed(backend, count, model, batch_norm):
    config = {
        "num_devices": count, "batch_size": 60, "model": model, "batch_norm": batch_norm,
        "dataset": "synthetic(shape=(16,16,3), num_samples=133, num_test_samples=70)", "verbose": 0,
    }  # fmt: skip
    # What jax compiles is counted where no cache has it, which is said before jax is imported.
    warm = {} if backend == "jax" else {"backend": backend}
    found = result_of(run(PROGRAMS / "step_bytes.py", backend, json.dumps(config), **warm))
    sent = found["computed"]
    summed = sent["gradients"] + sent["metrics"] + sent["statistics"]
    if backend == "torch":  # its messages go through sockets, to each other rank by itself
        gathered = (count - 1) * (sent["gathered"] + HEAD * sent["num_gatherings"])
    else:  # benchmarks/traffic.py counts what has been gathered
        gathered = count * sent["gathered"]
    assert found["counted"] == summed + gathered
