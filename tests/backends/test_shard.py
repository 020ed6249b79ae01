"""A model of which each device holds a part learns as on one device, and resumes anywhere."""

import functools

import numpy as np
import pytest

import kerasdp
from tests.helpers import BACKENDS, PROGRAMS, assert_same, result_of, run

pytestmark = pytest.mark.skipif("jax" not in BACKENDS, reason="--shard is there for jax only")
CASES = ("tied", "own", "conv", "attention", "lstm")
# In the default suite; the others are proofs.
USUAL = {("weights", 2): CASES[:2], ("optimizer", 2): ()}


@functools.cache
def trained(num_devices, shard, cases):
    return result_of(run(PROGRAMS / "sharded.py", "jax", num_devices, shard, *cases, backend="jax", timeout=800))


def outcome(num_devices, shard, case):
    """What a case gave; those of the default suite share a process, and so do the proofs."""
    cases = CASES[:2] if case in CASES[:2] else CASES[2:]
    return trained(num_devices, shard, cases)[case]


@pytest.mark.parametrize(
    ("shard", "num_devices", "case"),
    [
        pytest.param(shard, num, case, marks=[pytest.mark.proof] * (case not in USUAL.get((shard, num), ())))
        for shard in ("optimizer", "weights")
        for num in (2, 4)
        for case in CASES
    ],
)
def test_it_learns_as_on_one_device(shard, num_devices, case):
    """Losses of 20 steps in float64, an uneven batch among them; a device holds a part, and little besides."""
    expected, received = outcome(1, "none", case), outcome(num_devices, shard, case)
    np.testing.assert_allclose(received["losses"], expected["losses"], rtol=1e-9)
    assert received["diverged"] == [] and received["total"] == expected["held"]
    (weights, slots), (all_weights, all_slots) = received["held"], received["total"]
    assert slots <= (1 / num_devices + 0.03) * all_slots
    assert weights <= (1 / num_devices + 0.03) * all_weights if shard == "weights" else weights == all_weights
    text = f"a device holds {weights + slots:,} of {all_weights + all_slots:,} bytes of weights and optimizer"
    assert received["description"] == text


@pytest.mark.proof
def test_it_resumes_on_other_devices_and_backends(tmp_path):
    ways = [("torch", 1, "none"), ("jax", 2, "weights"), ("jax", 4, "optimizer"), ("tensorflow", 2, "none")]
    for epochs, (backend, num_devices, shard) in enumerate(ways, 1):
        if backend in BACKENDS:
            arguments = (backend, num_devices, shard, "resume", tmp_path, epochs)
            found = result_of(run(PROGRAMS / "sharded.py", *arguments, backend=backend))["resume"]["losses"]
            expected = outcome(1, "none", "tied")["losses"]
            assert_same(expected[:epochs] + expected[5 : 5 + epochs], found, 1e-9)


def test_the_plan_counts_the_bytes_that_a_device_holds():
    def train(runner):
        import keras

        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(10)])
        model.compile(keras.optimizers.Adam(), "mse")
        runner.fit(model, np.zeros((8, 64)), np.zeros((8, 10)), batch_size=4)

    settings = {"backend": "jax", "num_devices": 4, "dry_run": True, "verbose": 0}
    whole = kerasdp.launch(train, **settings)
    slots, weights = (kerasdp.launch(train, shard=what, **settings) for what in ("optimizer", "weights"))
    cut = 64 * 128 * 4  # the other kernel has fewer than 2,048 numbers
    rest = 3 * cut // 4
    assert slots["memory"] == whole["memory"] | {
        "gradients": whole["memory"]["gradients"] - rest,
        "optimizer": whole["memory"]["optimizer"] - 2 * rest,
    }
    assert weights["memory"] == slots["memory"] | {"weights": whole["memory"]["weights"] - rest}
    assert slots["sent_in_ring"] == whole["sent_in_ring"]
    assert weights["sent_in_ring"] == whole["sent_in_ring"] | {"weights": rest}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"backend": "torch"},
            "there for --backend=jax only. Received: torch, where each device holds all of",
        ),
        ({"backend": "jax", "hosts": "2"}, "there for the devices of one machine. Received: --hosts=2"),
        ({"backend": "jax", "strategy": "pipeline"}, "not together with --strategy=pipeline; leave out one of them"),
        ({"backend": "jax", "num_devices": 1}, "one device holds all of the model; leave it out, or use --gpus=2"),
    ],
)
def test_where_it_is_not_there(settings, words):
    with pytest.raises(kerasdp.UserError) as raised:
        kerasdp.launch(lambda runner: None, shard="weights", device="cpu", verbose=0, **settings)
    assert str(raised.value).startswith(f"--shard=weights: {words}")
