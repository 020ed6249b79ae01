"""The operation that two backends compute differently is named, and nothing is where nothing differs."""

import json
import pickle

import numpy as np
import pytest

from kerasdp.errors import UserError
from kerasdp.keras_compat.operations import Array, Call, aligned
from kerasdp.parity.bisect import Finding, Step, Steps, _findings, _of_gradients, bisect
from tests.helpers import BACKENDS, PROGRAMS, result_of, run
from tests.programs.planted import CLEAN, FAULTS, MODELS

PAIR = tuple((BACKENDS * 2)[:2])
X = np.arange(6.0).reshape(2, 3)


def call(name="tanh", inputs=(X,), outputs=(X,), site="a.py:1 in call", **more):
    arguments = [Array(number) for number in range(len(inputs))], {}
    fields = {"function": f"keras.ops.{name}", "layer": "Dense first", "site": site, "arguments": arguments} | more
    return Call(inputs=list(inputs), outputs=list(outputs), **fields)


def steps(*calls, loss=1.0, gradient=X, after=X + 1, initial=X, optimizer="Adam"):
    step = Step(calls=list(calls), loss=loss, gradients={"kernel": gradient}, after={"kernel": after})
    return Steps(initial={"kernel": initial}, optimizer=optimizer, steps=[step])


def first(one, other):
    return next(_findings(PAIR, one, other), None)


def test_equal_steps_have_no_finding():
    assert first(steps(call()), steps(call(outputs=(X + 1e-13,)))) is None


@pytest.mark.parametrize(
    ("other", "what", "name"),
    [
        (steps(call(), initial=X + 1e-16 * (X == 1) + 1e-9), "initial weights", "kernel"),
        (steps(call(outputs=(X * 1.0000001,))), "operation", "tanh"),
        (steps(call(outputs=(X.astype("float32"),))), "operation", "tanh"),
        (steps(call(), loss=1.001), "loss", "the loss"),
        (steps(call(), gradient=X * 1.001), "gradient", "kernel"),
        (steps(call(), after=X + 1.1), "update", "kernel by Adam"),
    ],
)
def test_what_differs_is_named(other, what, name):
    found = first(steps(call()), other)
    assert (found.what, found.name, found.inputs_differ) == (what, name, False)
    assert str(found).startswith("the initial" if what == "initial weights" else "step 0: ")


def test_who_only_passes_a_difference_on_is_not_blamed():
    """An operation between them is no operation of Keras."""
    one, other = (steps(call(inputs=(x,), outputs=(2 * x,)), loss=x.sum()) for x in (X, X * 1.001))
    found = first(one, other)
    assert found.inputs_differ and "because of code that calls no operation of Keras" in str(found)


def test_what_differs_and_is_used_by_nothing_is_no_finding():
    """torch's GRU gives the last output alone where the others give all, and the layer takes the last."""
    assert first(steps(call()), steps(call(inputs=(X[:1],), outputs=(X[:1],)))) is None


def test_round_off_of_code_that_computes_in_float32_is_none_to_blame():
    """Nor what is made of it, in float64."""
    narrow = X.astype("float32")
    calls = [
        steps(call("mean", (narrow,), (x.astype("float32"),)), call("tanh", (x,), (np.tanh(x),)))
        for x in (X, X * 1.000002)
    ]
    assert first(*calls) is None
    assert first(calls[0], steps(call("mean", (narrow,), (1.001 * narrow,)))).name == "mean"


def test_calls_that_only_one_backend_makes_are_left_out():
    one = [call("exp"), call("cast", site="a.py:7 in fused"), call("tanh")]
    other = [call("exp"), call("cast", site="b.py:9 in call"), call("add"), call("tanh")]
    assert [pair[0].name for pair in aligned(one, other)] == ["exp", "tanh"]


def test_the_gradient_is_that_of_the_last_operation_that_differs():
    calls = [call("exp"), call("tanh"), call("add")]
    nothing = Finding(backends=PAIR, what="gradient", name="kernel", step=0, expected=X, received=X, difference=1.0)
    found = _of_gradients(nothing, calls, [[X]] * 3, [[2 * X], [3 * X], None])
    assert found.name == "tanh" and found.call is calls[1]


@pytest.mark.parametrize("backends", [["torch"], ["torch", "jax", "tensorflow"]])
def test_two_backends_are_compared(backends):
    with pytest.raises(UserError, match="expected two backends, such as torch,jax. Received: torch"):
        bisect(print, (X, X), backends)


def traced(backend, file, *arguments):
    result_of(run(PROGRAMS / "planted.py", backend, file, *arguments, backend=backend, timeout=3000))
    with open(file, "rb") as found:
        return pickle.load(found)  # of the program's own making


def is_named(found, model, function, expected):
    """Whether a finding names the operation, or of a fault in what builds a model the layer, weight or optimizer."""
    return found.name == expected if function else expected in f"{found.name} {found.call} {found.what}"


PAIRS = [pair for pair in (("torch", "jax"), ("jax", "tensorflow")) if set(pair) <= set(BACKENDS)]


def found_in(pair, models, faults, tmp_path):
    """Findings by name, of models without a fault and of those with one."""
    clean = traced(pair[0], tmp_path / "clean", *models)
    faulty = traced(pair[1], tmp_path / "faulty", *models, *faults)
    findings = {name: next(_findings(pair, clean[name], faulty[name]), None) for name in models}
    for name in faults:
        findings[name] = next(_findings(pair, clean[FAULTS[name][0]], faulty[name]), None)
    backwards = {
        name: clean[FAULTS[name][0]].steps[0].calls
        for name in faults
        if findings[name] is not None and findings[name].what == "gradient"
    }
    if not backwards:
        return findings
    with open(tmp_path / "calls", "wb") as file:
        pickle.dump(list(backwards.items()), file)
    alone = [
        traced(name, tmp_path / f"alone {name}", how, tmp_path / "calls")
        for name, how in zip(pair, ("--clean", "--alone"), strict=True)
    ]
    for name in backwards:
        findings[name] = _of_gradients(findings[name], backwards[name], alone[0][name], alone[1][name])
    return findings


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.skipif(len(BACKENDS) < 2, reason="two backends")
@pytest.mark.parametrize("pair", PAIRS)
def test_planted_faults_are_named(pair, tmp_path):
    """At least 95 of 100, and none in the models without one."""
    findings = found_in(pair, MODELS, FAULTS, tmp_path)
    assert not any(findings[name] for name in MODELS), [str(findings[name]) for name in MODELS]
    missed = {
        name: str(findings[name])
        for name in FAULTS
        if (found := findings[name]) is None or not is_named(found, *FAULTS[name])
    }
    print(f"{len(FAULTS)} faults in {len(MODELS)} models, missed: {json.dumps(missed, indent=1)}")
    assert len(missed) <= 0.05 * len(FAULTS), missed


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.skipif(len(BACKENDS) < 2, reason="two backends")
@pytest.mark.parametrize("pair", PAIRS)
def test_nothing_is_found_in_models_of_other_people(pair, tmp_path):
    findings = found_in(pair, CLEAN, [], tmp_path)
    assert not any(findings.values()), {name: str(found) for name, found in findings.items() if found}
