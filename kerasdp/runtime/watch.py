"""Watches over the ranks of a run: ends it when they do different things, when one hangs, or does not heed a signal."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from kerasdp.errors import RunError, UserError, WorkerError
from kerasdp.runtime import rank_files, signals
from kerasdp.runtime.heartbeat import SECONDS_BETWEEN_SIGNS
from kerasdp.runtime.lines import is_of_user
from kerasdp.runtime.rank_files import (
    ALIKE,
    COMPILING,
    END,
    ERROR,
    MEETING,
    NUM_RECENT,
    OUTSIDE,
    OVER,
    STEP,
    Notes,
    Record,
)

_SECONDS_BETWEEN_LOOKS = 0.25
# A rank without a sign of life for so long is stopped, or gone.
_SECONDS_OF_SILENCE = 6 * SECONDS_BETWEEN_SIGNS
# So long may the other ranks need to leave a call that one has left, after the last step that they share.
_SECONDS_TO_FOLLOW = 10.0
# What builds and compiles may take so long, or `hang_timeout` if that is longer.
SECONDS_TO_COMPILE = 3600.0
# After a signal, and after a second one: what does not heed it is killed. Kubernetes waits for 30 s, Docker for 10 s.
_SECONDS_TO_HEED, _SECONDS_TO_HEED_AGAIN = 20.0, 5.0
# When a rank has failed, and torch's launcher has asked the others to end, for which it would wait for 30 s.
_SECONDS_TO_END = 5.0


class Rank(NamedTuple):
    """What is known of a rank.

    Attributes:
        number: from 0.
        record: what it wrote down with its last change.
        notes: with its last call.
        place: the line where it is, if it has not moved for some time.
    """

    number: int
    record: Record
    notes: Notes
    place: str = ""

    @property
    def meeting(self) -> dict[str, Any]:
        """Returns what it came to its last meeting for."""
        return self.notes.meetings.get(str(self.record.num_meetings), {"name": "", "line": "", "arguments": {}})

    @property
    def stay(self) -> str:
        """Returns in words where it is."""
        record, calls = self.record, " within ".join(reversed(self.notes.calls))
        if record.state in (END, OVER):
            return "at the end of the training function"
        if not calls:
            return f"in the script, after {self.notes.error}" if self.notes.error else "in the script"
        if not record.step:
            return f"in {calls}"
        return f"{'in' if record.state == STEP else 'after'} step {record.step} of {calls}"

    def doing(self) -> str:
        """Returns in words what it does."""
        if self.record.state in (END, OVER):
            return "has left the training function"
        if self.record.state != MEETING:
            return f"is {self.stay}"
        line, within = self.meeting["line"], " within ".join(reversed(self.notes.calls))
        call = f"calls {self.meeting['name']}" + (f" ({line})" if line else "")
        return f"{call} within {within}" if within else call


def read_ranks(folder: str, num_ranks: int) -> list[Rank]:
    """Returns the ranks that have begun."""
    found = []
    for number in range(num_ranks):
        record = rank_files.read_record(folder, number)
        if record is not None and record.process:
            notes, place = rank_files.read_notes(folder, number), rank_files.read_place(folder, number)
            found.append(Rank(number, record, notes, place))
    return found


def find_error(ranks: list[Rank], num_ranks: int, timeout: float | None) -> RunError | None:
    """Returns what ends the run; None if nothing does.

    Args:
        ranks: that have begun.
        num_ranks: that are watched over; 0: none, and only signals and errors are looked after.
        timeout: `hang_timeout` in seconds; None: never.
    """
    if len(ranks) < num_ranks or not ranks:
        return None
    return _different(ranks) or _left_behind(ranks) or (_hanging(ranks, timeout) if timeout else None)


def _different(ranks: list[Rank]) -> RunError | None:
    """Ranks whose next call is another, or that began other steps or exchanges in other places."""
    first = ranks[0]
    for other in ranks[1:]:
        one, two = first.record, other.record
        meets = one.num_meetings == two.num_meetings and rank_files.are_alike(first.meeting, other.meeting)
        begun = range(max(one.num_events, two.num_events) - NUM_RECENT + 1, min(one.num_events, two.num_events) + 1)
        others = any(
            one.recent[number % NUM_RECENT] != two.recent[number % NUM_RECENT] for number in begun if number > 0
        )
        if one.num_meetings == two.num_meetings and not meets and first.meeting["name"] == other.meeting["name"]:
            return rank_files.unlike(first.meeting, other.meeting, f"rank {first.number}", f"rank {other.number}")
        if others or (one.num_meetings == two.num_meetings and not meets):
            return _other_things(ranks)
    return None


def _left_behind(ranks: list[Rank]) -> RunError | None:
    """A rank that waits in a step or an exchange of a call, which another has left, or waits in for its next call."""
    now = time.monotonic()
    for waiting in ranks:
        call = waiting.record.call
        if waiting.record.state not in (STEP, COMPILING) or now - waiting.record.since < _SECONDS_TO_FOLLOW or not call:
            continue
        for other in ranks:
            record = other.record
            has_left = record.num_meetings >= call and call not in (record.call, record.outer_call)
            if has_left or (record.state == MEETING and record.num_meetings > waiting.record.num_meetings):
                return _other_things(ranks)
    return None


def _other_things(ranks: list[Rank]) -> RunError:
    failed = [rank for rank in ranks if rank.notes.error]
    others = [rank for rank in ranks if not rank.notes.error]
    if failed and others:
        words = ", ".join(f"rank {rank.number} left {rank.notes.error}" for rank in failed)
        return WorkerError(
            f"{words}, which did not end the run, while {_each(others)}: let the error end the run, or raise it on all "
            "ranks"
        )
    return UserError(f"the ranks do different things: {_each(ranks)}: {ALIKE}")


def _hanging(ranks: list[Rank], timeout: float) -> RunError | None:
    """A run in which nothing moves, though a rank waits in a call."""
    now = time.monotonic()
    if all(rank.record.state in (OUTSIDE, END, OVER) for rank in ranks):
        return None
    if any(now - rank.record.since < timeout for rank in ranks):
        return None
    last = min(rank.record.num_events for rank in ranks)
    behind = [rank for rank in ranks if rank.record.num_events == last]
    if any(
        now - rank.record.since < max(timeout, SECONDS_TO_COMPILE) for rank in behind if rank.record.state == COMPILING
    ):
        return None
    silent = [rank for rank in ranks if now - rank.record.alive > _SECONDS_OF_SILENCE]
    # All wait in the framework for one that is busy with something else.
    busy = [rank for rank in behind if rank.place and is_of_user(rank.place)]
    culprits = silent or (busy if len(behind) == len(ranks) and busy else behind)
    words = []
    for rank in culprits:
        place = "its process is stopped" if rank in silent else f"at {rank.place or 'an unknown place'}"
        words.append(f"rank {rank.number} hangs {rank.stay}, {place}")
    waiting = [rank for rank in ranks if rank not in culprits]
    rest = f", while {_each(waiting)}" if waiting else ""
    return WorkerError(
        f"{' and '.join(words)}{rest}: nothing moved for {timeout:g} s; a higher --hang_timeout waits longer"
    )


def _each(ranks: list[Rank]) -> str:
    return ", ".join(f"rank {rank.number} {rank.doing()}" for rank in ranks)


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:  # on Linux: ended, but not yet waited for
        return file.read().rpartition(")")[2].split()[0] == "Z"
    return False


class Watch:
    """Watches, within its context, over the ranks that write into a folder.

    Attributes:
        error: for which it has ended the run; None: for none.
    """

    def __init__(self, folder: str, num_ranks: int, timeout: float | None):
        """`timeout`: see `find_error`."""
        self.error: RunError | SystemExit | None = None
        self._folder, self._num_ranks, self._timeout = folder, num_ranks, timeout
        self._is_over = threading.Event()
        self._failed_since = 0.0
        self._gone: list[Rank] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._look, daemon=True, name="watch").start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()

    def explanation(self, failed: Iterable[int], is_told: bool) -> RunError | SystemExit | None:
        """Returns why the run ended, where the ranks that failed, of which one is seen, do not say it themselves.

        Args:
            failed: ranks whose processes were seen to fail.
            is_told: whether a rank has written down what is wrong; the others may have been ended before they could.
        """
        if self.error is not None:
            return self.error
        gone = {rank.number for rank in self._gone}
        if gone and not is_told and not gone & {*failed} and not signals.seconds_since_passed_on():
            return WorkerError(f"{_each(self._gone)}: its process ended by itself, without an error")
        ranks = self._ranks()
        return _different(ranks) if len(ranks) == self._num_ranks else None

    def _ranks(self) -> list[Rank]:
        return read_ranks(self._folder, self._num_ranks)

    def _look(self) -> None:
        was_found = False
        while not self._is_over.wait(_SECONDS_BETWEEN_LOOKS):
            ranks = self._ranks()
            if self._has_failed(ranks):
                if time.monotonic() - self._failed_since > _SECONDS_TO_END:
                    _kill(ranks)
                    return
                continue
            error = find_error(ranks, self._num_ranks, self._timeout) or _unheeded(ranks)
            if error is not None and was_found:  # twice: a rank may write while its files are read
                self.error = error
                _kill(ranks)
                return
            was_found = error is not None

    def _has_failed(self, ranks: list[Rank]) -> bool:
        """Returns whether a rank has failed; the others are then asked to end, but may not heed it."""
        if self._failed_since:
            return True
        ended = [rank for rank in ranks if rank.record.state != OVER and _has_ended(rank.record.process)]
        errors = tuple(name for name in os.listdir(self._folder) if name.endswith(ERROR))  # read after that
        self._gone = [rank for rank in ended if not any(name.endswith(f"-{rank.number}{ERROR}") for name in errors)]
        if ended or errors:
            self._failed_since = time.monotonic()
        return bool(self._failed_since)


def _unheeded(ranks: list[Rank]) -> SystemExit | None:
    """A signal that was passed on to the ranks, some of which have not noted it, or a second one."""
    signals_passed = signals.seconds_since_passed_on()
    if not signals_passed or not ranks:
        return None
    number, seconds = signals_passed[0]
    again = [since for _, since in signals_passed[1:] if seconds - since > signals.SECONDS_OF_ONE]
    slow = [rank for rank in ranks if not (rank.record.is_finishing or rank.record.state == OVER)]
    if again and again[0] > _SECONDS_TO_HEED_AGAIN:
        slow = ranks
    elif seconds <= _SECONDS_TO_HEED or not slow:
        return None
    words = ", ".join(f"rank {rank.number} {rank.doing()}{f', at {rank.place}' if rank.place else ''}" for rank in slow)
    print(
        f"{signal.Signals(number).name} was not heeded for {seconds:.0f} s: {words}; killed",
        file=sys.stderr,
        flush=True,
    )
    return SystemExit(128 + number)


def _kill(ranks: list[Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.record.process, signal.SIGKILL)
