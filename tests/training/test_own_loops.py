"""Custom loops train, stop and resume alike on all backends and device counts; wrong ones say so in a line."""

import json

import numpy as np
import pytest

from tests.helpers import (
    BACKENDS,
    HOST_BACKENDS,
    PROGRAMS,
    all_but,
    assert_alike,
    each_way,
    finish,
    numbers,
    result_of,
    results,
    run,
    start,
    steps_in,
)
from tests.hosts.together import free_port, place_in_run

CASES = ("supervised", "wgan", "momentum_contrast", "style", "scaled")
# In the default suite; the others, and other numbers of devices, are proofs.
USUAL = {(BACKENDS[0], 2): ("supervised", "wgan")}


def outcome(backend, count, case):
    """What a case gave; those of the default suite share a process, and so do the proofs."""
    usual = USUAL.get((backend, count), USUAL[BACKENDS[0], 2])
    return results("loops.py", backend, count, *(name for name in CASES if (name in usual) == (case in usual)))[case]


@each_way(CASES, lambda backend, count, case: case in USUAL.get((backend, count), ()))
def test_trains_as_on_one_device(backend, count, case):
    """In float64: what each of 20 steps gives, the last batch of an epoch uneven."""
    assert_alike(outcome(backend, count, case), outcome(BACKENDS[0], 1, case), 1e-11)


@pytest.mark.skipif("torch" not in BACKENDS, reason="elsewhere steps are compiled anyway")
@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, 2])
def test_compiled_on_torch(count):
    """All train by graphs, in which nothing is left out."""
    done = run(PROGRAMS / "loops.py", "torch", count, *CASES, '{"compile": "on"}', backend="torch", timeout=800)
    assert "cannot be captured" not in done.stderr
    for case, received in result_of(done).items():
        assert_alike(received, outcome(BACKENDS[0], 1, case))


@pytest.mark.proof
@pytest.mark.skipif("torch" not in BACKENDS, reason="elsewhere steps are compiled anyway")
def test_one_graph_for_all_steps():
    """But for the first, which tells whether there can be one; it changes float64 variables without axes, too."""
    on, off = (results("compiled_loop.py", "torch", choice) for choice in ("on", "off"))
    assert len(set(on["calls"][1:])) == 1 and len(set(off["calls"])) == 8
    np.testing.assert_allclose(on["means"], off["means"], rtol=1e-12)


@pytest.mark.proof
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch"])
def test_nothing_is_compiled_after_the_second_step(backend):
    """Nor is the function called again, which JAX and TensorFlow trace."""
    found = results("compiled_loop.py", backend, "auto")
    assert len(set(found["calls"][1:])) == 1 and len(set(found["compiled"][1:])) == 1
    assert backend != "jax" or found["compiled"][0] > 0


def test_a_loop_is_fit():
    """The same model, optimizer, data and seed give the curve of `fit`."""
    found = outcome(BACKENDS[0], 1, "supervised")
    assert_alike(found["loop"], found["fit"], 1e-12, 0)


@pytest.mark.proof
def test_batch_norm_of_each_device_is_that_of_fit(backend):
    """Weights and moving statistics after 20 steps on two devices, with --batch_norm=replica."""
    found = results("loops.py", backend, 2, "norm_of_replicas", '{"batch_norm": "replica"}')["norm_of_replicas"]
    assert_alike(found["loop"], found["fit"], 1e-11)


@pytest.mark.proof
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_two_hosts(backend):
    """They learn what one process learns."""
    cases, port = ("supervised", "wgan", "momentum_contrast"), free_port()
    places = [place_in_run(backend, number, 2, port) for number in range(2)]
    hosts = [start(PROGRAMS / "loops.py", backend, 1, *cases, backend=backend, **place) for place in places]
    found, _ = [finish(host, 280) for host in hosts]
    for case, received in result_of(found).items():
        assert_alike(received, outcome(BACKENDS[0], 1, case), 1e-11, 0, case)


MOVES = (("torch", 1, "jax", 2), ("jax", 1, "tensorflow", 2), ("tensorflow", 2, "torch", 1), ("torch", 1, "torch", 2))


@pytest.mark.proof
@pytest.mark.parametrize("move", [move for move in MOVES if {move[0], move[2]} <= set(BACKENDS)])
def test_resumes(move, tmp_path):
    """Stopped within the second epoch, between a step of the critic and one of the generator; resumed elsewhere."""
    workdir = {"workdir": str(tmp_path / "run"), "log_every": 1}
    results("loops.py", *move[:2], "wgan", json.dumps(workdir | {"max_steps": 6}))
    received = results("loops.py", *move[2:], "wgan", json.dumps(workdir | {"resume": True}))["wgan"]
    expected = outcome(BACKENDS[0], 1, "wgan")
    np.testing.assert_allclose(numbers(received["critic"]), numbers(expected["critic"][6:]), rtol=1e-11)
    np.testing.assert_allclose(received["maker"], expected["maker"][3:], rtol=1e-11)
    steps = steps_in(tmp_path / "run")
    assert [step["step"] for step in steps] == list(range(1, 21))
    np.testing.assert_allclose([step["loss"] for step in steps], [step["loss"] for step in expected["critic"]], 1e-11)


TRIAL = "the step {} fails on 4 samples, in a trial before the first step: "
REFUSED = {
    "makes_variable": TRIAL.format("makes_variable"),
    "makes_layer": "the step creates the variable dense",
    "numpy_inside": TRIAL.format("numpy_inside"),
    "condition": TRIAL.format("condition"),
    "other_framework": "the step other_framework ",
    "gradient_of_integers": "expected floating-point values. Received: variable, of int32",
    "masked_mean": "(a number of tokens, a sum of weights), compute it from kerasdp.all_rows",
    "text": "a step: expected tensors as results. Received: 'done'; do not return text",
    "integers": "for other results pass returns='same', 'sum' or 'rows'",
    "step_in_step": "the step lambda was called within a step; call its undecorated function instead",
    "sum_of_rows": "the step sum_of_rows computes different values for a split batch than for the whole batch",
    "vector": "of shape (",
    "largest": "the step largest computes different values for a split batch than for the whole batch",
    "unseeded": "the step draws from keras.random without a seed",
    "nothing": "gave None",
    "order": "z 3.5 a -3.5 z 11.5 a -11.5 z 19.5 a -19.5 z 26 a -26 7 21.5",
    "log": "log was called outside of a loop over runner.batches",
    "not_built": "is not built, so its variables are unknown; call its build method before",
    "no_optimizer": "checkpoint, optimizers: expected at least one optimizer. Received: none; pass one",
    "wrong_part": "checkpoint, models: expected Layer objects. Received: Adam",
    "reduction": "returns: expected one of mean, sum, rows, same. Received: 'median'",
    "rows_of_trial": "the step lambda fails on 4 samples, in a trial before the first step: ",
    "read": "0.01 ",
    "other_arrays": "expected the same batch on all ranks",
    "parted": "first in sequential/dense/kernel: a layer, loss, callback or loop changed this variable on one device",
}


@all_but("jax", "tensorflow")
def test_what_a_step_cannot_do(backend):
    received = result_of(run(PROGRAMS / "loops_refused.py", backend, 2, backend=backend))
    one_process = {"other_arrays": "gave ", "parted": "gave "}
    one_program = {"sum_of_rows": "gave ", "largest": "gave ", "masked_mean": "gave "}
    others = {"torch": {}, "jax": one_process | one_program, "tensorflow": one_process}[backend]
    expected = REFUSED | others
    for name, words in expected.items():
        assert words in received[name], name
        assert "\n" not in received[name]
    assert all("read it outside of the step" in received[name] for name in ("numpy_inside", "condition"))
