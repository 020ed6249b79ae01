"""Changes the templates of `cluster/` as a person does who copies them, and looks at what their runs leave."""

import pathlib
import shutil
import sys
import time

import numpy as np

from tests.helpers import ROOT, environment, run, steps_in

FOLDER = ROOT / "cluster"
# In float64, since in float32 two trainings of so many steps diverge by round-off.
NUM_STEPS = 120
FLAGS = ("--gpus=1", "--precision=float64", f"--max_steps={NUM_STEPS}", "--log_every=1", "--verbose=2", "--device=cpu")


def edited(name: str, changes: dict[str, str], *, backend: str) -> str:
    """Returns the text of a template with these changes, for a short run of one device a process.

    Args:
        name: of the template.
        changes: what is replaced, each of which stands there, by what.
        backend: of the run.
    """
    text = (FOLDER / name).read_text()
    of_run = {
        "--backend=jax" if "--backend=jax" in text else "--backend=torch": f"--backend={backend}",
        "--checkpoint_every=10m": "--checkpoint_every=20",
        "--epochs=20": " ".join(("--epochs=20", *FLAGS)),
    }
    for old, new in (of_run | changes).items():
        assert old in text, f"{name}: expected {old!r}"
        text = text.replace(old, new)
    return text


def project(folder: pathlib.Path) -> dict[str, str]:
    """Makes a folder with the recipes, and an environment `.venv` that is this one; the folder is the home, too.

    Returns:
        Environment variables of programs that run there.
    """
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text(f"PATH={pathlib.Path(sys.executable).parent}:$PATH\n")
    return environment(PYTHONPATH=str(ROOT), HOME=str(folder))


def num_steps(workdir: pathlib.Path) -> int:
    """Returns how many steps a run has logged so far."""
    path = workdir / "steps.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_steps(workdir: pathlib.Path, number: int, is_running, log, timeout: float = 240) -> None:
    """Waits until a run has logged so many steps."""
    deadline = time.monotonic() + timeout
    while num_steps(workdir) < number:
        assert is_running(), f"the run has ended after {num_steps(workdir)} steps: {log()}"
        assert time.monotonic() < deadline, f"the run has come to step {num_steps(workdir)}: {log()}"
        time.sleep(0.2)


def difference_from_one_process(workdir: pathlib.Path, backend: str, folder: pathlib.Path) -> float:
    """Returns the largest difference of a step's loss from that of an uninterrupted run of one process."""
    alone = folder / f"alone-{backend}"
    if not alone.exists():
        arguments = [f"--backend={backend}", "--model=lenet", "--dataset=digits", "--batch_size=64", "--epochs=20"]
        done = run(ROOT / "recipes" / "train.py", *arguments, *FLAGS, f"--workdir={alone}")
        assert done.returncode == 0, done.stderr
    expected, received = ({line["step"]: line["loss"] for line in steps_in(path)} for path in (alone, workdir))
    assert list(expected) == list(received) == list(range(1, NUM_STEPS + 1))
    return float(np.max(np.abs(np.subtract(list(received.values()), list(expected.values())))))
