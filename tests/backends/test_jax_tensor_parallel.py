"""A model whose weights are cut over devices learns as on one."""

import pytest

from tests.helpers import BACKENDS, PROGRAMS, assert_alike, assert_same, result_of, run

pytestmark = [
    pytest.mark.skipif("jax" not in BACKENDS, reason="tensor parallelism is there for jax only"), pytest.mark.proof,
]  # fmt: skip
CASES = ("residual, adam", "convnet, sgd")
each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the program prints that has trained all cases."""
    return result_of(run(PROGRAMS / "tensor.py", tmp_path_factory.mktemp("tensor"), *CASES, backend="jax"))


@each_case
def test_learns_as_on_one_device(results, case):
    expected, received = (results[strategy][case]["numbers"] for strategy in ("data", "tensor"))
    assert len(received["losses"]) == 9
    assert expected.keys() == received.keys()
    assert_alike(received, expected, rtol=0, atol=1e-5)


@each_case
def test_last_axes_are_cut_where_they_divide(results, case):
    for name, shape, part, slots in results["tensor"][case]["places"]:
        is_cut = shape[-1] % 4 == 0 and "seed" not in name
        assert part == [*shape[:-1], shape[-1] // 4 if is_cut else shape[-1]], name
        num_slots = 0 if "moving" in name else 1 if "sgd" in case else 2
        assert slots == [part] * num_slots, name


def test_says_what_is_cut(results):
    # Of 17 weights of convnet only kernel and bias of the 10 logits are whole.
    description = results["tensor"]["convnet, sgd"]["description"]
    assert description.startswith("15 of 17 weights are cut in 4: a device holds ")
    held, whole = (int(number.replace(",", "")) for number in description.split() if "," in number and number[0] < "A")
    assert 0.25 < held / whole < 0.3


def test_a_run_resumes_with_the_other_strategy(results):
    assert_same(results["data"]["residual, adam"]["numbers"]["losses"], results["in turns"], 1e-5)


def test_errors(results):
    assert "hold different values in 1 variables, first in dense" in results["errors"]["spoiled"]
    error = results["errors"]["nothing_divides"]
    assert error.startswith(
        'UserError: strategy="tensor": expected a kernel with a last axis divisible by 4, the device count. Received'
    )
