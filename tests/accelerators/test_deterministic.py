"""`--deterministic` changes no number on the CPU, where runs are bit-equal without it, and refuses operations."""

import pytest

from tests.helpers import losses_in, run

pytestmark = pytest.mark.proof


@pytest.mark.parametrize("count", [1, 2])
def test_the_losses_are_the_same(backend, count, tmp_path):
    found = {}
    for choice in ("deterministic", "nodeterministic"):
        ways = (f"--backend={backend}", f"--gpus={count}", f"--workdir={tmp_path}/{choice}", f"--{choice}")
        done = run("recipes/train.py", "--device=cpu", "--model=convnet", "--max_steps=10", "--log_every=1", *ways)
        assert done.returncode == 0, done.stderr
        found[choice] = losses_in(tmp_path / choice)
    assert len(found["deterministic"]) == 10
    assert found["deterministic"] == found["nodeterministic"]


REFUSED = """
import torch
import kerasdp

def train(runner):
    torch.zeros(4).put_(torch.tensor([0, 1]), torch.zeros(2))

kerasdp.launch(train, backend="torch", num_devices=1, device="cpu", deterministic=True)
"""


def test_what_has_no_deterministic_algorithm_is_refused():
    done = run("-c", REFUSED)
    assert (
        done.returncode
        and (
            "deterministic: put_ does not have a deterministic implementation; remove that operation, or leave "
            "out deterministic=True"
        )
        in done.stderr
    )
