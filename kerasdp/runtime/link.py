"""Links the processes of a run: exchanges values, and ends all of them when one is gone.

A collective of torch, JAX or TensorFlow whose other end is out of reach waits for minutes, or for ever. So the
processes of several machines tell each other every second that they live, and where they are: each tells process 0,
which tells all. On one machine whoever started the processes sees what becomes of them.
"""

import collections
import pickle
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kerasdp.errors import RunError, UserError, WorkerError
from kerasdp.runtime import outcome
from kerasdp.runtime.addresses import SECONDS_TO_JOIN, Wait
from kerasdp.runtime.channel import Channel
from kerasdp.runtime.door import Door, Place, connect

T = TypeVar("T")

SECONDS_BETWEEN_SIGNS = 1.0
# Of a process that has not been heard of for so long the machine or its network is gone; or it is stopped.
SECONDS_OF_SILENCE = 15.0
# Processes that do different things are ended, with the reason; before process 0 ends, the others get to hear why.
_SECONDS_TO_BE_ENDED, _SECONDS_TO_HEAR = 30.0, 2.0

# Kinds of messages: a sign of life; a value for process 0, which gathers it; what somebody waits for; an end.
_ALIVE, _VALUE, _PART, _FAILED, _LEAVES = range(5)
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
        status: returns where this process is, for `judge`.
        judge: gets those of all processes, on process 0, every second; returns what ends the run, or None.
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
        self._arrived: dict[tuple[int, int], collections.deque[Any]] = collections.defaultdict(collections.deque)
        self._values: dict[int, dict[int, bytes]] = collections.defaultdict(dict)
        self._changed, self._is_over = threading.Condition(), threading.Event()
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
        wait = Wait(SECONDS_TO_JOIN)
        while missing := [rank for rank in range(1, self.num_processes) if rank not in self._channels]:
            shown = ", ".join([*map(str, missing[:8]), *["..."] * (len(missing) > 8)])
            words = f"waits for {len(missing)} of {self.num_processes} processes: {shown}"
            if wait.is_over(words):
                raise UserError(
                    f"{words}: nothing for {SECONDS_TO_JOIN:.0f} s; start them, with the same --coordinator"
                )
            if (come := door.next(1.0)) is None:
                continue
            channel, said = Channel(come[0]), come[1]
            rank, num_processes, reason = said["rank"], said["num_processes"], ""
            if num_processes != self.num_processes or not 0 < rank < num_processes:
                reason = (
                    "--hosts or --gpus: expected the same number of processes on all. Received: "
                    f"{self.num_processes} on {self.names[0]}, {num_processes} on {said['name']}; give each the same, "
                    "and a number of its own"
                )
            elif rank in self._channels and self._channels[rank].is_alive():
                reason = f"two processes have the number {rank}; give each its own"
            self._channels[-1 if reason else rank] = channel  # the one before it has ended
            if reason:
                error = UserError(reason)
                self._send_to_all(_FAILED, pickle.dumps(error))  # to that one, too
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
            self._channels[0].send(_VALUE, _VALUES_CHANNEL, number, content)

        def values() -> list[T]:
            given = [pickle.loads(each) for each in self.next_part(_VALUES_CHANNEL, number)]
            if any(other != what for other, _ in given):  # whoever watches knows where each is
                self._is_over.wait(_SECONDS_TO_BE_ENDED)
                raise WorkerError(f"the ranks exchange different things: {', '.join(other for other, _ in given)}")
            return [each for _, each in given]

        return values

    def send_part(self, rank: int, channel: int, number: int, value: Any) -> None:
        """Sends a value from process 0 to another one, for its `next_part`; waits until it is on its way."""
        self._channels[rank].send(_PART, channel, number, pickle.dumps(value, protocol=5))
        self._channels[rank].flush()

    def next_part(self, channel: int, number: int) -> Any:
        """Waits for what process 0 sends."""
        with self._changed:
            arrived = self._arrived[channel, number]
            self._changed.wait_for(lambda: arrived or self._left or self._is_over.is_set())
            if not arrived:
                left = ", ".join(self.names[rank] for rank in sorted(self._left)) or "this process"
                words = f"{left} left the run while others wait: call launch alike"
                raise self.error or self._parting or WorkerError(words)
            content = arrived.popleft()
            if not arrived:  # of a scatter, another one of the same number may be there already
                del self._arrived[channel, number]
        return pickle.loads(content)

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

    def reason(self, seconds: float) -> RunError | None:
        """Returns why the run has to end, if that becomes known in so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.error or self._parting, seconds)
            return self.error or self._parting

    def _take_value(self, rank: int, number: int, content: bytes) -> None:
        """Keeps a value, on process 0, until all are there."""
        with self._changed:
            self._values[number][rank] = content
            if len(self._values[number]) < self.num_processes:
                return
            values = self._values.pop(number)
            together = pickle.dumps([values[rank] for rank in range(self.num_processes)])
            for channel in self._channels.values():
                channel.send(_PART, _VALUES_CHANNEL, number, together)
            self._take(0, _PART, _VALUES_CHANNEL, number, together)  # before it is heard that one with them has left

    def _send_to_all(self, kind: int, content: bytes) -> None:
        """Sends, and waits for a moment until all is on its way: this process may end then."""
        end = time.monotonic() + _SECONDS_TO_HEAR
        for channel in self._channels.values():
            channel.send(kind, content=content)
        for rank in self._channels.keys() - self._left:
            self._channels[rank].flush(end - time.monotonic())

    def _read(self, rank: int, channel: Channel) -> None:
        """Takes the messages of one process, in a thread."""
        try:
            while True:
                self._take(rank, *channel.receive())
        except OSError:
            self._lose(rank, "has left")
        except Exception as error:
            self._lose(rank, f"has sent what cannot be read ({type(error).__name__}: {error}): changed on its way?")

    def _take(self, rank: int, kind: int, channel: int, number: int, content: bytes | bytearray) -> None:
        if kind == _ALIVE:
            self._statuses[rank] = pickle.loads(content)
        elif kind == _VALUE:
            self._take_value(rank, number, bytes(content))
        elif kind == _PART:
            with self._changed:
                self._arrived[channel, number].append(content)
                self._changed.notify_all()
        elif kind == _FAILED:
            self._left.add(rank)
            self._end(pickle.loads(content))
        else:
            with self._changed:
                self._left.add(rank)
                if content:
                    self._parting = pickle.loads(content)
                    threading.Thread(
                        target=self._end_later, args=(self._parting,), daemon=True, name="link end"
                    ).start()
                self._changed.notify_all()

    def _live(self) -> None:
        """Tells the others that this process lives, and notices those that are silent, in a thread."""
        last = time.monotonic()
        while not self._is_over.wait(SECONDS_BETWEEN_SIGNS):
            now, before = time.monotonic(), last
            last, own = now, self.status()
            for rank, channel in list(self._channels.items()):
                if now - before > SECONDS_OF_SILENCE / 2:  # this process itself was stopped: others get time
                    channel.heard = now
                if rank in self._left:
                    continue
                channel.send_sign(_ALIVE, pickle.dumps(own))
                if now - channel.heard > SECONDS_OF_SILENCE:
                    seconds = f"has not been heard of for {now - channel.heard:.0f} s"
                    self._lose(rank, f"{seconds}: stopped, or its machine or network failed")
            if self.rank == 0:
                error = self.judge([own, *(self._statuses.get(rank) for rank in range(1, self.num_processes))])
                if error is not None:
                    self._end(error)

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
        with self._changed:
            if self.error is not None or self._is_over.is_set():
                return
            self.error = error
        if self.rank == 0:
            self._send_to_all(_FAILED, pickle.dumps(error))
        outcome.leave_with(error)

    def _packed_own(self, error: BaseException) -> bytes:
        """Returns an error of this process as the others are to read it."""
        own = self.names[min(self.rank, len(self.names) - 1)]
        kind = outcome.kind_of(error) or WorkerError
        return pickle.dumps(kind(f"{own} failed: {outcome.line_of(error)}"))
