"""What a program that ends says last: one line, from a script too, and how to resume; and its exit code."""

import itertools
import os
import shlex
import signal
import time

import pytest

from tests.helpers import BACKENDS, PROGRAMS, finish, killed_at_the_end, left_after, run, start

SCRIPT = """
import kerasdp
def train(runner):
    raise AssertionError("not reached")
"""


def ended(call="kerasdp.launch(train, num_devices=0)", **extra):
    return run("-c", SCRIPT + call, **extra)


def test_a_scripts_error_is_a_line():
    done = ended()
    words = "num_devices: expected a whole number of at least 1. Received: 0"
    assert (done.returncode, done.stderr) == (2, f"error: {words}\n")


def test_frames_are_shown_if_asked_for():
    first, *_, last = ended(KERASDP_TRACEBACK="1").stderr.splitlines()
    assert first == "Traceback (most recent call last):" and last.startswith("kerasdp.errors.UserError: num_devices:")


def test_an_error_can_be_caught_and_other_errors_have_their_frames():
    catching = "try: raise kerasdp.PreemptedError('saved')\nexcept kerasdp.RunError as error: print(error.exit_code)\n"
    catching += "try: kerasdp.launch(train, num_devices=0)\nexcept kerasdp.UserError as error: print(error)\n"
    catching += "raise KeyError('mine')"
    done = ended(catching)
    assert done.stdout.startswith("99\nnum_devices: expected a whole number")
    assert "line 9, in <module>" in done.stderr and done.stderr.endswith("KeyError: 'mine'\n")


# Signals, whether they go to all processes, as a terminal's and a scheduler's do; the exit code, and whether there is a
# checkpoint.
SIGNALS = {
    "SIGTERM": ([signal.SIGTERM], False, 99, True),
    "SIGTERM to all": ([signal.SIGTERM], True, 99, True),
    "SIGUSR1": ([signal.SIGUSR1], False, 99, True),
    "SIGUSR1 to all": ([signal.SIGUSR1], True, 99, True),
    "Ctrl-C": ([signal.SIGINT], True, 130, True),
    "Ctrl-C twice": ([signal.SIGINT, signal.SIGINT], True, 130, False),
}
IN_SHORT = (
    ("script", "torch", 2, "SIGUSR1 to all"), ("script", "jax", 2, "SIGTERM"), ("recipe", "tensorflow", 1, "Ctrl-C"),
    ("script", "torch", 2, "Ctrl-C twice"),
)  # fmt: skip
CASES = list(itertools.product(("script", "recipe"), BACKENDS, (1, 2), SIGNALS))


@pytest.mark.parametrize(
    ("way", "backend", "count", "kind"),
    [pytest.param(*case, marks=[] if case in IN_SHORT else pytest.mark.proof) for case in CASES],
)
def test_a_signal_ends_a_script_as_a_recipe(way, backend, count, kind, tmp_path):
    """Soon, with all its processes; a signal to all of them is one. The last line says how to resume."""
    numbers, to_all, code, is_saved = SIGNALS[kind]
    workdir = tmp_path / "a run"
    of_script = "script", backend, count, workdir
    flags = f"--backend={backend}", f"--gpus={count}", "--device=cpu", f"--workdir={workdir}", "--verbose=0"
    given = of_script if way == "script" else ("recipe", *flags, *["--compile=off"] * (backend == "torch"))
    slow = {} if is_saved else {"SLOW": "1"}
    process = start(PROGRAMS / "signalled.py", *given, backend=backend, **slow)
    with killed_at_the_end(process):
        while process.stdout.readline().strip() != "READY":
            assert process.poll() is None, process.stderr.read()
        for number in numbers:
            os.killpg(process.pid, number) if to_all else process.send_signal(number)
            time.sleep(0.0 if is_saved else 0.6)
        begin = time.monotonic()
        done = finish(process, 60)
        assert left_after(process.pid, 20) == [] and time.monotonic() - begin < 10
    folder = workdir / "checkpoints"
    paths = [path for path in folder.glob("*") if path.name != "best.safetensors"] if folder.exists() else []
    typed = f'launch(..., workdir="{workdir}", resume=True)' if way == "script" else f"'--workdir={workdir}' --resume"
    first = f"stopped by {kind.split()[0]} after step " if code == 99 else "interrupted; the newest checkpoint is "
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, len(paths), "Traceback" in done.stderr) == (code, int(is_saved), False), done.stderr
    if not is_saved:
        assert last == "interrupted; there is no checkpoint yet"
        return
    assert last.startswith(first) and str(paths[0]) in last and last.endswith(f"; resume with {typed}")
    print(f"{way}, {backend} x {count}, {kind}: {done.returncode}, {last}")
    step = int(paths[0].stem.removeprefix("step-"))
    if way == "recipe":  # the flags as they were said, and a step more
        again = *given, *shlex.split(last.partition("; resume with ")[2]), f"--max_steps={step + 1}"
        resumed = run(PROGRAMS / "signalled.py", *again, backend=backend)
    else:
        resumed = run(PROGRAMS / "signalled.py", *given, backend=backend, RESUME="1", LAST_STEP=str(step + 4))
    assert resumed.returncode == 0, resumed.stderr


def test_ctrl_c_says_that_nothing_was_kept():
    process = start(PROGRAMS / "signalled.py", "script", "torch", 1, "-", backend="torch")
    while process.stdout.readline().strip() != "READY":
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    done = finish(process, 60)
    assert (done.returncode, done.stderr[:40]) == (130, "interrupted; the run wrote no checkpoint")
