"""What the tests on GPUs and TPUs run on.

python -m pytest -m gpu             on whatever this machine has; a test skips by name for what is not there
python -m pytest -m gpu --rehearse  the same programs on two virtual CPU devices, to test the tests
"""

import dataclasses
import functools
import json

import numpy as np
import pytest

from tests.helpers import BACKENDS, losses_in, result_of, run


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: the loss of each step, report.json, and what it wrote to stderr."""

    losses: np.ndarray
    report: dict
    errors: str


@functools.cache
def seen_by(backend):
    """How many GPUs or TPUs of this machine a run of a backend would take."""
    program = (
        f"from kerasdp.backends.{backend}.devices import make_devices; from kerasdp.config import Config; "
        f"found = make_devices(Config(backend={backend!r})); print('RESULT', found.count * found.is_accelerator)"
    )
    return result_of(run("-c", program))


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
        return Run(np.array(losses_in(workdir)), report, done.stderr)

    def train_on_cpu(self, backend, *flags):
        """The same on one CPU device; once for all tests."""
        if (backend, flags) not in self._known:
            self._known[backend, flags] = self.train(backend, 1, *flags, device="cpu")
        return self._known[backend, flags]


@pytest.fixture(scope="session")
def machine(request, tmp_path_factory):
    """What the tests run on."""
    return Machine(request.config.getoption("--rehearse"), tmp_path_factory.mktemp("runs"))
