"""What a program that ends says last: one line, from a script too, and how to resume."""

import signal

import pytest

from tests.helpers import PROGRAMS, run

SCRIPT = """
import kerasdp
def train({arguments}):
    raise AssertionError("not reached")
{call}
"""


def ended(call="kerasdp.launch(train)", arguments="", **extra):
    return run("-c", SCRIPT.format(call=call, arguments=arguments), **extra)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("kerasdp.launch(train)", "launch: expected a function of one argument, as train(runner). Received: train()"),
        ("kerasdp.launch(train, lr=1.0)", "launch: there is no argument 'lr'; did you mean learning_rate=1.0?"),
        ("kerasdp.launch(train, batch_size=0)", "batch_size: expected a whole number of at least 1. Received: 0"),
    ],
)
def test_a_scripts_error_is_a_line(call, words):
    done = ended(call)
    assert (done.returncode, done.stderr) == (1, f"error: {words}\n")


@pytest.mark.proof
def test_ctrl_c_in_a_script_is_a_line():
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # or a job is deaf
    done = ended(heard + "kerasdp.launch(lambda runner: signal.raise_signal(signal.SIGINT), verbose=0)")
    assert done.returncode == -signal.SIGINT
    assert (
        done.stderr.startswith("interrupted; it kept no checkpoints: add workdir, and no ")
        and done.stderr.count("\n") == 1
    )


def test_frames_are_shown_if_asked_for():
    first, *_, last = ended(KERASDP_TRACEBACK="1").stderr.splitlines()
    assert first == "Traceback (most recent call last):" and last.startswith("kerasdp.errors.UserError: launch:")


def test_an_error_can_be_caught_and_other_errors_have_their_frames():
    catching = "try: kerasdp.launch(train)\nexcept kerasdp.UserError as error: print(error)\nraise KeyError('mine')"
    done = ended(catching)
    assert done.stdout.startswith("launch: expected a function of one argument")
    assert "line 7, in <module>" in done.stderr and done.stderr.endswith("KeyError: 'mine'\n")


def test_ctrl_c_says_how_to_resume(tmp_path):
    done = run(PROGRAMS / "ctrl_c.py", f"--workdir={tmp_path}/run", "--device=cpu", backend="torch")
    path = tmp_path / "run" / "checkpoints" / "step-00000002.safetensors"
    assert path.exists()
    expected = f"interrupted; the newest checkpoint is {path}; resume with --resume"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, expected)


def test_ctrl_c_says_that_nothing_was_kept(tmp_path):
    flags = f"--workdir={tmp_path}/run", "--device=cpu", "--checkpoint_every=never"
    done = run(PROGRAMS / "ctrl_c.py", *flags, backend="torch")
    assert done.stderr.splitlines()[-1].startswith("interrupted; it kept no checkpoints: ")
