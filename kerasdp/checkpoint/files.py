"""Writes and reads checkpoint files: never half-written, never loaded if corrupt.

A checkpoint is one file in the safetensors format (https://github.com/huggingface/safetensors): arrays by name after a
JSON header, no pickle, readable by many tools. What is not an array is in the header as JSON. The format has no
checksum, so the header carries one of everything else.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from kerasdp.errors import CheckpointError, UserError

# Increased when the reader of before would misread, or wrongly refuse, what is written. 2: variables are named by their
# place in the model, no longer by their number. 3: samples come in an order that the reader of before did not have.
FORMAT = 3
_NAME = re.compile(r"step-(\d{8,})\.safetensors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run after a step.

    Args:
        arrays: by name; floats and whole numbers of any size.
        state: all else, as JSON can hold it; `step` is the number of updates made.
        format: of the file that it was read from.
    """

    arrays: dict[str, np.ndarray]
    state: dict[str, Any]
    format: int = FORMAT


def path_of(folder: str, step: int) -> str:
    """Returns the path of a step's checkpoint."""
    return os.path.join(folder, f"step-{step:08d}.safetensors")


def paths_in(folder: str) -> list[str]:
    """Returns the checkpoints of a folder, the newest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        found = [(int(match[1]), match[0]) for match in map(_NAME.fullmatch, os.listdir(folder)) if match]
    return [os.path.join(folder, name) for _, name in sorted(found, reverse=True)]


def save(path: str, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint; at `path` is either the whole of it or what was there before, even if the power fails.

    Raises:
        OSError: if it cannot be written.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    state = json.dumps(checkpoint.state)
    metadata = {"format": str(FORMAT), "state": state, "sha256": _checksum(state, checkpoint.arrays)}
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        safetensors.numpy.save_file(checkpoint.arrays, temporary, metadata)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(os.path.dirname(path))
    except safetensors.SafetensorError as error:  # a full disk, for one
        raise OSError(str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


def load(path: str) -> Checkpoint:
    """Reads a checkpoint and checks every bit of it.

    Raises:
        CheckpointError: if it is not what was written, or was written by a newer kerasdp.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            number = int(metadata["format"])
            if number > FORMAT:
                raise CheckpointError(
                    f"{path} was written by a newer kerasdp (format {number}, this one reads up to {FORMAT})"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
        if metadata["sha256"] != _checksum(metadata["state"], arrays):
            raise CheckpointError(f"{path} is corrupt: its checksum is wrong")
        return Checkpoint(arrays=arrays, state=json.loads(metadata["state"]), format=number)
    except PermissionError as error:
        raise UserError(f"--resume: cannot read {path} ({error.strerror})") from error
    except (OSError, safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path} is corrupt or truncated ({reason})") from error


def load_newest(folder: str, report: Callable[[str], None]) -> tuple[str, Checkpoint] | None:
    """Loads the newest checkpoint that can be used, and its path; None if there is no checkpoint at all.

    Args:
        folder: of the checkpoints.
        report: called with the reason for each one that cannot be used.

    Raises:
        UserError: if none can be used.
    """
    paths = paths_in(folder)
    for path in paths:
        try:
            return path, load(path)
        except CheckpointError as error:
            report(f"{error}; trying the one before it")
    if paths:
        raise UserError(
            f"--resume: none of the {len(paths)} checkpoints in {folder} can be used (see above); train anew in "
            "another --workdir"
        )
    return None


class Writer:
    """Writes checkpoints in a thread of its own, and removes old ones."""

    def __init__(self, folder: str, keep: int, report: Callable[[str], None]):
        """`keep` is how many of the newest stay; `report` is called with what cannot be written."""
        self.folder, self.keep, self._report = folder, keep, report
        self.last_good: str | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._running: Future[None] | None = None
        self._reported: set[str] = set()

    @property
    def is_busy(self) -> bool:
        """Returns whether a checkpoint is being written."""
        return self._running is not None and not self._running.done()

    def write(self, checkpoint: Checkpoint, is_best: bool = False) -> None:
        """Starts to write; waits for the one before it. `is_best` writes `best.safetensors`, too."""
        self.wait()
        # Training continues, and changes what the state is made of.
        checkpoint = dataclasses.replace(checkpoint, state=json.loads(json.dumps(checkpoint.state)))
        self._running = self._pool.submit(self._write, checkpoint, is_best)

    def wait(self) -> None:
        """Waits until all is on disk."""
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        """Waits, and ends the thread."""
        self.wait()
        self._pool.shutdown()

    def _write(self, checkpoint: Checkpoint, is_best: bool) -> None:
        path = path_of(self.folder, checkpoint.state["step"])
        broken = next((name for name, array in checkpoint.arrays.items() if not _is_sound(name, array)), None)
        if broken is not None:  # the run ends by itself; sound checkpoints must stay
            self._report_once(f"no checkpoint at step {checkpoint.state['step']}: {broken} is not finite")
            return
        try:
            save(path, checkpoint)
            self.last_good = path
            if is_best:
                _replace_by_link(path, os.path.join(self.folder, "best.safetensors"))
            for old in paths_in(self.folder)[self.keep :]:
                os.remove(old)
        except OSError as error:
            kept = f"the last good one is {self.last_good}" if self.last_good else "there is no earlier one"
            reason = error.strerror or str(error)
            self._report_once(f"cannot write checkpoints into {self.folder} ({reason}); training continues, {kept}")

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._report(text)


def set_aside(folder: str, used: str) -> None:
    """Renames what could not be used and is newer than the checkpoint in use; removes what a killed run began."""
    for name in os.listdir(folder):
        if name.endswith(".tmp"):
            os.remove(os.path.join(folder, name))
    for path in paths_in(folder):
        if path == used:
            break
        os.replace(path, f"{path}.unusable")


def _is_sound(name: str, array: np.ndarray) -> bool:
    of_training = name.startswith(("model/", "optimizer/"))
    return not of_training or array.dtype.kind != "f" or bool(np.isfinite(array).all())


def checksum_of(checkpoint: Checkpoint) -> str:
    """Returns a digest of all that is in a checkpoint."""
    return _checksum(json.dumps(checkpoint.state), checkpoint.arrays)


def _checksum(state: str, arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view("uint8").data)
    return digest.hexdigest()


def _sync(path: str) -> None:
    """Waits until the file, or the names in the folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_by_link(path: str, link: str) -> None:
    temporary = f"{link}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.remove(temporary)
    try:
        os.link(path, temporary)
    except OSError:  # not every file system has links
        shutil.copyfile(path, temporary)
    os.replace(temporary, link)
