"""What ranks write down, and what whoever watches over them makes of it."""

import os
import re
import threading
import time

import pytest

from kerasdp.errors import UserError
from kerasdp.runtime import heartbeat, outcome, watch
from kerasdp.runtime.heartbeat import NUM_RECENT, Heartbeat, Rank, State, read_rank, unlike
from kerasdp.runtime.link import Link
from kerasdp.runtime.outcome import Place

FIT = ("fit", "mine.py:3")
IN_FIT = ((1, "fit (mine.py:3)"),)


def change_of_place(place):
    """Whether a place is the user's."""
    return place.startswith("mine.py")


@pytest.fixture
def ranks():
    """Makes ranks, which by default wait in step 5 of the same `fit`."""

    def make(*changes):
        now, made = time.monotonic(), []
        for number, change in enumerate(map(dict, changes)):
            events = tuple(change.pop("events", ["before fit", "train"]))
            seconds, silent = change.pop("seconds", 20.0), change.pop("silent", 0.0)
            change = {"state": State.STEP, "step": 5, "num_meetings": 1, "meeting": FIT, "calls": IN_FIT} | change
            change["is_of_user"] = change_of_place(change.get("place", ""))
            times = {"since": now - seconds, "alive": now - silent}
            made.append(Rank(f"rank {number}", **change, **times, num_events=len(events), recent=events[-NUM_RECENT:]))
        return made

    return make


def find(ranks, timeout=10.0):
    error = watch.find_error(ranks, timeout)
    return error and str(error)


def test_nothing_to_see(ranks):
    assert find(ranks({}, {"seconds": 1.0})) is None  # one that moves is enough
    assert find(ranks({"seconds": 9.0}, {"seconds": 9.5})) is None
    assert find(ranks({}, {}), timeout=None) is None
    assert watch.find_error([*ranks({}), None], 10.0) is None  # the other one has not begun
    away = {"state": State.OUTSIDE, "calls": ()}
    assert find(ranks(away, {**away, "state": State.END})) is None  # in the script for as long as it likes


def test_a_process_that_is_stopped(ranks):
    text = find(ranks({}, {"silent": 19.0}))
    assert text.startswith(
        "rank 1 hangs in step 5 of fit (mine.py:3), its process is stopped, while rank 0 is in step 5 of fit "
        "(mine.py:3): nothing moved for 10 s"
    )


def test_a_rank_that_is_behind(ranks):
    """It is still between two steps (in a callback, or at its data), while the other one waits in the next step."""
    ahead = {"events": ["before fit", "train", "train"], "place": "site-packages/torch/distributed.py:3, in all_reduce"}
    text = find(ranks(ahead, {"state": State.CALL, "place": "mine.py:7, in load"}))
    assert text.startswith("rank 1 hangs after step 5 of fit (mine.py:3), at mine.py:7, in load, while rank 0 is")


def test_a_rank_that_is_busy_elsewhere(ranks):
    """All are in the same step; one is in code of a user, the others wait for it in the framework."""
    package = os.path.dirname(pytest.__file__).removesuffix("/pytest")
    framework = {"place": f"{package}/torch/autograd/graph.py:3, in backward"}
    assert find(ranks(framework, {"place": "mine.py:7, in call"})).startswith("rank 1 hangs in step 5 of fit")


def test_what_compiles_has_an_hour(ranks):
    """Be it the rank that all wait for; not one that waits in its first step for another."""
    assert find(ranks({"events": ["before fit"] + 2 * ["train"]}, {"state": State.COMPILING})) is None
    assert find(ranks({"state": State.COMPILING, "seconds": 3599.0})) is None
    assert find(ranks({"state": State.COMPILING, "seconds": 3601.0})).startswith("rank 0 hangs")
    waits = {"state": State.COMPILING, "events": ["before fit", "train", "test"]}
    assert find(ranks(waits, {"state": State.CALL, "place": "mine.py:7, in log"})).startswith("rank 1 hangs")


def test_a_rank_that_does_not_come(ranks):
    there = {"state": State.MEETING, "calls": (), "events": ["before fit"]}
    away = {**there, "state": State.OUTSIDE, "num_meetings": 0, "events": [], "place": "mine.py:2, in train"}
    text = find(ranks(there, away))
    assert text.startswith("rank 1 hangs in the script, at mine.py:2, in train, while rank 0 calls fit (mine.py:3)")


def test_ranks_before_different_calls(ranks):
    """Known at once."""
    there = {"state": State.MEETING, "calls": (), "seconds": 0.1, "step": 0}
    other = ("evaluate", "mine.py:4")
    text = find(ranks({**there, "events": ["before fit"]}, {**there, "meeting": other, "events": ["before evaluate"]}))
    assert text.startswith("the ranks do different things: rank 0 calls fit (mine.py:3), rank 1 calls evaluate (mine.")
    assert text.endswith("belong under `if runner.is_chief:`")


def test_ranks_in_different_steps(ranks):
    """Known at once, though both may still move: the ends of two epochs, say."""
    begun = ["before fit", "train"]
    one, two = ({"events": [*begun, name], "seconds": 0.1} for name in ("train", "any_rank"))
    assert "the ranks do different things" in find(ranks(one, two))
    assert find(ranks(one, {"events": [*begun, "train", "any_rank"]})) is None
    # Of those that are long ago nothing is known.
    many = ["before fit", *["train"] * 40]
    assert find(ranks({"events": many, "seconds": 0.1}, {"events": [*many, "test"]})) is None
    assert find(ranks({"events": [*many, "train"], "seconds": 0.1}, {"events": [*many, "test"]})) is not None


def test_other_arguments():
    def given(shown, sample):
        arguments = {"x": {"shown": shown, "sample": sample}, "epochs": {"shown": "2"}}
        return {"name": "fit", "line": "mine.py:3", "arguments": arguments}

    def error(one, other):
        return str(unlike(one, other, "rank 0", "rank 1"))

    assert unlike(given("float32 (8, 4)", 0.25), given("float32 (8, 4)", 0.2500001), "rank 0", "rank 1") is None
    assert error(given("float32 (8, 4)", 0.25), given("float32 (7, 4)", 0.25)).startswith(
        "fit (mine.py:3): expected the same x on all ranks. Received: float32 (8, 4) on rank 0, float32 (7, 4) on rank"
    )
    assert "float32 (8, 4) with some values on rank 0, others on rank 1; every rank takes its rows" in error(
        given("float32 (8, 4)", 0.25), given("float32 (8, 4)", 0.26)
    )


@pytest.mark.parametrize("state", [State.OUTSIDE, State.END, State.MEETING])
def test_a_rank_that_left_a_call(ranks, state):
    """The other one waits in it in vain; for 20 seconds it may still be on its way out."""
    left = {"state": state, "calls": (), "seconds": 30.0, "step": 0}
    if state != State.OUTSIDE:
        left |= {"num_meetings": 2, "meeting": ("" if state == State.END else "fit", "mine.py:3")}
        left["events"] = ["before fit", "train", "before fit"]
    for error in ("", "fit (mine.py:3) by ValueError: bad luck (mine.py:9)"):
        assert find(ranks({"seconds": 19.0}, {**left, "error": error}), 100.0) is None
        text = find(ranks({"seconds": 21.0}, {**left, "error": error}), 100.0)
        assert ("rank 1 left fit (mine.py:3) by ValueError: bad luck (mine.py:9), which did not end" in text) == (
            error != ""
        )
    # A nested call's own number is not that of the call around it.
    nested = {"calls": (*IN_FIT, (2, "fit (mine.py:3)")), "num_meetings": 2, "state": State.STEP, "seconds": 1.0}
    assert find(ranks({"seconds": 21.0}, nested), 100.0) is None


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where this process leaves its files, as a worker does."""
    monkeypatch.setattr(outcome, "_place", found := Place(str(tmp_path), 0, 1))
    return found


def test_a_real_one_says_where_it_is(place):
    beating = Heartbeat()
    assert find([read_rank(place, "rank 0")], 0.1) is None
    with beating.of_run():
        with beating.call("fit"):
            time.sleep(1.7)
            rank = read_rank(place, "rank 0")
            assert find([rank], 1.0).startswith(
                f"rank 0 hangs in fit (test_heartbeat.py:{line_of('fit')}), at {__file__}:"
            )
            shipped = beating.rank.with_ages()._replace(name="host 3").with_ages()
            assert find([shipped], 1.0).startswith("host 3 hangs in fit (test_heartbeat.py:")
        assert find([read_rank(place, "rank 0")], 1e-9) is None
    assert read_rank(place, "rank 0").state == State.OVER


def line_of(name):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if f'beating.call("{name}")' in line)


def test_the_first_call_with_each_shape_may_compile(place):
    beating, states = Heartbeat(), []

    def state():
        return read_rank(place, "rank 0").state

    class Tensor:
        def __init__(self, *shape):
            self.shape = shape

    def of_batches(batches):
        states.append([len(batches), state()])

    def of_batch(batch):
        states.append([len(batch["a"]), state()])

    train = beating.step_function("train", of_batches, lambda: 0)
    test = beating.step_function("test", of_batch, lambda: 0)
    for size in (8, 8, 3, 8, 3):
        train([{"a": [Tensor(size, 2)]}] * 2)
        test({"a": [Tensor(size, 2)]})
    first, later = ([[2, kind], [1, kind]] for kind in (State.COMPILING, State.STEP))
    assert states == [*first, *later, *first, *later, *later]
    assert state() == State.OUTSIDE


def test_ranks_meet_before_a_call(tmp_path):
    """Each begins when the other is there; with another argument none does."""
    done, errors = [], []

    def rank(number, *calls):
        heartbeat = Heartbeat(link=Link.among(number, 2, str(tmp_path / "link")))
        try:
            for name, shown in calls:
                time.sleep(0.2 * number)
                with heartbeat.call(name, {"x": {"shown": shown}}):
                    done.append((name, number, time.monotonic()))
        except UserError as error:
            errors.append(str(error))

    calls = [("fit", "8"), ("evaluate", "8"), ("fit", "8")]
    threads = [
        threading.Thread(target=rank, args=(number, *calls, ("fit", str(number))), daemon=True) for number in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(name for name, *_ in done) == ["evaluate", "evaluate", "fit", "fit", "fit", "fit"]
    for one, two in zip(done[::2], done[1::2], strict=True):
        assert one[0] == two[0] and abs(one[2] - two[2]) < 0.15
    assert len(errors) == 2 and len(set(errors)) == 1
    assert "expected the same x on all ranks. Received: 0 on rank 0, 1 on rank 1" in errors[0]


def test_one_process_says_where_it_is(capsys):
    """Nobody watches over it, and nobody waits for it: a line, once for each place."""
    beating = Heartbeat(tell_after=0.6)
    with beating.of_run():
        time.sleep(1.2)
        with beating.call("fit"):
            time.sleep(2.2)
    err = capsys.readouterr().err
    assert err.count("nothing has moved for 1 s in fit (test_heartbeat.py:") == 1
    assert f"at {__file__}" in err and "--hang_timeout ends such a run" in err


def test_what_compiles_for_long_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(heartbeat, "_SECONDS_TO_COMPILE", 0.6)
    beating = Heartbeat(compiler="jax")
    with beating.of_run():
        for _ in range(2):
            with beating.compiling():
                time.sleep(1.6)
    assert re.fullmatch(r"jax compiles: \d s so far\n", capsys.readouterr().err)
