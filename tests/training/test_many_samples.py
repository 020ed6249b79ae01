"""A thousand million samples cost no memory and no time before the first batch, also where a run resumes."""

import pytest

from kerasdp.data.sampling import Order
from tests.helpers import PROGRAMS, result_of, run

FEW, MANY = 10**4, 10**9
BATCH, STEPS = 64, 3


def begin(backend, count, folder):
    found = result_of(run(PROGRAMS / "many_samples.py", backend, count, folder, FEW, MANY, backend=backend))
    for number in (FEW, MANY):
        order = Order(num_samples=number, batch_size=BATCH)
        for name in ("new", "resumed"):
            start = order.num_batches // 2 if name == "resumed" else 0
            batches = list(range(start, start + STEPS))
            case = found[f"{name}, {number}"]
            assert case["batches"] == batches
            assert case["samples"] == [order.batch(0, batch)[:3].tolist() for batch in batches]
    return found


@pytest.mark.proof
def test_a_run_begins_and_resumes_at_once(backend, tmp_path):
    found = begin(backend, 1, tmp_path)
    for name in ("new", "resumed"):
        assert found[f"{name}, {MANY}"]["seconds"] < found[f"{name}, {FEW}"]["seconds"] + 1
        assert (
            found[f"{name}, {MANY}"]["grown"] < 256
        )  # MiB; an order of so many takes 8,000, and compiling for torch 100
    print(backend, found)


@pytest.mark.proof
def test_so_does_one_of_two_processes(tmp_path):
    found = begin("torch", 2, tmp_path)
    assert found[f"resumed, {MANY}"]["seconds"] < found[f"resumed, {FEW}"]["seconds"] + 1
    print(found)
