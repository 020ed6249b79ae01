"""The recipes with custom loops, of text and of a table: alike on all backends and counts, resumed in the middle."""

import pytest

from tests.helpers import BACKENDS, losses_in, run

# In float64: in float32 Adam makes much of round-off. A GAN's loss differs by 2e-3 after four steps on some machines.
FLAGS = ("--device=cpu", "--precision=float64", "--log_every=1", "--verbose=0")
OWN = {
    "custom_loop": ["--batch_size=16"],
    "diffusion": ["--batch_size=16"],
    "cartpole": [],
    "text": ["--batch_size=8"],
    "tabular": [],
}
WAYS = [(name, count) for name in BACKENDS for count in (1, 2)]


def trained(recipe, backend, count, workdir, *flags):
    """The losses in the run's files."""
    ways = (f"--backend={backend}", f"--gpus={count}", f"--workdir={workdir}")
    done = run(f"recipes/{recipe}.py", *FLAGS, *OWN[recipe], *ways, *flags, backend=backend, timeout=500)
    assert done.returncode == 0, done.stderr
    return losses_in(workdir)


@pytest.mark.proof
@pytest.mark.parametrize("recipe", OWN)
def test_resumes_with_other_devices(recipe, tmp_path):
    """Of cartpole, whose games start again, the steps are there, without a gap."""
    found = trained(recipe, BACKENDS[0], 1, tmp_path, "--max_steps=2")
    resumed = trained(recipe, BACKENDS[-1], 2, tmp_path, "--max_steps=4", "--resume")
    assert resumed[:2] == found and len(resumed) == 4
    assert (tmp_path / "generated.png").exists() == (recipe in ("custom_loop", "diffusion"))
    if recipe != "cartpole":
        whole = trained(recipe, BACKENDS[0], 1, tmp_path / "whole", "--max_steps=4")
        assert resumed == pytest.approx(whole, rel=1e-9)


@pytest.mark.proof
@pytest.mark.parametrize("recipe", OWN)
def test_the_same_losses_everywhere(recipe, tmp_path):
    expected = trained(recipe, *WAYS[0], tmp_path / "first", "--max_steps=4")
    assert len(expected) == 4
    for backend, count in WAYS[1:]:
        found = trained(recipe, backend, count, tmp_path / f"{backend}{count}", "--max_steps=4")
        assert found == pytest.approx(expected, rel=1e-9), (backend, count)
