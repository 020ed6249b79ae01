"""Hosts of one run that were started differently: named in one line on each of them, soon, or trained alike."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import time

import pytest

import kerasdp
from kerasdp.errors import FIELDS_OF_FLAGS
from tests.helpers import (
    HOST_BACKENDS,
    PROGRAMS,
    ROOT,
    finish,
    session_members,
    some_images,
    start,
    write_idx,
)
from tests.hosts.differing import FIELDS, Alone, Differs, Free
from tests.hosts.together import free_port, place_in_run

SECONDS_TO_START, SECONDS_TO_TELL = 40, 20
FLAGS = {field: flag for flag, field in FIELDS_OF_FLAGS.items()}
BASE = {
    "device": "cpu", "model": "mlp", "dataset": "digits", "batch_size": 64,
    "epochs": 1, "verbose": 0,
}  # fmt: skip
DIFFERENT = [
    pytest.param(backend, name, id=f"{name}-{backend}", marks=pytest.mark.proof)
    for name, entry in FIELDS.items()
    if isinstance(entry, Differs)
    for backend in entry.backends
]
ENDS_TOGETHER = "-"
RAISES = "raises_before"
# What a program of the user's does otherwise on host 1, and what the line is about; None: words that the test leaves.
PROGRAM_CASES = {
    "other_rows": None,
    "other_targets": None,
    "fewer_rows": r"\b64\b.*\b56\b",
    "other_weights": "weight|variable|kernel",
    "other_layers": None,
    "evaluates": "evaluate",
    "returns_before": "fit|end",
    RAISES: "process 1 failed: .*the second host gives up|another process of the run has gone",
    "fewer_epochs": r"epochs",
    "one_more_fit": "fit|end",
    # What one rank decides is what all do.
    "stops_within": ENDS_TOGETHER,
    "stops_early": ENDS_TOGETHER,
    "validates": "validation_data",
}


@contextlib.contextmanager
def ending():
    """Programs that are started here have ended behind the context, with all that they have started."""
    programs = []
    try:
        yield programs
    finally:
        for program in programs:
            for pid in session_members(program.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def recipe(fields):
    """The command of recipes/train.py with these fields as flags."""
    flags = []
    for name, value in fields.items():
        if isinstance(value, bool):
            flags += [f"--{name}"] if value else []
        elif value is not None:
            flags.append(f"--{FLAGS.get(name, name)}={value}")
    return [ROOT / "recipes" / "train.py", *flags]


def ended(programs, seconds):
    """The ends of programs that have so many seconds together; those that hang are killed, and said to."""
    end, done = time.monotonic() + seconds, []
    while time.monotonic() < end and any(program.poll() is None for program in programs):
        time.sleep(0.05)
    hang = [number for number, program in enumerate(programs) if program.poll() is None]
    for number in hang:
        for pid in session_members(programs[number].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for program in programs:
        done.append(finish(program, 20))
    assert not hang, f"hosts {hang} hang\n" + "\n".join(each.stdout + each.stderr for each in done)
    return done


def error_of(done):
    """The one line of a program that a user's mistake has ended."""
    text = done.stdout + done.stderr
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and "Traceback" not in text, f"exit code {done.returncode}\n{text}"
    return errors[0]


def train_both(backend, folder, both, changes):
    """Ends of two hosts, of which host 1 has some fields otherwise."""
    port = free_port()
    common = BASE | {"backend": backend, "workdir": str(folder / "run")} | both
    with ending() as programs:
        for rank, own in enumerate((common, common | changes)):
            own = {
                name: value.format(folder=folder) if isinstance(value, str) else value for name, value in own.items()
            }
            place = place_in_run(backend, rank, 2, port)
            programs.append(start(*recipe(own), backend=backend, cwd=folder, **place))
        return ended(programs, SECONDS_TO_START + SECONDS_TO_TELL)


def says(value, line):
    """Whether a line has a value, however it writes it."""
    if value is None:
        return True
    return str(value) in line or repr(value) in line


def test_each_field_is_said_to_be_alike_or_free():
    """A new one goes into the table of differing.py."""
    assert set(FIELDS) == {field.name for field in dataclasses.fields(kerasdp.Config)}


def test_second_values_are_others_and_may_be_chosen():
    for name, entry in FIELDS.items():
        if isinstance(entry, Differs):
            for backend in entry.backends:
                both = BASE | {"backend": backend, "workdir": "runs"} | entry.both
                first, second = kerasdp.Config(**both), kerasdp.Config(**both | {name: entry.value})
                assert getattr(first, name) != getattr(second, name), name
        else:
            assert isinstance(entry, Free | Alone)


@pytest.mark.parametrize(("backend", "name"), DIFFERENT)
def test_a_field_that_differs_is_named_on_every_host(backend, name, tmp_path):
    entry = FIELDS[name]
    first = (BASE | {"backend": backend} | entry.both).get(name, getattr(kerasdp.Config(), name))
    begin = time.monotonic()
    done = train_both(backend, tmp_path, entry.both, {name: entry.value})
    lines = list(map(error_of, done))
    print(f"\n{backend}, {name}, {time.monotonic() - begin:.1f} s: {lines[0]}")
    for line in lines:
        assert re.search(rf"--{FLAGS.get(name, name)}\b", line), line
        assert says(first, line) and says(entry.value, line), line
        assert "process 0" in line and "process 1" in line, line


@pytest.mark.proof
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_fields_that_may_differ_change_no_loss(backend, tmp_path):
    """All of them at once, against a run in which none does."""
    changes = {name: entry.value for name, entry in FIELDS.items() if isinstance(entry, Free)}
    assert len(changes) > 6
    losses = []
    for case, others in (("alike", {}), ("other", changes)):
        folder = tmp_path / case
        for name in ("data", "data-of-host-0"):
            (folder / name).mkdir(parents=True)
            for split, count in (("train", 400), ("t10k", 100)):
                write_idx(folder / name, split, *some_images(count, 28, 28))
        both = {"log_every": 1, "max_steps": 6, "dataset": "mnist", "data_dir": "{folder}/data-of-host-0"}
        done = train_both(backend, folder, both, others)
        assert [each.returncode for each in done] == [0, 0], [each.stdout + each.stderr for each in done]
        lines = (folder / "run" / "steps.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 6 and losses[0] == losses[1]


def start_programs(backend, program, of_host_1=()):
    port = free_port()
    fields = json.dumps({"backend": backend, "seed": 0})
    program, *arguments = program
    with ending() as programs:
        for rank in (0, 1):
            command = [*(of_host_1 if rank else ()), PROGRAMS / program, *arguments, fields]
            place = place_in_run(backend, rank, 2, port)
            programs.append(start(*command, backend=backend, PYTHONPATH=str(ROOT), **place))
        return ended(programs, 60)


@pytest.mark.proof
@pytest.mark.parametrize("what", ["kerasdp", "keras", "backend", "python"])
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_versions_that_differ_are_named(backend, what):
    what = backend if what == "backend" else what
    other = [PROGRAMS / "other_versions.py", what, "9.8.7"]
    for done in start_programs(backend, ["differing.py", "nothing"], other):
        line = error_of(done)
        assert what in line.lower() and "9.8.7" in line and "process 0" in line and "process 1" in line, line


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.proof) for case in PROGRAM_CASES])
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_what_host_1_does_otherwise_is_named_on_every_host(backend, case):
    done = start_programs(backend, ["differing.py", case])
    if PROGRAM_CASES[case] == ENDS_TOGETHER:
        assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
        return
    print()
    if case == RAISES:  # a stack, as of any error of a program's own
        assert "RuntimeError: the second host gives up" in done.pop().stderr
    for each in done:
        text = each.stdout + each.stderr
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        print(f"{backend}, {case}: exit code {each.returncode}, {errors}")
        assert each.returncode in (1, 2) and errors and "Traceback" not in text, text
        assert re.search(PROGRAM_CASES[case] or "", errors[0]), errors[0]
    # Both may say the same; at least one names who does what.
    assert case == RAISES or re.search("process 1|rank 1", done[0].stderr), done[0].stderr


@pytest.mark.proof
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_hosts_that_do_the_same_train(backend):
    first, second = start_programs(backend, ["differing.py", "nothing"])
    assert first.returncode == 0 and "ENDS" in first.stdout, first.stdout + first.stderr
    assert second.returncode == 0, second.stdout + second.stderr
