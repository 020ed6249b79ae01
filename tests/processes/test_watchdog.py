"""When a process writes where it stands, and what is made of it."""

import faulthandler
import re
import threading
import time

import keras
import pytest

import kerasdp
from kerasdp.errors import UserError
from kerasdp.processes import watchdog
from kerasdp.processes.ranks import unlike
from kerasdp.processes.watchdog import SECONDS_TO_COMPILE, Watchdog, describe_stacks

PACKAGE, KIT, STANDARD = keras.__file__, kerasdp.__file__, threading.__file__


def stack(*threads):
    """As faulthandler writes it; of each thread the files, the innermost first, the main thread last."""
    blocks = []
    for files in threads:
        frames = [f'  File "{file}", line {7 + number} in f{number}' for number, file in enumerate(files)]
        blocks.append("\n".join(["Thread 0x00007f (most recent call first):", *frames]))
    return "Timeout (0:05:01)!\n" + "\n\n".join(blocks) + "\n"


WAITS = stack([PACKAGE, KIT, "mine.py", KIT])


def test_each_is_at_the_innermost_line_of_the_user():
    busy = stack([STANDARD, "mine.py", KIT, "mine.py", KIT])
    assert describe_stacks({"rank 0": WAITS, "rank 1": busy}) == (
        "rank 0 is at mine.py:9, in f2, rank 1 is at mine.py:8, in f1"
    )
    assert describe_stacks({"rank 0": stack([PACKAGE, KIT])}) == f"rank 0 is at {PACKAGE}:7, in f0"


def test_data_that_hangs_is_named_and_no_other_thread_is():
    main, reads = [STANDARD, KIT, "mine.py", KIT], ["data.py", KIT, STANDARD]
    assert "is at mine.py:9" in describe_stacks({"rank 0": stack(["beside.py", STANDARD], main)})
    assert "is at mine.py:9" in describe_stacks({"rank 0": stack([KIT, STANDARD], main)})
    assert "is at data.py:7" in describe_stacks({"rank 0": stack(["beside.py", STANDARD], reads, main)})


def test_a_process_that_is_stopped_writes_nothing():
    assert describe_stacks({"rank 0": WAITS, "rank 1": ""}).endswith(", rank 1 does not answer")


@pytest.fixture
def timers(monkeypatch):
    """The seconds of the timers that are set; 0: none is set any more."""
    found = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: found.append(seconds))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: found.append(0))
    return found


def test_a_timer_is_set_within_a_call_alone(timers):
    watching = Watchdog(timeout=5.0)
    assert timers == []
    with watching.watching():
        for _ in range(100):  # steps, which follow each other at once
            with watching.watching():
                pass
        assert timers == [5.5]
        time.sleep(0.6)
        with watching.watching():
            assert timers == [5.5, 5.5]
        with watching.compiling():
            assert timers[2:] == [SECONDS_TO_COMPILE + 0.5]
        assert timers[3:] == [5.5]
    assert timers[4:] == [0]
    with Watchdog().watching():
        assert len(timers) == 5


def test_the_first_call_with_each_shape_may_compile(timers):
    class Tensor:
        def __init__(self, *shape):
            self.shape = shape

    watching = Watchdog(timeout=5.0)
    train = watching.step_function(lambda batches: timers.append(len(batches)))
    for size in (8, 8, 3, 8):
        train([{"a": Tensor(size, 2)}] * 2)
    first, later = [SECONDS_TO_COMPILE + 0.5, 2, 0], [5.5, 2, 0]
    assert timers == [*first, *later, *first, *later]


def test_what_compiles_for_long_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "_SECONDS_TO_SAY_SO", 0.2)
    watching = Watchdog(compiler="jax")
    for _ in range(2):
        with watching.compiling():
            time.sleep(0.5)
    assert re.fullmatch(r"jax compiles: \d s so far\n", capsys.readouterr().err)


def test_says_how_long_compiling_will_take_where_that_is_known(monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "_SECONDS_TO_SAY_SO", 0.2)
    watching = Watchdog(compiler="torch")
    with watching.compiling():
        watching.seconds_to_compile = 41.6
        time.sleep(0.5)
    assert re.fullmatch(r"torch compiles: \d s of about 42 s so far\n", capsys.readouterr().err)


def test_another_thread_sets_no_timer(timers):
    watching = Watchdog(timeout=5.0)
    thread = threading.Thread(target=lambda: watching.watching().__enter__())
    thread.start()
    thread.join()
    assert timers == []


def test_other_arguments():
    def given(shown, sample):
        arguments = {"x": {"shown": shown, "sample": sample}, "epochs": {"shown": "2"}}
        return {"name": "fit", "line": "mine.py:3", "arguments": arguments}

    def error(one, other):
        found = unlike(one, other, "rank 0", "rank 1")
        assert isinstance(found, UserError)
        return str(found)

    assert unlike(given("float32 (8, 4)", 0.25), given("float32 (8, 4)", 0.2500001), "rank 0", "rank 1") is None
    assert error(given("float32 (8, 4)", 0.25), given("float32 (7, 4)", 0.25)).startswith(
        "fit (mine.py:3): expected the same x on all ranks. Received: float32 (8, 4) on rank 0, float32 (7, 4) on rank"
    )
    assert "float32 (8, 4) on rank 0, other values in the same shape on rank 1; pass the same data on every" in error(
        given("float32 (8, 4)", 0.25), given("float32 (8, 4)", 0.26)
    )
