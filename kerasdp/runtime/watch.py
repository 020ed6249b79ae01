"""Judges ranks of a run that do different things, one that hangs, and those that do not heed a signal."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kerasdp.errors import RunError, UserError, WorkerError
from kerasdp.runtime import lines, signals
from kerasdp.runtime.heartbeat import ALIKE, SECONDS_BETWEEN_SIGNS, Heartbeat, Rank, State
from kerasdp.runtime.link import Link

# A rank without a sign of life for so long is stopped, or gone.
_SECONDS_OF_SILENCE = 6 * SECONDS_BETWEEN_SIGNS
# So long may the other ranks need to leave a call that one has left, after the last step that they share. On a machine
# with more to do than cores, 10 s were too few once.
_SECONDS_TO_FOLLOW = 20.0
# What builds and compiles may take so long, or `hang_timeout` if that is longer.
SECONDS_TO_COMPILE = 3600.0
# After a signal, and after a second one: what does not heed it is killed. Kubernetes waits for 30 s, Docker for 10 s.
_SECONDS_TO_HEED, _SECONDS_TO_HEED_AGAIN = 20.0, 5.0


def find_error(ranks: Sequence[Rank | None], timeout: float | None) -> RunError | None:
    """Returns what ends the run; None if nothing does.

    Args:
        ranks: all of the run; None: one that has not begun.
        timeout: `hang_timeout` in seconds; None: never.
    """
    if (begun := _all(ranks)) is None:
        return None
    return different(begun) or _left_behind(begun) or (_hanging(begun, timeout) if timeout else None)


def _all(ranks: Sequence[Rank | None]) -> list[Rank] | None:
    begun = [rank for rank in ranks if rank is not None]
    return begun if len(begun) == len(ranks) else None


class Judge:
    """Finds what ends the run, if it was there at the last look, too: a rank may be on its way from one to the next."""

    def __init__(self, timeout: float | None):
        """`timeout`: see `find_error`."""
        self._timeout = timeout
        self._last: RunError | None = None

    def __call__(self, ranks: Sequence[Rank | None]) -> RunError | None:
        """See `find_error`."""
        last, self._last = self._last, find_error(ranks, self._timeout)
        return self._last if last else None


def different(ranks: Sequence[Rank | None]) -> RunError | None:
    """Returns the error of ranks whose next call is another, or that began other steps or exchanges."""
    if (begun := _all(ranks)) is None:
        return None
    first = begun[0]
    for other in begun[1:]:
        is_other_call = first.num_meetings == other.num_meetings and first.meeting[0] != other.meeting[0]
        known = other.events
        if is_other_call or any(known.get(number, name) != name for number, name in first.events.items()):
            return _other_things(begun)
    return None


def _left_behind(ranks: list[Rank]) -> RunError | None:
    """A rank that waits in a step or an exchange of a call, which another has left, or waits in for its next call."""
    now = time.monotonic()
    for waiting in ranks:
        # JAX and TensorFlow return from a step at once: whoever reads a loss waits.
        waits = waiting.state in (State.STEP, State.COMPILING) or (
            waiting.state == State.CALL and lines.is_of_framework(waiting.place)
        )
        if not waits or now - waiting.since < _SECONDS_TO_FOLLOW or not waiting.calls:
            continue
        call = waiting.calls[-1][0]
        for other in ranks:
            has_left = other.num_meetings >= call and call not in dict(other.calls)
            if has_left or (other.state == State.MEETING and other.num_meetings > waiting.num_meetings):
                return _other_things(ranks)
    return None


def _other_things(ranks: list[Rank]) -> RunError:
    failed = [rank for rank in ranks if rank.error]
    others = [rank for rank in ranks if not rank.error]
    if failed and others:
        words = ", ".join(f"{rank.name} left {rank.error}" for rank in failed)
        return WorkerError(
            f"{words}, which did not end the run, while {_each(others)}: let the error end the run, or raise it on all "
            "ranks"
        )
    return UserError(f"the ranks do different things: {_each(ranks)}: {ALIKE}")


def _hanging(ranks: list[Rank], timeout: float) -> RunError | None:
    """A run in which nothing moves, though a rank waits in a call."""
    now = time.monotonic()
    if all(rank.state in (State.OUTSIDE, State.END, State.OVER) for rank in ranks):
        return None
    if any(now - rank.since < timeout for rank in ranks):
        return None
    last = min(rank.num_events for rank in ranks)
    behind = [rank for rank in ranks if rank.num_events == last]
    if any(now - rank.since < max(timeout, SECONDS_TO_COMPILE) for rank in behind if rank.state == State.COMPILING):
        return None
    silent = [rank for rank in ranks if now - rank.alive > _SECONDS_OF_SILENCE]
    # All wait in the framework for one that is busy with something else.
    busy = [rank for rank in behind if rank.place and rank.is_of_user]
    culprits = silent or (busy if len(behind) == len(ranks) and busy else behind)
    words = []
    for rank in culprits:
        place = "its process is stopped" if rank in silent else f"at {rank.place or 'an unknown place'}"
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
    """Lets process 0 of several machines look, within the context, where all of them are.

    Args:
        link: between the processes; None: there is one.
        heartbeat: of this process.
        timeout: see `find_error`.
    """
    if link is None:
        yield
        return
    find, run = Judge(timeout or None), link.num_runs + 1
    link.num_runs = run

    def judge(statuses: list[Any]) -> RunError | None:
        if any(each is None or each[0] != run for each in statuses):
            return None  # still in the run before this one
        return find([Rank(*each)._replace(name=name).with_ages() for name, (_, each) in zip(link.names, statuses)])

    kept = link.status, link.judge
    link.status, link.judge = (lambda: (run, tuple(heartbeat.rank.with_ages()))), judge
    try:
        yield
    finally:
        link.status, link.judge = kept


def unheeded(ranks: Sequence[Rank | None]) -> SystemExit | None:
    """Returns the end of ranks some of which have not noted a signal that was passed on to them, or a second one."""
    passed, begun = signals.seconds_since_passed_on(), [rank for rank in ranks if rank is not None]
    if not passed or not begun:
        return None
    number, seconds = passed[0]
    again = [since for _, since in passed[1:] if seconds - since > signals.SECONDS_OF_ONE]
    slow = [rank for rank in begun if not (rank.is_finishing or rank.state == State.OVER)]
    if again and again[0] > _SECONDS_TO_HEED_AGAIN:
        slow = begun
    elif seconds <= _SECONDS_TO_HEED or not slow:
        return None
    words = ", ".join(f"{rank.name} {rank.doing()}{f', at {rank.place}' if rank.place else ''}" for rank in slow)
    name = signal.Signals(number).name
    print(f"{name} was not heeded for {seconds:.0f} s: {words}; killed", file=sys.stderr, flush=True)
    return SystemExit(128 + number)
