"""Fixtures for all tests, and the backend of the process that pytest runs in."""

import os
import tempfile

import pytest

from tests.helpers import BACKENDS, SERVERS

# For the tests of code that is the same on every backend, which run in this process.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = BACKENDS[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what the tests on GPUs know; pytest reads an option here and not in their folder."""
    parser.addoption("--rehearse", action="store_true", help="tests on GPUs: run on virtual CPU devices instead")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the folder where pytest's processes find their servers."""
    if config.option.markexpr != "gpu" and os.path.exists("/dev/nvidia0"):  # all else is for virtual CPU devices
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if SERVERS not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="kerasdp-tests-", dir="/tmp")  # a socket has a short path
        os.environ[SERVERS] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each installed backend in turn."""
    return request.param


@pytest.fixture(autouse=True)
def messages_with_flags(monkeypatch):
    """What is raised in this process names flags, as its text in the code does; programs choose for themselves."""
    monkeypatch.setenv("KERASDP_FROM_COMMAND_LINE", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as `unit` what stands in files that start no programs: what new releases can be tested with quickly.

    And as `proof` the cases that are not `short`; where none of those is there, as for want of a backend, the first is.
    """
    for item in items:
        starts = any(
            hasattr(item.module, name) for name in ("run", "results", "start", "train_resumable", "Run", "on_hosts")
        )
        if not starts and not item.nodeid.startswith("tests/parity/"):  # which trains in processes of its own
            item.add_marker("unit")
    are_all = len(BACKENDS) == 3 and not any("::" in argument for argument in config.args)
    for test, mark in {item.function: mark for item in items if (mark := item.get_closest_marker("short"))}.items():
        cases = {item.callspec.id: item for item in items if item.function is test}
        if are_all and (unknown := set(mark.args) - set(cases)):
            raise pytest.UsageError(f"{test.__name__}: no cases {unknown}: there are {list(cases)}")
        short = set(mark.args) & set(cases) or {next(iter(cases))}
        for name in set(cases) - short:
            cases[name].add_marker("proof")
