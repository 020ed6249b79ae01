"""What the tests on GPUs and TPUs run on.

python -m pytest -m gpu             on whatever this machine has; a test skips by name for what is not there
python -m pytest -m gpu --rehearse  the same programs on two virtual CPU devices, to test the tests
python -m pytest -m gpu --budget=40 what is worth most first; no test begins after 40 minutes, as on a rented machine
"""

import dataclasses
import json
import time

import numpy as np
import pytest

from tests.gpu.report import seen_by
from tests.helpers import BACKENDS, run

# What a short time is spent on first: a test's name, and what its parameters must hold.
WORTH = (
    ("test_losses_are_those_on_the_cpu", "-1-", "float32"),
    ("test_a_step_of_torch_is_one_cuda_graph",),
    ("test_no_step_waits_for_the_device", "convnet", "-1"),
    ("test_benchmark", "resnet18"),
    ("test_half_precision_learns",),
    ("test_resumed_twice", "1"),
    ("test_losses_are_those_on_the_cpu", "float64"),
    ("test_the_default_command",),
    ("test_benchmark",),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts first what is worth most, where there is a budget."""
    if config.getoption("--budget") is not None:
        items.sort(key=lambda item: next((i for i, words in enumerate(WORTH) if _is_of(item, words)), len(WORTH)))


def _is_of(item: pytest.Item, words: tuple[str, ...]) -> bool:
    return "tests/gpu/" in item.nodeid and all(word in item.nodeid for word in words)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Notes when the budget begins."""
    session.config.stash[BEGIN] = time.monotonic()


BEGIN = pytest.StashKey[float]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what would begin after the budget."""
    budget = item.config.getoption("--budget")
    if budget is not None and time.monotonic() - item.config.stash[BEGIN] > 60 * budget:
        pytest.skip(f"not begun within --budget={budget:g} minutes")


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: the loss of each step, report.json, and what it wrote to stderr."""

    losses: np.ndarray
    report: dict
    errors: str


class Machine:
    """This machine's GPUs or TPUs, or, in a rehearsal, two virtual CPU devices."""

    def __init__(self, is_rehearsal, folder):
        self.is_rehearsal, self.folder, self._known = is_rehearsal, folder, {}
        self.device = "cpu" if is_rehearsal else "auto"

    def need(self, backend, count=1):
        """Skips the test unless a framework sees so many devices."""
        if backend not in BACKENDS:
            pytest.skip(f"{backend} is not installed")
        found = 2 if self.is_rehearsal else seen_by(backend)
        if found < count:
            pytest.skip(f"{backend} sees {found} GPUs or TPUs; this needs {count}")

    def need_gpu(self, what):
        """Skips the test in a rehearsal."""
        if self.is_rehearsal:
            pytest.skip(f"{what} is for GPUs alone")

    def train(self, backend, count, *flags, device=None, workdir=None, **environment):
        """Runs recipes/train.py to its end."""
        workdir = workdir or self.folder / f"run-{len(list(self.folder.iterdir()))}"
        done = run(
            "recipes/train.py", f"--backend={backend}", f"--gpus={count}", f"--device={device or self.device}",
            f"--workdir={workdir}", "--log_every=1", "--verbose=2", *flags, timeout=1500, **environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        report = json.loads((workdir / "report.json").read_text())
        if device is None:
            assert report["device_kind"] == "cpu" if self.is_rehearsal else report["device_kind"] != "cpu"
        lines = [json.loads(line) for line in (workdir / "steps.jsonl").read_text().splitlines()]
        return Run(np.array([line["loss"] for line in lines]), report, done.stderr)

    def train_on_cpu(self, backend, *flags):
        """The same on one CPU device; once for all tests."""
        if (backend, flags) not in self._known:
            self._known[backend, flags] = self.train(backend, 1, *flags, device="cpu")
        return self._known[backend, flags]


@pytest.fixture(scope="session")
def machine(request, tmp_path_factory):
    """What the tests run on."""
    return Machine(request.config.getoption("--rehearse"), tmp_path_factory.mktemp("runs"))
