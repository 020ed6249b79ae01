"""Finds the line of a user's code that a message is about."""

import inspect
import os
import re
import sys
import sysconfig
import threading
import traceback
import types

_KIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD, _PACKAGES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")


def is_of_user(path: str) -> bool:
    """Returns whether a file is no package's, nor of the standard library, nor made by a compiler."""
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", _KIT)
    return not path.startswith((_STANDARD, _PACKAGES, _KIT, compiled, "<frozen", "<string"))


def is_of_framework(place: str) -> bool:
    """Returns whether a place, as `place_of` returns it, is a framework's own."""
    return any(f"{os.sep}{name}{os.sep}" in place for name in ("jax", "jaxlib", "tensorflow", "torch"))


def place_of(thread: int) -> str:
    """Returns the line where a user would look: where a thread is, or the one that it waits for."""
    frames = sys._current_frames()  # No public way: faulthandler writes text alone.
    own = frames.pop(thread)
    frames.pop(threading.get_ident(), None)
    for frame in (own, *frames.values()):
        # Code of the user that the kit calls; of the run's thread, the training function, too.
        if (place := _innermost(frame, of_user=True)) and (frame is own or _is_called_by_kit(frame)):
            return place
    return _innermost(own)


def of_error(error: BaseException, num_places: int = 1) -> str:
    """Returns an error in a line, with so many lines of the user, the innermost first."""
    # Keras (3.15) writes the message in bold, and the arguments after it.
    text = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).partition("Arguments received")[0].split())[:400]
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    places = [
        f"{os.path.basename(frame.f_code.co_filename)}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_of_user(frame.f_code.co_filename)
    ]
    return f"{text} ({' in '.join(places[-num_places:][::-1])})" if places else text


def of_call() -> str:
    """Returns the line that called the kit; empty if there is none."""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        if is_of_user(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return ""


def _innermost(frame: types.FrameType, of_user: bool = False) -> str:
    """Returns the innermost line that is not the standard library's; of the user: unless the kit's is further in."""
    for found, line in traceback.walk_stack(frame):
        path = found.f_code.co_filename
        if of_user and path.startswith(_KIT):
            return ""
        if is_of_user(path) or (not of_user and path.startswith((_PACKAGES, _KIT))):
            return f"{path}:{line}, in {found.f_code.co_name}"
    return ""


def _is_called_by_kit(frame: types.FrameType) -> bool:
    return any(found.f_code.co_filename.startswith(_KIT) for found, _ in traceback.walk_stack(frame))
