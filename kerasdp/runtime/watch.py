"""Finds out that ranks of a run do different things, that one hangs, or does not heed a signal."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from kerasdp.errors import RunError, UserError, WorkerError
from kerasdp.runtime import lines, signals
from kerasdp.runtime.heartbeat import SECONDS_BETWEEN_SIGNS, Heartbeat
from kerasdp.runtime.link import Link
from kerasdp.runtime.outcome import Place
from kerasdp.runtime.rank import ALIKE, CALL, COMPILING, END, MEETING, NUM_RECENT, OUTSIDE, OVER, STEP, Rank, read_rank

# A rank without a sign of life for so long is stopped, or gone.
_SECONDS_OF_SILENCE = 6 * SECONDS_BETWEEN_SIGNS
# So long may the other ranks need to leave a call that one has left, after the last step that they share.
_SECONDS_TO_FOLLOW = 10.0
# What builds and compiles may take so long, or `hang_timeout` if that is longer.
SECONDS_TO_COMPILE = 3600.0
# After a signal, and after a second one: what does not heed it is killed. Kubernetes waits for 30 s, Docker for 10 s.
_SECONDS_TO_HEED, _SECONDS_TO_HEED_AGAIN = 20.0, 5.0


def find_error(ranks: list[Rank], num_ranks: int, timeout: float | None) -> RunError | None:
    """Returns what ends the run; None if nothing does.

    Args:
        ranks: that have begun.
        num_ranks: that there are.
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
        begun = range(max(one.num_events, two.num_events) - NUM_RECENT + 1, min(one.num_events, two.num_events) + 1)
        if any(
            one.recent[number % NUM_RECENT] != two.recent[number % NUM_RECENT] for number in begun if number > 0
        ) or (one.num_meetings == two.num_meetings and first.meeting[0] != other.meeting[0]):
            return _other_things(ranks)
    return None


def _left_behind(ranks: list[Rank]) -> RunError | None:
    """A rank that waits in a step or an exchange of a call, which another has left, or waits in for its next call."""
    now = time.monotonic()
    for waiting in ranks:
        call, state = waiting.record.call, waiting.record.state
        # JAX and TensorFlow return from a step at once: whoever reads a loss waits.
        waits = state in (STEP, COMPILING) or (state == CALL and lines.is_of_framework(waiting.notes.place))
        if not waits or now - waiting.record.since < _SECONDS_TO_FOLLOW or not call:
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
        words = ", ".join(f"{rank.name} left {rank.notes.error}" for rank in failed)
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
    busy = [rank for rank in behind if rank.notes.place and rank.notes.is_of_user]
    culprits = silent or (busy if len(behind) == len(ranks) and busy else behind)
    words = []
    for rank in culprits:
        place = "its process is stopped" if rank in silent else f"at {rank.notes.place or 'an unknown place'}"
        words.append(f"{rank.name} hangs {rank.stay}, {place}")
    waiting = [rank for rank in ranks if rank not in culprits]
    rest = f", while {_each(waiting)}" if waiting else ""
    return WorkerError(
        f"{' and '.join(words)}{rest}: nothing moved for {timeout:g} s; a higher --hang_timeout waits longer"
    )


def _each(ranks: list[Rank]) -> str:
    return ", ".join(f"{rank.name} {rank.doing()}" for rank in ranks)


@contextlib.contextmanager
def judging(link: Link | None, heartbeat: Heartbeat, timeout: float | None) -> Iterator[None]:
    """Lets process 0 of several machines look, within the context, where all of them are, as `Watch` does on one.

    Args:
        link: between the processes; None: there is one.
        heartbeat: of this process.
        timeout: see `find_error`.
    """
    if link is None:
        yield
        return
    link.num_runs += 1

    def status() -> Any:
        return [link.num_runs, *heartbeat.rank().packed()]

    def judge(statuses: list[Any]) -> RunError | None:
        if any(each is None or each[0] != link.num_runs for each in statuses):
            return None  # still in the run before this one
        ranks = [Rank.unpacked(number, link.names[number], each[1:]) for number, each in enumerate(statuses)]
        return find_error(ranks, len(ranks), timeout or None)

    kept, (link.status, link.judge) = (link.status, link.judge), (status, judge)
    try:
        yield
    finally:
        link.status, link.judge = kept


class Watch:
    """Watches over the workers of a run."""

    def __init__(self, places: list[Place], names: list[str], timeout: float | None):
        """`names`: of the workers; `timeout`: see `find_error`."""
        self._places, self._names, self._timeout = places, names, timeout
        self._last: RunError | SystemExit | None = None

    def look(self) -> RunError | SystemExit | None:
        """Returns what ends the run, if it was there at the last look, too: a rank may write while it is read."""
        ranks = self._ranks()
        error, self._last = self._last, find_error(ranks, len(self._places), self._timeout) or _unheeded(ranks)
        if error is None or self._last is None:
            return None
        for note in getattr(self._last, "__notes__", []):
            print(note, file=sys.stderr, flush=True)
        return self._last

    def different(self) -> RunError | None:
        """Returns the error of ranks that do different things; None if they do not."""
        ranks = self._ranks()
        return _different(ranks) if len(ranks) == len(self._places) else None

    def doing(self, number: int) -> str:
        """Returns in words what a rank did last."""
        found = [f"{rank.name} {rank.doing()}" for rank in self._ranks() if rank.number == number]
        return found[0] if found else self._names[number]

    def _ranks(self) -> list[Rank]:
        found = zip(self._names, map(read_rank, self._places))
        # The only worker of a run is rank 0, whatever it is called.
        return [rank._replace(name=name) if len(self._names) > 1 else rank for name, rank in found if rank is not None]


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
    words = ", ".join(
        f"{rank.name} {rank.doing()}{f', at {rank.notes.place}' if rank.notes.place else ''}" for rank in slow
    )
    error = SystemExit(128 + number)
    error.add_note(f"{signal.Signals(number).name} was not heeded for {seconds:.0f} s: {words}; killed")
    return error
