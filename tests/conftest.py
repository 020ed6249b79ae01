"""Fixtures for all tests, and the backend of the process that pytest runs in."""

import os

import pytest

from tests.helpers import BACKENDS

# For the tests of code that is the same on every backend, which run in this process.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = BACKENDS[0]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each installed backend in turn."""
    return request.param
