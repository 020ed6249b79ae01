"""Links the processes of a run on several machines: exchanges values, and notices when one is gone.

A collective of torch, JAX or TensorFlow whose other end is out of reach waits for minutes, or for ever. So the
processes tell each other every second that they live: each tells process 0, which tells all.
"""

import collections
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
from kerasdp.runtime import messages
from kerasdp.runtime.last_words import leave_with, line_of
from kerasdp.runtime.messages import Channel

T = TypeVar("T")

SECONDS_BETWEEN_SIGNS = 1.0
# Of a process that has not been heard of for so long the machine or its network is gone; or it is stopped.
SECONDS_OF_SILENCE = 15.0
SECONDS_TO_JOIN = 900.0
_SECONDS_BETWEEN_LINES = 30.0

_ALIVE, _VALUE, _VALUES, _PART, _FAILED, _LEAVES = range(6)
# The channel of values. Others are of scatters.
_VALUES_CHANNEL = 0


class HostLink:
    """Links this process with the others of the run; process 0 stands in the middle.

    Attributes:
        rank: number of this process, from 0.
        num_processes: how many there are.
        names: of the processes, as `host 10.0.0.2 (node7, process 1)`.
        error: why the run has to end, once that is known.
    """

    def __init__(self, rank: int, num_processes: int, own_name: str):
        self.rank, self.num_processes, self.names = rank, num_processes, [own_name]
        self.error: RunError | None = None
        self._channels: dict[int, Channel] = {}
        self._heard: dict[int, float] = {}
        self._left: set[int] = set()
        self._arrived: dict[tuple[int, int], queue.SimpleQueue[Any]] = collections.defaultdict(queue.SimpleQueue)
        self._values: dict[int, dict[int, bytes]] = collections.defaultdict(dict)
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._num_values = 0

    @classmethod
    def among(cls, rank: int, num_processes: int, host: str, port: int, own: str, door: Any = None) -> "HostLink":
        """Links this process with those that call the same; returns when all have come.

        Args:
            rank: of this process.
            num_processes: how many there are.
            host: where process 0 listens.
            port: likewise.
            own: this machine's address.
            door: on process 0: the socket that listens there; None: it is opened.

        Raises:
            UserError: if process 0 cannot listen, or some do not come.
        """
        link = cls(rank, num_processes, f"host {own} ({socket.gethostname()}, process {rank})")
        if rank == 0:
            with door or messages.listen(host, port) as door:
                link._gather(door)
        else:
            words = pickle.dumps((rank, num_processes, link.names[0]))
            link._channels[0] = Channel(messages.connect(host, port, words, SECONDS_TO_JOIN))
        link._begin()
        link.names = link.all_gather_object(link.names[0])
        return link

    def _gather(self, door: socket.socket) -> None:
        """Waits for all others."""
        begin = told = time.monotonic()
        door.settimeout(1.0)
        while len(self._channels) < self.num_processes - 1:
            missing = [rank for rank in range(1, self.num_processes) if rank not in self._channels]
            words = f"waits for {len(missing)} of {self.num_processes} processes: {_numbers(missing)}"
            now = time.monotonic()
            if now - begin > SECONDS_TO_JOIN:
                raise UserError(
                    f"{words}: nothing for {SECONDS_TO_JOIN:.0f} s; start them, with the same --coordinator"
                )
            if now - told > _SECONDS_BETWEEN_LINES:
                told = now
                print(words, file=sys.stderr, flush=True)
            try:
                connection, _ = door.accept()
            except TimeoutError:
                continue
            try:
                rank, num_processes, _ = pickle.loads(messages.greeted(connection))
            except OSError:  # of another program, or of a process that ends
                connection.close()
                continue
            if num_processes != self.num_processes or not 0 < rank < num_processes:
                raise UserError(
                    f"expected one of {self.num_processes} processes. Received: process {rank} of {num_processes}; "
                    "give each the same --hosts, and a number of its own"
                )
            if rank in self._channels:  # the one before it has ended, or two were given the same number
                self._channels[rank].close()
            self._channels[rank] = Channel(connection)

    def _begin(self) -> None:
        now = time.monotonic()
        for rank, channel in self._channels.items():
            self._heard[rank] = now
            threading.Thread(target=self._read, args=(rank, channel), daemon=True, name=f"link {rank}").start()
        threading.Thread(target=self._live, daemon=True, name="link").start()

    def all_gather_object(self, value: T) -> list[T]:
        """See `kerasdp.runtime.ranks.Processes`."""
        return self.gather_later(value)()

    def gather_later(self, value: T) -> Callable[[], list[T]]:
        """Gives this process's value; returns a function that waits for those of all, in the order of the ranks."""
        number, self._num_values = self._num_values, self._num_values + 1
        content = pickle.dumps(value)
        if self.rank == 0:
            self._take_value(0, number, content)
        else:
            self._send(0, _VALUE, 0, number, content)

        def values() -> list[T]:
            return [pickle.loads(each) for each in self._next(_VALUES_CHANNEL, number)]

        return values

    def send_part(self, rank: int, channel: int, number: int, value: Any) -> None:
        """Sends a value from process 0 to another one, for its `next_part`."""
        self._send(rank, _PART, channel, number, pickle.dumps(value, protocol=5))

    def next_part(self, channel: int, number: int) -> Any:
        """Waits for what process 0 sends."""
        return pickle.loads(self._next(channel, number))

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process fails, and of what; they end with the same."""
        name = type(error).__name__ if isinstance(error, RunError) else WorkerError.__name__
        content = pickle.dumps((name, f"{self.names[min(self.rank, len(self.names) - 1)]} failed: {line_of(error)}"))
        self.error = self.error or WorkerError(line_of(error))
        self._is_over.set()
        self._send_to_all(_FAILED, content)

    @property
    def is_failing(self) -> bool:
        """Returns whether this process or another one has failed."""
        return self.error is not None or self._is_over.is_set()

    def leave(self) -> None:
        """Tells the others that this process ends in order."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._send_to_all(_LEAVES, b"")

    def reason(self, seconds: float) -> RunError | None:
        """Returns why the run has to end, if that becomes known in so many seconds."""
        end = time.monotonic() + seconds
        while self.error is None and time.monotonic() < end:
            time.sleep(0.05)
        return self.error

    def _next(self, channel: int, number: int) -> Any:
        with self._lock:
            arrived = self._arrived[channel, number]
        result = arrived.get()
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
        self._arrive(_VALUES_CHANNEL, number, ordered)

    def _send(self, rank: int, kind: int, channel: int, number: int, content: bytes) -> None:
        try:
            self._channels[rank].send(kind, channel, number, content)
        except OSError:
            self._lose(rank, "has left")

    def _send_to_all(self, kind: int, content: bytes) -> None:
        for channel in self._channels.values():
            try:
                channel.send(kind, content=content)
            except OSError:
                continue  # gone, too

    def _read(self, rank: int, channel: Channel) -> None:
        """Takes the messages of one process, in a thread."""
        while True:
            try:
                kind, number_of_channel, number, content = channel.receive()
            except OSError:
                self._lose(rank, "has left")
                return
            self._heard[rank] = time.monotonic()
            if kind == _VALUE:
                self._take_value(rank, number, content)
            elif kind == _VALUES:
                self._arrive(number_of_channel, number, pickle.loads(content))
            elif kind == _PART:
                self._arrive(number_of_channel, number, content)
            elif kind == _LEAVES:
                self._left.add(rank)
            elif kind == _FAILED:
                name, text = pickle.loads(content)
                self._left.add(rank)
                self._end(errors.from_name(name, text) or WorkerError(text))

    def _live(self) -> None:
        """Tells the others that this process lives, and notices those that are silent, in a thread."""
        last = time.monotonic()
        while not self._is_over.wait(SECONDS_BETWEEN_SIGNS):
            now, before = time.monotonic(), last
            last = now
            for rank in list(self._channels):
                if rank not in self._left:
                    self._send(rank, _ALIVE, 0, 0, b"")
            if now - before > SECONDS_OF_SILENCE / 2:  # this process itself was stopped: others get time to be heard
                self._heard = dict.fromkeys(self._heard, now)
            for rank, heard in list(self._heard.items()):
                if rank not in self._left and now - heard > SECONDS_OF_SILENCE:
                    self._lose(
                        rank,
                        f"has not been heard of for {now - heard:.0f} s: stopped, or its machine or network failed",
                    )

    def _lose(self, rank: int, words: str) -> None:
        if self._is_over.is_set() or rank in self._left:
            return
        self._left.add(rank)
        name = self.names[rank] if rank < len(self.names) else f"process {rank}"
        self._end(WorkerError(f"{name} {words}"))

    def _end(self, error: RunError) -> None:
        """Ends this process at once.

        It may wait for ever in native code; and JAX (0.10.2) aborts without a word 0.1 s after its coordinator.
        """
        with self._lock:
            if self.error is not None or self._is_over.is_set():
                return
            self.error = error
        if self.rank == 0:
            self._send_to_all(_FAILED, pickle.dumps((type(error).__name__, str(error))))
        leave_with(error)


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
