"""The hand-written loops of benchmarks/ train the kit's models: from equal weights come equal losses."""

import json

import pytest

from tests.conftest import PROGRAMS, run


@pytest.mark.parametrize("model", ["convnet", pytest.param("resnet18", marks=pytest.mark.proof)])
def test_loops_train_the_kits_models(backend, model):
    done = run(PROGRAMS / "benchmark_loop.py", backend, model)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["parameters"][0] == result["parameters"][1]
    assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-4)
