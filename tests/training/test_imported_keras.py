"""Keras that is imported before the kit, as most scripts do."""

import json

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run


@pytest.mark.short("torch-2")
@pytest.mark.parametrize("count", [1, 2])
def test_keras_imported_at_the_top(backend, count):
    assert_trains_with(backend, run(PROGRAMS / "keras_at_top.py", count, backend=backend))


@pytest.mark.proof
def test_keras_imported_at_the_top_of_a_new_process(backend, tmp_path):
    """As users start it. The backend is that of keras.json."""
    (tmp_path / "keras.json").write_text(json.dumps({"backend": backend}))
    assert_trains_with(backend, run(PROGRAMS / "keras_at_top.py", 2, KERAS_HOME=str(tmp_path)))


def assert_trains_with(backend, done):
    name, losses = result_of(done)
    assert name == backend
    np.testing.assert_allclose(losses, [1.762390, 1.745803], rtol=0, atol=1e-5)


@pytest.mark.proof
@pytest.mark.skipif(len(BACKENDS) < 2, reason="needs a second backend")
def test_keras_imported_with_another_backend():
    code = f"import keras, kerasdp; print(kerasdp.launch(lambda _: keras.config.backend(), backend={BACKENDS[1]!r}))"
    done = run("-c", code, KERAS_BACKEND=BACKENDS[0])
    said = f"Keras is already imported with the {BACKENDS[0]} backend: this run starts in a new process"
    assert done.stdout.splitlines() == [said, BACKENDS[1]], done.stderr
