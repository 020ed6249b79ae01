"""What is computed once more in the backward pass, and not kept until then, changes no loss."""

import functools
import math

import numpy as np
import pytest

import kerasdp
from tests.helpers import BACKENDS, PROGRAMS, assert_same, result_of, results, run

CASES = ("blocks", "conv", "attention", "lstm", "tied", "own")
XLA_SAVES = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def trained(backend, num_devices, remat, cases, shard="none", compiles="off"):
    return results("remat.py", backend, num_devices, compiles, remat, shard, *cases)


def outcome(backend, num_devices, remat, case, shard="none"):
    """What a case gave; those of the default suite have a process of their own."""
    cases = CASES[:1] if case in CASES[:1] else CASES[1:]
    return trained(backend, num_devices, remat, cases, shard)[case]


@pytest.mark.short("torch-1-blocks")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_it_learns_the_same(backend, num_devices, case):
    """Losses of 20 steps in float64, an uneven batch among them; with torch bit by bit, as the gradients are."""
    kept, again = (outcome(backend, num_devices, remat, case) for remat in ("none", "on"))
    assert again["diverged"] == []
    if backend == "torch":
        assert again["losses"] == kept["losses"] and again["variables"] == kept["variables"]
    else:
        np.testing.assert_allclose(again["losses"], kept["losses"], rtol=1e-9)
        np.testing.assert_allclose(again["variables"], kept["variables"], rtol=1e-9, atol=1e-12)
    if case == "blocks" and backend != "jax":  # which computes again what it has seen once
        assert again["calls"] > kept["calls"]


@pytest.mark.proof
@pytest.mark.skipif("torch" not in BACKENDS, reason="needs torch")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_compiled_step_learns_the_same(num_devices):
    kept, again = (trained("torch", num_devices, remat, ("blocks", "conv"), "none", "on") for remat in ("none", "on"))
    for case, expected in kept.items():
        np.testing.assert_allclose(again[case]["losses"], expected["losses"], rtol=1e-9)
        np.testing.assert_allclose(again[case]["variables"], expected["variables"], rtol=1e-9, atol=1e-12)


@pytest.mark.proof
@pytest.mark.skipif("jax" not in BACKENDS, reason="--shard is there for jax only")
@pytest.mark.parametrize("case", CASES)
def test_with_weights_in_parts(case):
    kept, again = outcome("jax", 1, "none", case), outcome("jax", 2, "on", case, "weights")
    np.testing.assert_allclose(again["losses"], kept["losses"], rtol=1e-9)


@pytest.mark.proof
@pytest.mark.parametrize("first", ["none", "on"])
def test_a_run_resumes_with_the_other(first, tmp_path):
    expected = outcome(BACKENDS[0], 1, "none", "blocks")["losses"]
    for epochs in (1, 2, 3, 4):
        remat = first if epochs % 2 else "on" if first == "none" else "none"
        backend = BACKENDS[epochs % len(BACKENDS)]
        arguments = (backend, 1 + epochs % 2, "off", remat, "none", "resume", tmp_path, epochs)
        found = result_of(run(PROGRAMS / "remat.py", *arguments, backend=backend))["blocks"]["losses"]
        assert_same(expected[:epochs] + expected[5 : 5 + epochs], found, 1e-9)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("backend", "compiles", "shard", "most"),
    [("torch", "off", "none", 0.3), ("torch", "on", "none", 0.8), ("jax", "off", "none", 0.6),
     ("jax", "off", "weights", 0.6), ("tensorflow", "off", "none", 0.6)],
)  # fmt: skip
def test_it_needs_less_memory(backend, compiles, shard, most):
    """The most that a step of a GPT of 8 blocks has; what is freed goes back to the system."""
    if backend not in BACKENDS:
        pytest.skip(f"needs {backend}")
    environment = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "XLA_FLAGS": XLA_SAVES}
    kept, again = (
        results("remat_memory.py", backend, compiles, remat, shard, **environment) for remat in ("none", "blocks")
    )
    print(
        f"{backend}, --compile={compiles}, --shard={shard}: {kept['mib']:.0f} -> {again['mib']:.0f} MiB, "
        f"{again['seconds'] / kept['seconds']:.2f} times as long"
    )
    np.testing.assert_allclose(again["losses"], kept["losses"], rtol=1e-4)
    assert again["mib"] < most * kept["mib"]


def made(kind="plain"):
    import keras
    from keras import layers

    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense, self.others = layers.Dense(4), [lambda: dense]

        def call(self, x):
            return self.dense(x) + keras.ops.matmul(x, self.others[0]().kernel)

    inputs = keras.Input((4,))
    dense = layers.Dense(4)
    x = dense(inputs)
    return keras.Model(inputs, x if kind == "plain" else Block()(x))


def fitted(runner, kind):
    with runner.scope():
        model = made(kind)
        model.compile("sgd", "mse")
    x = np.random.RandomState(0).rand(8, 4)
    return runner.fit(model, x, x, batch_size=4, epochs=2, verbose=0).history["loss"]


@pytest.mark.parametrize(
    ("remat", "words"),
    [
        ("blocks", "has no layer that contains layers with weights; name layers by a pattern, such as --remat='dense"),
        ("dense*, conv*", "has no layer with the name or path 'conv*'; choose from dense"),
    ],
)
def test_what_no_layer_is(remat, words):
    settings = {"backend": BACKENDS[0], "device": "cpu", "num_devices": 1, "verbose": 0}
    with pytest.raises(kerasdp.UserError) as raised:
        kerasdp.launch(functools.partial(fitted, kind="plain"), remat=remat, **settings)
    assert words in str(raised.value)


def test_other_strategies_refuse_it():
    with pytest.raises(kerasdp.UserError, match="--remat=blocks: does not work with --strategy=pipeline; leave out"):
        kerasdp.Config(remat="blocks", strategy="pipeline")


@pytest.mark.proof
def test_weights_of_layers_elsewhere_keep_their_gradients(backend):
    """TensorFlow would lose them, and refuses."""
    settings = {"backend": backend, "device": "cpu", "num_devices": 1, "verbose": 0, "precision": "float64"}
    train = functools.partial(fitted, kind="other")
    expected = kerasdp.launch(train, **settings)
    assert all(map(math.isfinite, expected))
    if backend == "tensorflow":
        with pytest.raises(kerasdp.UserError, match="uses .*kernel, a variable that is not its own"):
            kerasdp.launch(train, remat="blocks", **settings)
    else:
        assert_same(expected, kerasdp.launch(train, remat="blocks", **settings), 1e-12)
