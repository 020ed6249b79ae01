"""Provides the pytest fixture `training_parity`, which tests that a model trains the same on every backend.

    def build_model():
        import keras
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def test_portable(training_parity):
        training_parity(build_model, (x, y))

This test runs once for each backend and number of devices. Backends that are not installed are skipped.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from kerasdp.config import BACKENDS

_REFERENCES = pytest.StashKey[dict[Any, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the pytest options that select backends and numbers of devices."""
    group = parser.getgroup("kerasdp", "training parity of Keras models")
    said = "Backends, comma-separated; the first installed one is the reference."
    group.addoption("--parity-backends", type=_backends, default=list(BACKENDS), help=said)
    group.addoption("--parity-devices", type=_counts, default=[1, 2], help="Numbers of devices, comma-separated.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Creates one test for each backend and number of devices from each test that uses the fixture."""
    if "training_parity" in metafunc.fixturenames:
        backends, counts = (metafunc.config.getoption(name) for name in ("--parity-backends", "--parity-devices"))
        ways = list(itertools.product(backends, counts))
        metafunc.parametrize("training_parity", ways, indirect=True, ids=[f"{name}-{count}" for name, count in ways])


@pytest.fixture
def training_parity(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Returns a function that trains a model, and fails the test if the run diverges from the reference run.

    A test calls `training_parity(build_model, data, ...)`. The function has the arguments of `kerasdp.parity.compare`,
    except `backends`, `device_counts`, `report` and `with_plain`. The reference run uses the first installed backend
    and the first number of devices. With `batch_norm="replica"`, the reference run uses the number of devices of this
    test.
    """
    from kerasdp import parity
    from kerasdp.processes.devices import is_installed

    backend, count = request.param
    if not is_installed(backend):
        pytest.skip(f"{backend} is not installed")
    references = request.config.stash.setdefault(_REFERENCES, {})
    calls = iter(range(10**6))
    first = next(name for name in request.config.getoption("--parity-backends") if is_installed(name))

    def check(
        build_model: Callable[[], Any], data: Any, *, precision: str = "float32", tolerance: Any = None, **choices: Any
    ) -> Any:
        job = parity.Job(build_model=build_model, data=data, **choices)
        devices = count if job.batch_norm == "replica" else request.config.getoption("--parity-devices")[0]
        # The tests of one function share the reference of its first call, of its second call, and so on.
        key = (request.path, request.function.__qualname__, next(calls), devices, precision)
        if key not in references:
            references[key] = parity.Reference(job, parity.Way(backend=first, num_devices=devices, precision=precision))
        reference = references[key]
        way = parity.Way(backend=backend, num_devices=count, precision=precision)
        outcome = parity.judge(way, reference, tolerance or reference.tolerance)
        if not outcome.passed:
            pytest.fail(str(outcome), pytrace=False)
        return outcome

    return check


def _backends(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not {*names} <= {*BACKENDS}:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(BACKENDS)}. Received: {text!r}")
    return names


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]
