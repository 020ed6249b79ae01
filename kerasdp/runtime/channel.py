"""Carries whole messages between two processes; a sign of life never waits for them."""

import contextlib
import queue
import select
import socket
import struct
import threading
import time
import zlib

# Of a message: its kind, its channel, its number on that channel, the bytes after it, and their checksum. That of these
# fields follows: TCP's own sees nothing of what a faulty switch changes.
_HEAD = struct.Struct("<BIqqI")
_CHECKSUM = struct.Struct("<I")
# Bytes after which a message that comes is known to move.
_ONE_READ = 2**20


class Channel:
    """A connection to another process, in which whole messages travel. A thread writes them, in order.

    Attributes:
        heard: when bytes last came from the other end, in seconds of `time.monotonic`.
    """

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard = time.monotonic()
        self._socket, self._messages = connection, queue.Queue[bytes]()
        threading.Thread(target=self._write, daemon=True, name="link writer").start()

    def send(self, kind: int, channel: int = 0, number: int = 0, content: bytes = b"") -> None:
        """Sends a message; never waits for the other end, nor says whether that is gone: `receive` does."""
        head = _HEAD.pack(kind, channel, number, len(content), zlib.crc32(content))
        self._messages.put(b"".join((head, _CHECKSUM.pack(zlib.crc32(head)), content)))

    def send_sign(self, kind: int, content: bytes) -> None:
        """Sends a sign of life, unless messages are on their way already, which are one."""
        if not self._messages.unfinished_tasks:
            self.send(kind, content=content)

    def flush(self, seconds: float | None = None) -> None:
        """Waits, at most so long, until all messages are on their way, or the other end is gone."""
        with self._messages.all_tasks_done:
            self._messages.all_tasks_done.wait_for(lambda: not self._messages.unfinished_tasks, seconds)

    def receive(self) -> tuple[int, int, int, bytearray]:
        """Returns kind, channel, number and content of the next message.

        Raises:
            OSError: if there are no more.
            ValueError: if it is not what was sent.
        """
        head = self._received(_HEAD.size)
        (checksum,) = _CHECKSUM.unpack(self._received(_CHECKSUM.size))
        if checksum != zlib.crc32(head):
            raise ValueError("a message has another checksum")
        kind, channel, number, size, checksum = _HEAD.unpack(head)
        content = self._received(size)
        if checksum != zlib.crc32(content):
            raise ValueError("a message has another checksum")
        return kind, channel, number, content

    def is_alive(self) -> bool:
        """Returns whether the other end has not closed the connection, whatever it has sent before."""
        closed = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
        poll = select.poll()
        poll.register(self._socket, closed)
        return not any(event & closed for _, event in poll.poll(0))

    def _received(self, size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        while view:
            num_read = self._socket.recv_into(view[:_ONE_READ])
            if not num_read:
                raise ConnectionResetError("the other end has left")
            self.heard = time.monotonic()
            view = view[num_read:]
        return content

    def _write(self) -> None:
        while True:
            message = memoryview(self._messages.get())
            with contextlib.suppress(OSError):  # gone, and so are all after it
                while message:  # not by `sendall`, which benchmarks/traffic.py counts: what a step sends
                    message = message[self._socket.send(message) :]
            del message
            self._messages.task_done()
