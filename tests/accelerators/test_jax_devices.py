"""Which devices jax trains on, where it has others than the CPU. What JAX says of them is made up here."""

import json

import pytest

from tests.helpers import BACKENDS, result_of, run

pytestmark = pytest.mark.skipif("jax" not in BACKENDS, reason="jax is not installed")

PROGRAM = """
import json, sys, types
import jax
from kerasdp.backends.jax import devices
from kerasdp.config import Config

case = json.loads(sys.argv[1])
found = [types.SimpleNamespace(platform=case["platform"], id=number) for number in range(4)]
jax.devices = lambda kind=None: found
jax.process_count = lambda: case.get("processes", 1)
devices.gpus_to_see = lambda count: case.get("see")
config = Config(backend="jax", **case.get("config", {}))
try:
    chosen = devices.make_devices(config)
    used = devices.start_jax(chosen, config)
    answer = {"kind": chosen.kind, "ids": [device.id for device in used]}
except Exception as error:
    answer = {"error": str(error)}
answer["precision"] = jax.config.jax_default_matmul_precision
answer["visible"] = jax.config.values["jax_cuda_visible_devices"]
print("RESULT " + json.dumps(answer))
"""


def answer_to(**case):
    return result_of(run("-c", PROGRAM, json.dumps(case)))


@pytest.mark.parametrize("platform", ["tpu", "gpu", "other"])
def test_whatever_is_not_the_cpu_is_trained_on(platform):
    """In float32 as such: the default of a TPU keeps seven bits of it, that of a GPU ten."""
    found = answer_to(platform=platform, config={"num_devices": 2})
    assert (found["kind"], found["ids"], found["precision"]) == (platform, [0, 1], "float32")


def test_the_cpu_is_no_accelerator():
    found = answer_to(platform="cpu", config={"num_devices": 2})
    assert (found["kind"], found["precision"]) == ("cpu", None)


def test_gpus_that_are_not_used_are_left_to_others():
    assert answer_to(platform="gpu", see="0,1", config={"num_devices": 2})["visible"] == "0,1"
    assert answer_to(platform="gpu")["visible"] == "all"


def test_a_pod_is_refused():
    found = answer_to(platform="tpu", processes=4)
    assert found["error"].startswith("expected the devices of one host. Received: those of 4, as in a TPU pod")
