"""A model of which each device holds a part learns as on one device, and resumes anywhere."""

import numpy as np
import pytest

import kerasdp
from tests.helpers import BACKENDS, PROGRAMS, assert_same, result_of, results, run

CASES = {
    "jax": ("tied", "own", "optimizers", "frozen", "conv", "attention", "lstm"),
    "torch": ("tied", "optimizers", "frozen", "conv", "attention", "lstm"),
}
SHARDS = {
    "jax": ("optimizer", "weights"),
    "torch": ("optimizer", "weights", "weights+compile=on"),
}
COMPILED = ("tied", "attention")  # of the others compiling takes minutes


def cases_of(backend, shard):
    return COMPILED if shard.endswith("compile=on") else CASES[backend]


def outcome(backend, num_devices, shard, case):
    """What a case gave; those of the default suite share a process, and so do the proofs."""
    together = ("tied",) if case == "tied" else tuple(each for each in cases_of(backend, shard) if each != "tied")
    return results("sharded.py", backend, num_devices, shard, *together)[case]


@pytest.mark.short("torch-weights-2-tied")
@pytest.mark.parametrize(
    ("backend", "shard", "num_devices", "case"),
    [
        (backend, what, num, case)
        for backend in CASES
        if backend in BACKENDS
        for what in SHARDS[backend]
        for num in (2, 4)
        for case in cases_of(backend, what)
    ],
)
def test_it_learns_as_on_one_device(backend, shard, num_devices, case):
    """Losses of 20 steps in float64, an uneven batch among them; a device holds a part, and little besides."""
    expected, received = outcome(backend, 1, "none", case), outcome(backend, num_devices, shard, case)
    # Sums that are 0 but for round-off are among the losses of `frozen`.
    np.testing.assert_allclose(received["losses"], expected["losses"], rtol=1e-9, atol=1e-11 * (case == "frozen"))
    if case in ("optimizers", "frozen"):
        return
    assert received["diverged"] == [] and received["total"] == expected["total"]
    (weights, slots), (all_weights, all_slots) = received["held"], received["total"]
    assert slots <= (1 / num_devices + 0.03) * all_slots
    is_cut = shard.startswith("weights")
    assert weights <= (1 / num_devices + 0.03) * all_weights if is_cut else weights == all_weights
    if backend == "torch":  # nobody else holds the rest
        assert received["living"] <= weights + slots + 0.01 * (all_weights + all_slots)
    text = f"a device holds {weights + slots:,} of {all_weights + all_slots:,} bytes of weights and optimizer"
    assert received["description"] == text


@pytest.mark.proof
@pytest.mark.skipif("torch" not in BACKENDS, reason="torch is not installed")
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_what_a_step_sends_on_torch(shard):
    """Twice the weights for the optimizer's parts, three times for those of weights; no whole gradient of a kernel."""
    found = result_of(run(PROGRAMS / "sharded_graph.py", shard, "attention", backend="torch", timeout=800))
    cut = found["bytes"]["all_to_all_single"]  # of each, the half goes to the other rank
    assert 0.95 * found["weights"] <= cut <= found["weights"]
    gathered = found["bytes"]["all_gather_into_tensor"]
    if shard == "optimizer":
        assert gathered == cut / 2 and found["counts"]["all_gather_into_tensor"] == 1
    else:
        assert cut / 2 < gathered <= cut  # the last one is there yet when the backward pass begins
    assert found["bytes"]["all_reduce"] <= 0.05 * found["weights"]


@pytest.mark.proof
def test_it_resumes_on_other_devices_and_backends(tmp_path):
    ways = [("torch", 2, "weights"), ("jax", 2, "weights"), ("torch", 4, "optimizer"), ("jax", 4, "optimizer")]
    for epochs, (backend, num_devices, shard) in enumerate(ways, 1):
        if backend in BACKENDS:
            arguments = (backend, num_devices, shard, "resume", tmp_path, epochs)
            found = result_of(run(PROGRAMS / "sharded.py", *arguments, backend=backend))["resume"]
            expected = outcome(backend, 1, "none", "tied")["losses"]
            assert_same(expected[:epochs] + expected[5 : 5 + epochs], found["losses"], 1e-9)
            if backend == "torch":  # a checkpoint takes one whole after the other: the largest is the table
                weights, slots = found["total"]
                held = slots / num_devices + weights / (num_devices if shard == "weights" else 1)
                assert found["living"] <= 1.03 * held + 2 * 64 * 48 * 8


# By case, of which each is a model that cannot train in parts on torch.
REFUSALS = {
    "muon": "Muon may need whole weights",
    "own optimizer": "SignSGD may need whole weights",
    "reading": "cannot be read or changed between two steps, because it is sharded over the devices",
    "own": "expected the steps of Keras' fit, evaluate and predict",
}


@pytest.mark.proof
@pytest.mark.skipif("torch" not in BACKENDS, reason="torch is not installed")
@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused(case):
    def train(runner):
        import keras

        class Own(keras.Sequential):
            def train_step(self, data):
                return super().train_step(data)

        def read(batch, logs):
            return [keras.ops.convert_to_numpy(each) for each in (*model.variables, *model.optimizer.variables)]

        class SignSGD(keras.optimizers.SGD):
            pass

        kind = Own if case == "own" else keras.Sequential
        optimizer = {"muon": "muon", "own optimizer": SignSGD()}.get(case, "adam")
        with runner.scope():
            model = kind([keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(64)])
            model.compile(optimizer, "mse")
        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=read)] if case == "reading" else []
        runner.fit(model, np.zeros((8, 64)), np.zeros((8, 64)), batch_size=4, callbacks=callbacks)

    settings = {"backend": "torch", "num_devices": 2, "device": "cpu", "check": "off", "verbose": 0}
    with pytest.raises(kerasdp.RunError, match=REFUSALS[case]):
        kerasdp.launch(train, shard="weights", **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "jax", "strategy": "tensor"}, "does not work with --strategy=tensor; leave out one of them"),
        ({"backend": "jax", "num_devices": 1}, "expected several devices. Received: 1; leave it out, or use --gpus=2"),
    ],
)
def test_where_it_is_not_there(settings, words):
    settings = {"shard": "weights", "device": "cpu", "verbose": 0} | settings
    with pytest.raises(kerasdp.UserError) as raised:
        kerasdp.launch(lambda runner: None, **settings)
    assert str(raised.value).startswith(f"--shard={settings['shard']}: {words}")
