"""The promise: a batch that is worked on in micro-batches teaches what it teaches whole."""

import json
import re

import pytest

from tests.helpers import PROGRAMS, all_but, assert_alike, result_of, run


def trained(backend, cases):
    """What became of each case, by its number of devices: the most first, and with tensorflow in its own process."""
    counts = [case.setdefault("num_devices", 1) for case in cases]
    order = sorted(range(len(cases)), key=lambda place: -counts[place])
    groups = [order]
    if backend == "tensorflow":
        groups = [[place for place in order if counts[place] == count] for count in sorted(set(counts))]
    results = {}
    for places in groups:
        common = {"backend": backend, "precision": "float64", "adds_up": True}
        given = json.dumps([common | cases[place] for place in places])
        # With --compile=on a graph of three micro-batches takes minutes to compile.
        done = run(PROGRAMS / "small_nets.py", given, backend=backend, OMP_NUM_THREADS="1", timeout=900)
        results |= dict(zip(places, result_of(done), strict=True))
    return [results[place] for place in range(len(cases))]


def assert_taught_alike(received, expected, case, tolerance=1e-12):
    """In float64 nothing but the last bits differs."""
    assert isinstance(received, dict), received
    assert received.keys() == expected.keys()
    assert_alike(received["weights"], expected["weights"], rtol=0, atol=tolerance, name=str(case))
    for name in expected.keys() - {"weights"}:
        assert_alike(received[name], expected[name], rtol=tolerance, atol=0, name=f"{name}, {case}")


@all_but("jax", "tensorflow")
def test_it_learns_as_with_the_whole_batch(backend):
    """Micro-batches of 6, 6 and 4 samples, and one of 4 at an epoch's end; with two devices, 3 of each on each."""
    cases = [
        {"net": "random", "accumulate": 3, "num_devices": 2},
        {"net": "random", "accumulate": 3, "loss": "squares"},
        {"net": "random", "accumulate": 3, "loss": "dice"},
        {"net": "random", "accumulate": 3, "loss": "against_mean"},
        {"net": "random", "accumulate": 3, "adds_up": False},
        {"net": "random"},
    ]
    *results, refused, also_refused, refused_for_metric, whole = trained(backend, cases)
    assert refused_for_metric.startswith(
        "accumulate: the metric maximum (not known to add up) may need the whole batch"
    )
    for received, case in zip(results, cases, strict=False):
        assert_taught_alike(received, whole, case)
    for loss, error in (("dice", refused), ("against_mean", also_refused)):
        assert re.fullmatch(
            rf"the loss {loss} of functional_?\d* needs the whole batch at once; leave out accumulate. Or .*",
            error,
        )


@pytest.mark.proof
def test_a_sum_and_a_last_micro_batch_with_fewer_rows_than_devices(backend):
    """Two devices, seven micro-batches of 2 rows and, of the 15 rows, one of 1; no weights, and sums over the rows."""
    cases = [
        {"net": "random", "loss": loss, "accumulate": count, "num_devices": number}
        for loss in (None, "sum")
        for count, number in ((1, 1), (8, 1), (8, 2))
    ]
    cases += [{"net": "subclassed", "accumulate": 3}, {"net": "subclassed"}]
    whole, one, two, whole_sum, one_sum, two_sum, own, own_whole = trained(backend, cases)
    for received in (one, two):
        assert_taught_alike(received, whole, "mean")
    for received in (one_sum, two_sum):
        assert_taught_alike(received, whole_sum, "sum")
    assert_taught_alike(own, own_whole, "subclassed")


@all_but("jax", "tensorflow")
def test_batch_norm_takes_its_statistics_from_micro_batches(backend):
    """Of 4 rows each: on one device, on two, and in a loop by hand."""
    cases = [{"net": "norms", "accumulate": 4, "num_devices": 2}, {"net": "norms", "accumulate": 4}]
    cases.append({"net": "norms", "by_hand": True})
    two, one, by_hand = trained(backend, cases)
    # The loop calls plain TensorFlow's gelu (2.21), which is off by 5e-9 in float64.
    tolerance = 1e-7 if backend == "tensorflow" else 1e-12
    assert_taught_alike(one, by_hand, "one device", tolerance)
    assert_taught_alike(two, one, "two devices")


OTHERS = {
    "torch": [{"compile": "on"}, {"compile": "on", "num_devices": 2}, {"remat": "*"}]
    + [{"shard": shard, "num_devices": 2} for shard in ("optimizer", "weights")],
    "jax": [{"remat": "*"}] + [{"shard": shard, "num_devices": 2} for shard in ("optimizer", "weights")],
    "tensorflow": [{"remat": "*"}, {"remat": "*", "num_devices": 2}],
}


@pytest.mark.proof
def test_with_what_else_saves_memory_or_time(backend):
    cases = [{"net": "random", "accumulate": 3} | case for case in OTHERS[backend]]
    *results, whole = trained(backend, [*cases, {"net": "random"}])
    for received, case in zip(results, cases, strict=True):
        assert_taught_alike(received, whole, case)


EVALUATION = """
import keras
import numpy as np
import kerasdp

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def test_step(self, data):
        x, y = data
        return {"loss": keras.ops.mean((self(x, training=False) - y) ** 2)}

def train(runner):
    with runner.scope():
        model = Model()
        model.compile("sgd", "mse")
    x = np.random.RandomState(0).uniform(size=(40, 4))
    data = x, x.sum(1, keepdims=True)
    history = model.fit(*data, verbose=0, validation_data=data).history
    return history["val_loss"][0], model.evaluate(*data, batch_size=40, verbose=0)

loss, again = kerasdp.launch(train, num_devices=2, device="cpu", accumulate=2, batch_size=10, verbose=0)
assert abs(loss - again) < 1e-6 * again, (loss, again)
"""


@all_but("torch", "tensorflow")
def test_a_user_defined_evaluation_sees_whole_batches(backend, tmp_path):
    (tmp_path / "program.py").write_text(EVALUATION)
    done = run(tmp_path / "program.py", backend=backend, KERAS_BACKEND=backend)
    assert done.returncode == 0, done.stderr
