"""Models of KerasHub, whose weights come in another order on torch, are resumed on each backend in turn."""

import importlib.util
import json

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason="KerasHub is not installed"),
    pytest.mark.skipif(len(BACKENDS) < 3, reason="a backend is missing"),
]
OPTIMIZERS = {"sgd": "sgd(learning_rate=0.002,momentum=0.9)", "adam": "adam(learning_rate=0.002)"}


def train(backend, workdir, backbone, optimizer, **choices):
    """The paths of the weights in the backend's order, and the losses."""
    fields = {"backend": backend, "workdir": str(workdir), "backbone": backbone, "optimizer": OPTIMIZERS[optimizer]}
    done = run(PROGRAMS / "resume_backbone.py", json.dumps(fields | choices), backend=backend)
    lines = (workdir / "steps.jsonl").read_text().splitlines()
    return result_of(done), np.array([json.loads(line)["loss"] for line in lines])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("backbone", ["bart", "segformer"])
def test_from_torch_to_tensorflow_to_jax(backbone, optimizer, tmp_path):
    """Nine steps, three on each backend, and all nine on torch: momentum or Adam's two moments go along."""
    paths, expected = train("torch", tmp_path / "whole", backbone, optimizer)
    train("torch", tmp_path / "run", backbone, optimizer, max_steps=3)
    others, _ = train("tensorflow", tmp_path / "run", backbone, optimizer, max_steps=6, resume=True)
    _, received = train("jax", tmp_path / "run", backbone, optimizer, resume=True)
    assert paths != others and len(received) == len(expected) == 9
    print(f"{backbone}, {optimizer}: {np.abs(received / expected - 1).max():.1e} apart", flush=True)
    np.testing.assert_allclose(received, expected, rtol=1e-5 if optimizer == "sgd" else 1e-3)
