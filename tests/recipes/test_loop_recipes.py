"""The recipes with their own loops: alike on all backends and device counts, resumed in the middle."""

import pytest

from tests.helpers import BACKENDS, losses_in, run

# In float64: in float32 Adam makes much of round-off. A GAN's loss differs by 2e-3 after four steps on some machines.
FLAGS = ("--device=cpu", "--precision=float64", "--log_every=1", "--verbose=0")
WAYS = [(name, count) for name in BACKENDS for count in (1, 2)]


def trained(recipe, backend, count, workdir, *flags):
    """The losses in the run's files."""
    ways = (f"--backend={backend}", f"--gpus={count}", f"--workdir={workdir}")
    done = run(f"recipes/{recipe}.py", *FLAGS, *ways, *flags, backend=backend, timeout=500)
    assert done.returncode == 0, done.stderr
    return losses_in(workdir)


@pytest.mark.proof
@pytest.mark.parametrize("recipe", ["cartpole", "gan", "diffusion"])
def test_resumes_with_other_devices(recipe, tmp_path):
    """Of cartpole, whose games start again, the steps are there, without a gap."""
    flags = ["--batch_size=16"] * (recipe != "cartpole")
    found = trained(recipe, BACKENDS[0], 1, tmp_path, *flags, "--max_steps=2")
    resumed = trained(recipe, BACKENDS[-1], 2, tmp_path, *flags, "--max_steps=4", "--resume")
    assert resumed[:2] == found and len(resumed) == 4
    assert (tmp_path / "made.png").exists() == (recipe != "cartpole")
    if recipe != "cartpole":
        whole = trained(recipe, BACKENDS[0], 1, tmp_path / "whole", *flags, "--max_steps=4")
        assert resumed == pytest.approx(whole, rel=1e-9)


@pytest.mark.proof
@pytest.mark.parametrize("recipe", ["gan", "diffusion", "cartpole"])
def test_the_same_losses_everywhere(recipe, tmp_path):
    flags = ["--batch_size=16"] * (recipe != "cartpole")
    expected = trained(recipe, *WAYS[0], tmp_path / "first", *flags, "--max_steps=4")
    for backend, count in WAYS[1:]:
        found = trained(recipe, backend, count, tmp_path / f"{backend}{count}", *flags, "--max_steps=4")
        assert found == pytest.approx(expected, rel=1e-9), (backend, count)
