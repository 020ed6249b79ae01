"""A machine on which things go wrong: disks that turn read-only, long names of folders.

A run ends with an error of a line that names the cause, or learns bit by bit what it learns otherwise; it never hangs.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from tests.helpers import PROGRAMS, ROOT, finish, killed_at_the_end, left_after, left_in, losses_in, start

pytestmark = [pytest.mark.proof, pytest.mark.timeout(3600)]
STEPS = 32
SECONDS = float(os.environ.get("KERASDP_SECONDS", "120"))  # within which a run of two devices ends, however it ends


class Run:
    """A run of `programs/rough.py`, started as a user starts it, maybe by a command before it."""

    def __init__(self, backend, count, folder, *flags, before="", pause=0.0, **env):
        self.folder, self.workdir = folder, folder / "run"
        self.workdir.mkdir(parents=True, exist_ok=True)
        program = [sys.executable, PROGRAMS / "rough.py", folder, f"--backend={backend}", f"--gpus={count}"]
        program += ["--device=cpu", "--batch_size=16", "--epochs=4", "--log_every=1", "--checkpoint_every=4"]
        program += [f"--workdir={self.workdir}", "--resume", "--verbose=0", *flags]
        self.temporary = pathlib.Path(env.pop("TMPDIR", folder / "tmp"))
        self.temporary.mkdir(parents=True, exist_ok=True)
        env |= {"TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT), "KERASDP_TEST_PAUSE": str(pause)}
        # `exec`, so that its process is the program's.
        shell = "sh", "-ec", f"{before}\nexec {shlex.join(map(str, program))}"
        become = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        self.process = start("-c", become, *(("unshare", "-m") if before else ()), *shell, backend=None, **env)

    def after_step(self, number):
        """Waits until the run has come so far."""
        deadline = time.monotonic() + SECONDS
        while not (self.folder / f"step-{number}").exists():
            assert self.process.poll() is None, self.process.communicate()[1][-3000:]
            assert time.monotonic() < deadline, f"step {number} does not come"
            time.sleep(0.01)
        return self

    def end(self):
        """Exit code, what it said, and the seconds from now; one that does not end is killed, and fails."""
        begin = time.monotonic()
        with killed_at_the_end(self.process):
            done = finish(self.process, SECONDS)
            assert not left_after(self.process.pid, 0.2)
        return done.returncode, done.stderr.strip(), time.monotonic() - begin


def undisturbed(backend, count, folder):
    run = Run(backend, count, folder / "undisturbed")
    code, error, _ = run.end()
    assert code == 0, error
    assert len(losses_in(run.workdir)) == STEPS
    return losses_in(run.workdir)


def told(name, code, error, seconds):
    """One line of the table."""
    lines = "".join(f"\n    {line[:300]}" for line in error.splitlines()[-10:])
    print(f"\n{name}: exit code {code}, {seconds:.1f} s{lines}", flush=True)


def can_mount():
    return os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode


WITH_MOUNTS = pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces: the program unshare")


@WITH_MOUNTS
@pytest.mark.parametrize("kind", ["what is opened", "the file system"])
def test_a_workdir_that_turns_read_only(backend, kind, tmp_path):
    """What is opened: files that were open before are written. The file system: ext4 after an error of its disk."""
    workdir, image = tmp_path / "run", tmp_path / "image"
    before = f"mount -t tmpfs tmpfs {workdir}"
    turns = f"mount --bind {workdir} {workdir} && mount -o remount,bind,ro {workdir}"
    if kind == "the file system":
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("there is no mkfs.ext4")
        image.touch()
        os.truncate(image, 64 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, timeout=60)
        before, turns = f"mount -o loop {image} {workdir}", f"mount -o remount,abort {workdir}"
        tried = subprocess.run(["unshare", "-m", "sh", "-ec", f"mkdir -p {workdir}; {before}"], capture_output=True)
        if tried.returncode:
            pytest.skip(f"a file cannot be mounted: {tried.stderr.decode().strip()}")
    run = Run(backend, 2, tmp_path, before=before, pause=0.1).after_step(10)
    done = subprocess.run(["nsenter", "-t", str(run.process.pid), "-m", "sh", "-ec", turns], capture_output=True)
    code, error, seconds = run.end()
    told(f"{backend} x 2, {kind} is read-only", code, error, seconds)
    if done.returncode:
        pytest.skip(f"it cannot be made read-only: {done.stderr.decode().strip()}")
    assert code in (0, 1, 2) and "Traceback" not in error
    assert "Read-only file system" in error
    lines = [re.sub(r"\.tmp\w+", "", line) for line in error.splitlines()]
    assert len(lines) == len(set(lines)), "a file is named more than once"


@pytest.mark.parametrize("num_letters", [94, 200])
def test_a_long_temporary_folder(backend, num_letters, tmp_path):
    """As schedulers make. An address of a socket in the file system has 107 letters at most."""
    expected, temporary = undisturbed(backend, 2, tmp_path), tmp_path / "t"
    while len(str(temporary)) < num_letters:
        temporary /= "x" * max(1, min(50, num_letters - len(str(temporary)) - 1))
    run = Run(backend, 2, tmp_path / "run", TMPDIR=temporary)
    code, error, seconds = run.end()
    told(f"{backend} x 2, TMPDIR of {len(str(temporary))} letters", code, error, seconds)
    assert code == 0 and losses_in(run.workdir) == expected and error == ""
    assert left_in(temporary) == []
