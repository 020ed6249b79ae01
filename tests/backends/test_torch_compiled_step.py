"""The promise: compiled steps learn what steps in Python learn."""

import json

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, assert_alike, files_of_run, result_of, run, train_resumable

pytestmark = pytest.mark.skipif("torch" not in BACKENDS, reason="jax and tensorflow compile by themselves")


def results_of(program, cases, backend=None, **environment):
    # Cold: a process that has compiled, or trained on one device, holds threads without which a forked worker would
    # wait forever. Where these cases come last, it may be warm.
    done = run(PROGRAMS / program, json.dumps(cases), backend=backend, OMP_NUM_THREADS="1", **environment)
    return result_of(done), done.stderr


@pytest.mark.proof  # where nothing is in Inductor's cache, a minute for each net
@pytest.mark.parametrize("net", ["norms", "random"])
def test_compiled_on_one_and_two_devices(net):
    """Batch norm; dropout, penalties, clipping, two outputs, uint8 inputs, a last batch of 4."""
    ways = ((2, "on"), (1, "on"), (1, "off"))
    cases = [{"backend": "torch", "net": net, "num_devices": count, "compile": mode} for count, mode in ways]
    (*compiled, eager), errors = results_of("small_nets.py", cases, backend="torch")
    assert "are not compiled, so they run slower" not in errors
    for received in compiled:
        np.testing.assert_allclose(received["losses"], eager["losses"], rtol=2e-6)
        assert_alike(received["weights"], eager["weights"], rtol=1e-7, atol=1e-6)
        assert_alike(received.get("history", {}), eager.get("history", {}), rtol=2e-6, atol=0)


@pytest.mark.proof
def test_what_is_compiled_and_what_is_not():
    layers = ["plain", "slower", "reading", "swapping", "frozen"]
    cases = [{"layer": layer, "compile": mode} for layer in layers for mode in ("off", "on")]
    on_two = {"layer": "frozen", "compile": "off", "num_devices": 2}
    results, errors = results_of("compiled.py", [*cases, on_two])
    np.testing.assert_allclose(results[-1]["losses"], results[-3]["losses"], rtol=1e-6)
    for layer, eager, compiled in zip(layers, results[:-1:2], results[1::2], strict=True):
        assert eager["calls"] == 16
        np.testing.assert_allclose(compiled["losses"], eager["losses"], rtol=1e-6, err_msg=layer)
        np.testing.assert_allclose(compiled["accuracy"], eager["accuracy"], err_msg=layer)
    plain, slower, reading, swapping, frozen = (result["calls"] for result in results[1::2])
    assert frozen == 2 + 4
    assert plain == slower == 1 + 4  # captured once; the last batch of each epoch is smaller
    assert reading == swapping == 1 + 16
    warnings = [line for line in errors.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert "layer counting cannot be captured as a graph" in warnings[0]


@pytest.mark.parametrize(
    "runs",
    [
        [(1, "auto", False), (1, "off", False)],
        pytest.param(
            [(2, "auto", True), (2, "auto", False), (1, "auto", True), (1, "off", True)], marks=pytest.mark.proof
        ),
    ],
)
def test_compiled_once_many_steps_of_a_shape_were_seen(runs):
    """Where the length of the data is not known: from eager to compiled steps in the middle of a `fit`."""
    cases = [{"num_devices": count, "compile": mode, "is_own": is_own} for count, mode, is_own in runs]
    results, _ = results_of("compiled_later.py", cases, backend="torch")
    for (_, compiles, is_own), result in zip(runs, results, strict=True):
        np.testing.assert_allclose(result["numbers"], results[-1]["numbers"], rtol=1e-12)
        # Two shapes, of which three each are seen; a user-defined step begins to count after its first.
        assert result["captured"] == ([16 - 6 - is_own, 10, 10] if compiles == "auto" else [0, 0, 0])


@pytest.mark.proof
def test_float16_is_compiled():
    """The loss's scale begins too large, falls, and grows, as in Keras; steps that overflow are left out."""
    cases = [{"layer": "scaled", "precision": "float16", "compile": mode} for mode in ("off", "on")]
    (eager, compiled), errors = results_of("compiled.py", cases, backend="torch")
    assert "warning" not in errors
    assert compiled["state"] == eager["state"]
    assert compiled["iterations"] == eager["iterations"] < 16
    np.testing.assert_allclose(compiled["losses"], eager["losses"], rtol=2e-3)  # of float16, which has 11 bits
    assert_alike(compiled["weights"], eager["weights"], rtol=1e-7, atol=1e-3)


@pytest.mark.proof
def test_a_compiler_that_fails_on_one_rank_alone():
    """All ranks train on without it: one with a compiled step would wait forever for the others' part of it."""
    case = {"layer": "plain", "max_steps": 3, "num_devices": 2}
    cases = [case | {"compile": "off"}, case | {"compile": "on", "no_compiler_on_rank": 1}]
    (eager, other), errors = results_of("compiled.py", cases, TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    assert eager["losses"] == other["losses"]
    warnings = [line for line in errors.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and "Inductor cannot compile the step" in warnings[0]


@pytest.mark.proof
def test_a_compiled_run_resumes_bit_by_bit(tmp_path):
    choices = {"compile": "on", "checkpoint_every": "7"}
    whole = result_of(train_resumable(tmp_path / "whole", "torch", 1, **choices))
    done = train_resumable(tmp_path / "run", "torch", 1, trouble="signal", at_step=17, **choices)
    assert done.returncode == 99, done.stderr
    (tmp_path / "run.trouble").touch()
    assert result_of(train_resumable(tmp_path / "run", "torch", 1, resume=True, **choices)) == whole
    assert files_of_run(tmp_path / "run") == files_of_run(tmp_path / "whole")
