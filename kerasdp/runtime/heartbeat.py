"""Detects a run that hangs: every worker marks its steps in a small file, and its supervisor looks at them."""

import contextlib
import mmap
import os
import struct
import sys
import sysconfig
import threading
import time
import traceback
import types

# Process; place (twice the step, plus 1 after it); when it came there; last sign of life.
_RECORD = struct.Struct("qqdd")
_SECONDS_BETWEEN_SIGNS = 0.5


class Heartbeat:
    """Marks the steps of one worker in a file."""

    def __init__(self, folder: str, rank: int):
        self._path = os.path.join(folder, f"rank-{rank}")
        with open(self._path, "wb") as file:
            file.write(_RECORD.pack(os.getpid(), -1, time.monotonic(), time.monotonic()))
        with open(self._path, "r+b") as file:
            self._record = mmap.mmap(file.fileno(), _RECORD.size)
        self._place, self._since = -1, time.monotonic()
        self._main_thread = threading.main_thread().ident or 0  # None before a thread begins
        threading.Thread(target=self._live, daemon=True, name="heartbeat").start()

    def beat(self, step: int, is_behind: bool) -> None:
        """Marks that a step begins, or (`is_behind`) that it is over."""
        self._since = time.monotonic()
        self._place = 2 * step + is_behind
        self._write()

    def rest(self) -> None:
        """Marks that nothing is to be expected until the next beat."""
        self._place = -1
        self._write()

    def _write(self) -> None:
        _RECORD.pack_into(self._record, 0, os.getpid(), self._place, self._since, time.monotonic())

    def _live(self) -> None:
        while True:
            self._write()
            # Where it is, in case it is asked for; only worth the work where nothing moves.
            if self._place >= 0 and time.monotonic() - self._since > 2 * _SECONDS_BETWEEN_SIGNS:
                with contextlib.suppress(OSError), open(f"{self._path}.where", "w") as file:
                    # No public way: faulthandler writes text alone.
                    file.write(_innermost_frame(sys._current_frames().get(self._main_thread)))
            time.sleep(_SECONDS_BETWEEN_SIGNS)


def find_hanging(folder: str, timeout: float) -> tuple[str, list[int]] | None:
    """Says which rank hangs, in which step and line, if no rank has moved for `timeout` seconds.

    Returns:
        That in words, and the processes of all ranks; None if the run moves, or has not come to its second step, or
        rests.
    """
    ranks = {}
    for name in os.listdir(folder):
        if name.startswith("rank-") and not name.endswith(".where"):
            with open(os.path.join(folder, name), "rb") as file:
                content = file.read()
            if len(content) == _RECORD.size:
                ranks[int(name.removeprefix("rank-"))] = _RECORD.unpack(content)
    now = time.monotonic()
    if not ranks or any(place < 0 or now - since < timeout for _, place, since, _ in ranks.values()):
        return None
    silent = [rank for rank, record in ranks.items() if now - record[3] > 6 * _SECONDS_BETWEEN_SIGNS]
    behind = [rank for rank, record in ranks.items() if record[1] == min(other[1] for other in ranks.values())]
    wheres = {rank: _where(folder, rank) for rank in ranks}
    # All wait in the framework for one that is busy with something else.
    busy = [rank for rank in behind if wheres[rank] and not wheres[rank].startswith(sysconfig.get_path("purelib"))]
    culprits = silent or (busy if len(behind) == len(ranks) and busy else behind)
    words = []
    for rank in sorted(culprits):
        where = (
            "its process is stopped" if rank in silent else f"at {wheres[rank]}" if wheres[rank] else "unknown where"
        )
        words.append(f"rank {rank} hangs in step {(ranks[rank][1] + 1) // 2 + 1} ({where})")
    return f"{' and '.join(words)}: nothing moved for {timeout:g} s", sorted(record[0] for record in ranks.values())


def _where(folder: str, rank: int) -> str:
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, f"rank-{rank}.where")) as file:
        return file.read()
    return ""


def _innermost_frame(frame: types.FrameType | None) -> str:
    """Returns the innermost line that is not the standard library's: where a user would look."""
    frames = traceback.extract_stack(frame) if frame is not None else []
    standard = sysconfig.get_path("stdlib")
    packages = sysconfig.get_path("purelib")
    for entry in reversed(frames):
        if not entry.filename.startswith(standard) or entry.filename.startswith(packages):
            return f"{entry.filename}:{entry.lineno}, in {entry.name}"
    return ""
