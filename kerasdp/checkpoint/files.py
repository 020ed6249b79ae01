"""Writes and reads checkpoint files. Writes are atomic, and a corrupt file raises an error.

A checkpoint is one file in the safetensors format (https://github.com/huggingface/safetensors), which many tools can
read. The file contains arrays by name and a JSON header, but no pickled objects. State that is not an array is JSON in
the header. safetensors has no checksum. So kerasdp writes a checksum of the arrays, the state and the format number
into the header.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from kerasdp.checkpoint.storage import OutOfReachError, folder_at
from kerasdp.errors import CheckpointError, UserError

# Increased when an older kerasdp would misread, or wrongly reject, a new file. Only this format can be read.
FORMAT = 4
_NAME = re.compile(r"step-(\d{8,})\.safetensors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run after a step.

    Args:
        arrays: arrays of floats and integers, by name.
        state: all state that is not an array, in JSON types. `step` is the number of updates.
        checksum: checksum in the file that the checkpoint was loaded from; empty if it was not loaded from a file.
    """

    arrays: dict[str, np.ndarray]
    state: dict[str, Any]
    checksum: str = ""


def path_of(folder: str, step: int) -> str:
    """Returns the path of the checkpoint of a step."""
    return os.path.join(folder, f"step-{step:08d}.safetensors")


def paths_in(folder: str) -> list[str]:
    """Returns the paths of the checkpoints in a folder, the newest first."""
    found = [(int(match[1]), match[0]) for match in map(_NAME.fullmatch, folder_at(folder).names()) if match]
    return [os.path.join(folder, name) for _, name in sorted(found, reverse=True)]


def save(path: str, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint atomically. Even after a power failure, `path` is the old file or the complete new file.

    Raises:
        OSError: if the file cannot be written.
    """
    folder, name = os.path.split(path)
    state = json.dumps(checkpoint.state)
    # safetensors (0.8) writes bytes in memory order. That is wrong for transposed arrays (a recurrent kernel on torch).
    arrays = {name: np.asarray(array, order="C") for name, array in checkpoint.arrays.items()}
    metadata = {"format": str(FORMAT), "state": state, "sha256": _checksum(state, arrays)}
    try:
        with folder_at(folder).writing(name) as temporary:
            safetensors.numpy.save_file(arrays, temporary, metadata)
    except safetensors.SafetensorError as error:  # a full disk, for one: "...I/O error: File too large (os error 27)"
        raise OSError(str(error)) from error


def load(path: str) -> Checkpoint:
    """Reads a checkpoint and verifies its checksum.

    Raises:
        CheckpointError: if the file is corrupt or truncated.
        UserError: if the file cannot be read, or has another format.
    """
    folder, name = os.path.split(path)
    try:
        with folder_at(folder).reading(name) as local, safetensors.safe_open(local, framework="numpy") as file:
            metadata = file.metadata() or {}
            number = int(metadata["format"])
            if number != FORMAT:
                raise UserError(
                    f"--resume: expected a checkpoint of format {FORMAT}. Received: format {number} in {path}; use the "
                    "kerasdp version that wrote it, or train again in another --workdir or --checkpoint_dir"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
        if metadata["sha256"] != _checksum(metadata["state"], arrays):
            raise CheckpointError(f"{path} is corrupt: its content does not match its checksum")
        return Checkpoint(arrays=arrays, state=json.loads(metadata["state"]), checksum=metadata["sha256"])
    except (CheckpointError, UserError):
        raise
    except (PermissionError, OutOfReachError) as error:  # the file may be sound
        raise UserError(f"--resume: cannot read {path} ({error.strerror or error}); check your access") from error
    except Exception as error:  # anybody may have written the file; a type that NumPy lacks is an AttributeError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path} is corrupt or truncated ({reason:.300})") from error


def load_newest(folder: str, report: Callable[[str], None]) -> tuple[str, Checkpoint] | None:
    """Loads the newest usable checkpoint of a folder.

    Args:
        folder: folder or URL of the checkpoints.
        report: function that is called with a message for each corrupt checkpoint.

    Returns:
        A tuple of the path and the checkpoint; None if the folder has no checkpoints.

    Raises:
        UserError: if no checkpoint can be loaded; if the folder cannot be read; if a checkpoint has another format.
    """
    try:
        paths = paths_in(folder)
    except OutOfReachError as error:
        raise UserError(f"--resume: cannot read {folder} ({error}); check your access") from error
    for path in paths:
        try:
            return path, load(path)
        except CheckpointError as error:
            report(f"{error}; trying the checkpoint before it")
    if paths:
        raise UserError(
            f"--resume: cannot use any of the {len(paths)} checkpoints in {folder} (see the warnings); train again in "
            "another --workdir or --checkpoint_dir"
        )
    return None


class Writer:
    """Writes checkpoints in a thread, and removes old ones.

    Attributes:
        last_good: path of the newest checkpoint that was written.
        unwritten: a text about the newest checkpoint, if it could not be written: its step, the reason, and the path of
            the last good checkpoint. None if the newest checkpoint was written.
    """

    def __init__(self, folder: str, keep: int, report: Callable[[str], None]):
        """Creates a writer for a folder. Writes nothing yet.

        Args:
            folder: folder or URL of the checkpoints.
            keep: number of newest checkpoints to keep. Older ones are removed.
            report: function that is called with a message if a checkpoint cannot be written.
        """
        self.folder, self.keep, self._report = folder, keep, report
        self.last_good: str | None = None
        self.unwritten: str | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._running: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Returns whether a checkpoint is being written."""
        return self._running is not None and not self._running.done()

    def write(self, checkpoint: Checkpoint, is_best: bool = False) -> None:
        """Waits until the previous checkpoint is written, and starts to write a checkpoint in a thread.

        Args:
            checkpoint: the checkpoint to write.
            is_best: whether to write the checkpoint as `best.safetensors`, too.
        """
        self.wait()
        # Training continues, and changes what the state is made of.
        checkpoint = dataclasses.replace(checkpoint, state=json.loads(json.dumps(checkpoint.state)))
        self._running = self._pool.submit(self._write, checkpoint, is_best)

    def wait(self) -> None:
        """Waits until all checkpoints are on disk."""
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        """Waits until all checkpoints are on disk, and ends the thread of the writer."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _write(self, checkpoint: Checkpoint, is_best: bool) -> None:
        """Writes a checkpoint, and removes old checkpoints.

        It writes and removes nothing if a weight is NaN or infinite. Then the run ends with an error, and a later run
        needs the last valid checkpoints.
        """
        path = path_of(self.folder, checkpoint.state["step"])
        try:
            for name, array in checkpoint.arrays.items():
                if name.startswith(("model/", "optimizer/")) and not np.isfinite(array).all():
                    raise OSError(f"{name} contains NaN or infinity")
            save(path, checkpoint)
            self.last_good, self.unwritten = path, None
            if is_best:
                save(os.path.join(self.folder, "best.safetensors"), checkpoint)
            for old in paths_in(self.folder)[self.keep :]:
                folder_at(self.folder).remove(os.path.basename(old))
        except OSError as error:
            kept = f"the last good one is {self.last_good}" if self.last_good else "there is no earlier checkpoint"
            reason = error.strerror or str(error)
            if self.unwritten is None:  # once, until one is written again
                self._report(f"cannot write checkpoints into {self.folder} ({reason}); training continues; {kept}")
            self.unwritten = f"the checkpoint of step {checkpoint.state['step']} ({reason}); {kept}"


def _checksum(state: str, arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(f"{FORMAT}\n{state}".encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view("uint8").data)
    return digest.hexdigest()
