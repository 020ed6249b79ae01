"""Ends a process whose main thread may wait for ever in native code, and says why."""

import os
import sys

from kerasdp.errors import RunError
from kerasdp.runtime import rank_files
from kerasdp.runtime.processes import how_it_ended


def write_errors(folder: str | None, local_rank: int) -> None:
    """Lets a link write down why it ends this process, instead of printing it.

    Args:
        folder: where whoever watches over this process looks for its error; None: nobody does.
        local_rank: of this process in that folder.
    """
    global _watched_as
    _watched_as = None if folder is None else (folder, local_rank)


_watched_as: tuple[str, int] | None = None


def leave_with(error: RunError) -> None:
    """Ends this process with an error, whatever its main thread does."""
    if _watched_as is None:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        rank_files.write_error(*_watched_as, error, str(error))
    sys.stdout.flush()
    os._exit(error.exit_code)


def line_of(error: BaseException) -> str:
    """Returns an error in a line."""
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return how_it_ended(128 - error.code)
    text = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
    return text.strip().splitlines()[0][:500] if text.strip() else type(error).__name__
