"""The hand-written loops of benchmarks/ train the kit's models: from equal weights come equal losses."""

import json

import pytest

from tests.helpers import BACKENDS, PROGRAMS, run


@pytest.mark.parametrize(
    ("backend", "model"),
    [
        pytest.param(name, model, marks=[] if (name, model) == (BACKENDS[0], "convnet") else pytest.mark.proof)
        for name in BACKENDS
        for model in ("convnet", "resnet18", "gpt", "segmentation")
    ],
)
def test_loops_train_the_kits_models(backend, model):
    done = run(PROGRAMS / "benchmark_loop.py", backend, model, backend=backend)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["parameters"][0] == result["parameters"][1]
    assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-4)
    assert result["accuracy"][0] == pytest.approx(result["accuracy"][1], abs=1e-6)
