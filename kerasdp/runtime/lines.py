"""Finds the line of a user's code that a message is about."""

import inspect
import os
import re
import sysconfig
import traceback

_KIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD, _PACKAGES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")


def is_of_user(path: str) -> bool:
    """Returns whether a file is no package's, nor of the standard library, nor made by a compiler."""
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", _KIT)
    return not path.startswith((_STANDARD, _PACKAGES, _KIT, compiled, "<frozen", "<string"))


def is_standard(path: str) -> bool:
    """Returns whether a file is of the standard library, in whose folder the packages may be."""
    return path.startswith((_STANDARD, "<frozen")) and not path.startswith(_PACKAGES)


def is_of_kit(path: str) -> bool:
    """Returns whether a file is of this package."""
    return path.startswith(_KIT)


def of_error(error: BaseException, num_places: int) -> str:
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
