"""Carries whole messages between two processes; a sign of life never waits for them."""

import contextlib
import select
import socket
import struct
import threading
import time

# Of a message: its kind, its channel, its number on that channel, and the bytes after it.
_HEAD = struct.Struct("<BIqq")
# Bytes after which a message that comes is known to move.
_ONE_READ = 2**20


class Channel:
    """A connection to another process, in which whole messages travel.

    Attributes:
        heard: when bytes last came from the other end, in seconds of `time.monotonic`.
    """

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard = time.monotonic()
        self._socket, self._has_ended = connection, False
        # What the other end does not take at once is written by a thread, in order.
        self._changed, self._waiting = threading.Condition(), list[memoryview]()
        self._writer: threading.Thread | None = None

    def send(self, kind: int, channel: int = 0, number: int = 0, content: bytes = b"") -> None:
        """Sends a message; never waits for the other end. Raises `OSError` if that is gone."""
        message = memoryview(_HEAD.pack(kind, channel, number, len(content)) + content)
        with self._changed:
            if self._has_ended:
                raise ConnectionResetError("the other end has left")
            if not self._waiting:
                with contextlib.suppress(BlockingIOError):
                    message = message[self._socket.send(message, socket.MSG_DONTWAIT) :]
            if not message:
                return
            self._waiting.append(message)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, daemon=True, name="link writer")
                self._writer.start()
            self._changed.notify_all()

    def send_sign(self, kind: int, content: bytes) -> None:
        """Sends a sign of life, unless messages are on their way already, which are one."""
        if not self._waiting:
            self.send(kind, content=content)

    def flush(self, seconds: float | None) -> None:
        """Waits, at most so long, until all messages are on their way. Raises `OSError` if the other end is gone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._has_ended, seconds)
            if self._has_ended:
                raise ConnectionResetError("the other end has left")

    def receive(self) -> tuple[int, int, int, bytearray]:
        """Returns kind, channel, number and content of the next message. Raises `OSError` if there are no more."""
        kind, channel, number, size = _HEAD.unpack(self._received(_HEAD.size))
        return kind, channel, number, self._received(size)

    def close(self) -> None:
        """Ends the connection, also for threads that wait for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._end()

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
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._has_ended)
                if self._has_ended:
                    return
                message = self._waiting[0]
            try:
                self._socket.sendall(message)
            except OSError:
                self._end()
                return
            with self._changed:
                del self._waiting[0]
                self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
