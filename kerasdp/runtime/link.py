"""Links the processes of a run: exchanges values, and ends all of them when one is gone.

A collective of torch, JAX or TensorFlow whose other end is out of reach waits for minutes, or for ever. So the
processes of several machines tell each other every second that they live, and where they are: each tells process 0,
which tells all. On one machine whoever started the processes sees what becomes of them.
"""

import collections
import contextlib
import json
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kerasdp import errors
from kerasdp.errors import RunError, UserError, WorkerError
from kerasdp.runtime import outcome
from kerasdp.runtime.addresses import SECONDS_TO_JOIN
from kerasdp.runtime.channel import Channel
from kerasdp.runtime.door import SECONDS_BETWEEN_LINES, Door, Place, connect

T = TypeVar("T")

SECONDS_BETWEEN_SIGNS = 1.0
# Of a process that has not been heard of for so long the machine or its network is gone; or it is stopped.
SECONDS_OF_SILENCE = 15.0
# Processes that do different things are ended, with the reason; before process 0 ends, the others get to hear why.
_SECONDS_TO_BE_ENDED, _SECONDS_TO_HEAR = 30.0, 2.0

_ALIVE, _VALUE, _VALUES, _PART, _FAILED, _LEAVES = range(6)
# What comes in place of a value when a process has left.
_NOTHING = object()
# The channel of values. Others are of scatters.
_VALUES_CHANNEL = 0


class Link:
    """Links this process with the others of the run; process 0 stands in the middle.

    Attributes:
        rank: number of this process, from 0.
        num_processes: how many there are.
        names: of the processes, as `host 10.0.0.2 (node7, process 1)`; on one machine `rank 1`.
        own: this machine's address, as the others reach it; None if all are on one.
        error: why the run has to end, once that is known.
        num_runs: of this program, on the link, so far.
        status: returns where this process is, for `judge`; JSON can hold it. None: nobody asks.
        judge: gets those of all processes, on process 0, again and again; returns what ends the run, or None.
    """

    def __init__(self, rank: int, num_processes: int, own: str | None):
        self.rank, self.num_processes, self.own = rank, num_processes, own
        self.names = [f"rank {rank}" if own is None else f"host {own} ({socket.gethostname()}, process {rank})"]
        self.error: RunError | None = None
        self.num_runs = 0
        self.status: Callable[[], Any] = lambda: None
        self.judge: Callable[[list[Any]], RunError | None] = lambda statuses: None
        self._statuses: dict[int, Any] = {}
        self._channels: dict[int, Channel] = {}
        self._left: set[int] = set()
        self._parting: RunError | None = None  # of one that has left with it
        self._arrived: dict[tuple[int, int], queue.SimpleQueue[Any]] = collections.defaultdict(queue.SimpleQueue)
        self._values: dict[int, dict[int, bytes]] = collections.defaultdict(dict)
        self._lock, self._is_over = threading.RLock(), threading.Event()
        self._num_values = 0

    @classmethod
    def among(cls, rank: int, num_processes: int, place: Place, own: str | None = None) -> "Link":
        """Links this process with those that call the same; returns when all have come.

        Args:
            rank: of this process.
            num_processes: how many there are.
            place: where process 0 listens.
            own: see `Link`.

        Raises:
            UserError: if process 0 cannot listen, or some do not come.
        """
        link = cls(rank, num_processes, own)
        if rank == 0:
            with Door(place) as door:
                link._gather(door)
        else:
            words = {"rank": rank, "num_processes": num_processes, "name": link.names[0]}
            link._channels[0] = Channel(connect(place, words))
        for other, channel in link._channels.items():
            threading.Thread(target=link._read, args=(other, channel), daemon=True, name=f"link {other}").start()
        link.names = link.all_gather_object(link.names[0])
        for channel in link._channels.values():  # those that came first have waited for the last, in silence
            channel.heard = time.monotonic()
        worker = outcome.place() if outcome.is_watched() else None
        if worker is None or worker.num_workers < num_processes:  # else one program sees what becomes of all
            threading.Thread(target=link._live, daemon=True, name="link").start()
        return link

    def _gather(self, door: Door) -> None:
        """Waits for all others."""
        begin = told = time.monotonic()
        while len(self._channels) < self.num_processes - 1:
            missing = [rank for rank in range(1, self.num_processes) if rank not in self._channels]
            shown = ", ".join([*map(str, missing[:8]), *["..."] * (len(missing) > 8)])
            words = f"waits for {len(missing)} of {self.num_processes} processes: {shown}"
            now = time.monotonic()
            if now - begin > SECONDS_TO_JOIN:
                raise UserError(
                    f"{words}: nothing for {SECONDS_TO_JOIN:.0f} s; start them, with the same --coordinator"
                )
            if now - told > SECONDS_BETWEEN_LINES:
                told = now
                print(words, file=sys.stderr, flush=True)
            if (come := door.next(1.0)) is None:
                continue
            connection, of_it = come
            rank, num_processes = of_it["rank"], of_it["num_processes"]
            if num_processes != self.num_processes or not 0 < rank < num_processes:
                self._turn_away(
                    "--hosts or --gpus: expected the same number of processes on all. Received: "
                    f"{self.num_processes} on {self.names[0]}, {num_processes} on {of_it['name']}; give each the same, "
                    "and a number of its own",
                    Channel(connection),
                )
            if rank in self._channels and self._channels[rank].is_alive():
                self._turn_away(f"two processes have the number {rank}; give each its own", Channel(connection))
            self._channels[rank] = Channel(connection)  # the one before it has ended

    def _turn_away(self, reason: str, late: Channel) -> None:
        self._channels[-1] = late  # hears it, too
        error = UserError(reason)
        self._send_to_all(_FAILED, _packed(error))
        raise error

    def all_gather_object(self, value: T, what: str = "") -> list[T]:
        """See `kerasdp.runtime.ranks.Processes`; `what`: is exchanged, the same on all."""
        return self.gather_later(value, what)()

    def gather_later(self, value: T, what: str = "") -> Callable[[], list[T]]:
        """Gives this process's value; returns a function that waits for those of all, in the order of the ranks."""
        number, self._num_values = self._num_values, self._num_values + 1
        content = pickle.dumps((what, value))
        if self.rank == 0:
            self._take_value(0, number, content)
        else:
            self._send(0, _VALUE, 0, number, content)

        def values() -> list[T]:
            given = [pickle.loads(each) for each in self._next(_VALUES_CHANNEL, number)]
            if any(other != what for other, _ in given):  # whoever watches knows where each is
                self._is_over.wait(_SECONDS_TO_BE_ENDED)
                raise WorkerError(f"the ranks exchange different things: {', '.join(other for other, _ in given)}")
            return [each for _, each in given]

        return values

    def send_part(self, rank: int, channel: int, number: int, value: Any) -> None:
        """Sends a value from process 0 to another one, for its `next_part`; waits until it is on its way."""
        self._send(rank, _PART, channel, number, pickle.dumps(value, protocol=5))
        with contextlib.suppress(OSError):
            self._channels[rank].flush(None)

    def next_part(self, channel: int, number: int) -> Any:
        """Waits for what process 0 sends."""
        return pickle.loads(self._next(channel, number))

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process fails, and of what; they end with the same."""
        self.error = self.error or WorkerError(outcome.line_of(error))
        self._is_over.set()
        self._send_to_all(_FAILED, self._packed_own(error))

    @property
    def is_failing(self) -> bool:
        """Whether this process or another one has failed."""
        return self.error is not None or self._is_over.is_set()

    def leave(self, error: RunError | None = None) -> None:
        """Tells the others that this process ends in order; with an error: one that each of them is about to find.

        They get some seconds to end by it themselves, as process 0 does when it has written its last checkpoint.
        """
        if not self._is_over.is_set():
            self._is_over.set()
            self._send_to_all(_LEAVES, b"" if error is None else self._packed_own(error))
            self._flush()

    def reason(self, seconds: float) -> RunError | None:
        """Returns why the run has to end, if that becomes known in so many seconds."""
        end = time.monotonic() + seconds
        while (found := self.error or self._parting) is None and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _arrive_nothing(self) -> None:
        """Wakes up who waits for a process that has left."""
        with self._lock:
            for waiting in self._arrived.values():
                waiting.put(_NOTHING)

    def _next(self, channel: int, number: int) -> Any:
        with self._lock:
            arrived = self._arrived[channel, number]
            if arrived.empty() and (self._left or self._is_over.is_set()):
                arrived.put(_NOTHING)
        result = arrived.get()
        if result is _NOTHING:
            left = ", ".join(self.names[rank] for rank in sorted(self._left)) or "this process"
            raise (
                self.error or self._parting or WorkerError(f"{left} left the run while others wait: call launch alike")
            )
        with self._lock:
            if arrived.empty():  # of a scatter, another one of the same number may be there already
                del self._arrived[channel, number]
        return result

    def _arrive(self, channel: int, number: int, content: Any) -> None:
        with self._lock:
            self._arrived[channel, number].put(content)

    def _take_value(self, rank: int, number: int, content: bytes) -> None:
        """Keeps a value, on process 0, until all are there."""
        with self._lock:
            self._values[number][rank] = content
            if len(self._values[number]) < self.num_processes:
                return
            values = self._values.pop(number)
            ordered = [values[rank] for rank in range(self.num_processes)]
            together = pickle.dumps(ordered)
            for other in self._channels:
                self._send(other, _VALUES, _VALUES_CHANNEL, number, together)
            self._arrive(_VALUES_CHANNEL, number, ordered)  # before it is heard that one which has them left

    def _send(self, rank: int, kind: int, channel: int, number: int, content: bytes) -> None:
        try:
            self._channels[rank].send(kind, channel, number, content)
        except OSError:
            self._lose(rank, "has left")

    def _send_to_all(self, kind: int, content: bytes) -> None:
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # gone, too
                channel.send(kind, content=content)

    def _flush(self) -> None:
        """Waits, for a moment at most, until what was sent is on its way: this process may end then."""
        end = time.monotonic() + _SECONDS_TO_HEAR
        for rank in self._channels.keys() - self._left:
            with contextlib.suppress(OSError):
                self._channels[rank].flush(end - time.monotonic())

    def _read(self, rank: int, channel: Channel) -> None:
        """Takes the messages of one process, in a thread."""
        while True:
            try:
                kind, number_of_channel, number, content = channel.receive()
                self._take(rank, kind, number_of_channel, number, content)
            except OSError:
                self._lose(rank, "has left")
                return
            except Exception as error:
                self._lose(rank, f"has sent what cannot be read ({type(error).__name__}): corrupt on its way?")
                return

    def _take(self, rank: int, kind: int, channel: int, number: int, content: bytearray) -> None:
        if kind == _VALUE:
            self._take_value(rank, number, bytes(content))
        elif kind == _VALUES:
            self._arrive(channel, number, pickle.loads(content))
        elif kind == _PART:
            self._arrive(channel, number, content)
        elif kind == _ALIVE:
            self._statuses[rank] = json.loads(content)
        elif kind == _LEAVES:
            self._left.add(rank)
            if content:
                self._parting = _unpacked(content)
                threading.Thread(target=self._end_later, args=(self._parting,), daemon=True, name="link end").start()
            self._arrive_nothing()
        elif kind == _FAILED:
            self._left.add(rank)
            self._end(_unpacked(content))

    def _live(self) -> None:
        """Tells the others that this process lives, and notices those that are silent, in a thread."""
        last = time.monotonic()
        error: RunError | None = None
        while not self._is_over.wait(SECONDS_BETWEEN_SIGNS):
            now, before = time.monotonic(), last
            last, own = now, self.status()
            for rank, channel in list(self._channels.items()):
                if now - before > SECONDS_OF_SILENCE / 2:  # this process itself was stopped: others get time
                    channel.heard = now
                if rank in self._left:
                    continue
                with contextlib.suppress(OSError):  # of which the reader knows
                    channel.send_sign(_ALIVE, json.dumps(own).encode())
                if now - channel.heard > SECONDS_OF_SILENCE:
                    seconds = f"has not been heard of for {now - channel.heard:.0f} s"
                    self._lose(rank, f"{seconds}: stopped, or its machine or network failed")
            if self.rank == 0:
                found = self.judge([own, *(self._statuses.get(rank) for rank in range(1, self.num_processes))])
                if found and error:  # twice: one that is on its way is not where it was
                    self._end(found)
                error = found

    def _lose(self, rank: int, words: str) -> None:
        if self._is_over.is_set() or rank in self._left:
            return
        self._left.add(rank)
        name = self.names[rank] if len(self.names) == self.num_processes else f"process {rank}"
        self._end(WorkerError(f"{name} {words}"))

    def _end_later(self, error: RunError) -> None:
        if not self._is_over.wait(_SECONDS_TO_BE_ENDED):
            self._end(error)

    def _end(self, error: RunError) -> None:
        """Ends this process at once.

        It may wait for ever in native code; and JAX (0.10.2) aborts without a word 0.1 s after its coordinator.
        """
        with self._lock:
            if self.error is not None or self._is_over.is_set():
                return
            self.error = error
        if self.rank == 0:
            self._send_to_all(_FAILED, _packed(error))
            self._flush()
        outcome.leave_with(error)

    def _packed_own(self, error: BaseException) -> bytes:
        """Returns an error of this process as the others are to read it."""
        own = self.names[min(self.rank, len(self.names) - 1)]
        kind = type(error) if isinstance(error, RunError) else WorkerError
        return _packed(kind(f"{own} failed: {outcome.line_of(error)}"))


def _packed(error: RunError) -> bytes:
    return json.dumps([type(error).__name__, str(error)]).encode()


def _unpacked(content: bytes | bytearray) -> RunError:
    name, text = json.loads(content)
    return errors.from_name(name, text) or WorkerError(text)
