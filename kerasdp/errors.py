"""Defines the errors that end a run: each is one line for the user, and an exit code."""

import os
import re
import shlex
import sys
import types

# Flags that are named otherwise than their field of `Config`.
FIELDS_OF_FLAGS = {"gpus": "num_devices"}

# In the environment while a recipe runs from the command line, so that its worker processes know, too.
_FROM_COMMAND_LINE = "KERASDP_FROM_COMMAND_LINE"
_SWITCHES = ("deterministic", "resume")
# The user and the query of a URL: clouds put passwords before the host's `@`, signatures and tokens after a `?`.
_URL_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)(?:[^/\s'\"@:]*:[^\s'\"]*|[^/\s'\"@]+)@")
_URL_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://[^\s'\"?]*\?)[^\s'\"]+")
_HIDDEN = "***"
# As a shell shows it.
_EXIT_CODE_OF_INTERRUPT = 130
_FLAG = re.compile(r"(?<![\w-])--([a-z]\w*)(?![\w-])(?:=(\w+(?:\.\w+)*))?(:?)")


def say_flags() -> None:
    """Lets all messages of this process, and of its workers, name flags: it was started by a command line."""
    os.environ[_FROM_COMMAND_LINE] = "1"


def is_from_command_line() -> bool:
    """Returns whether messages name flags."""
    return _FROM_COMMAND_LINE in os.environ


def addressed(message: str) -> str:
    """Returns a message in which choices are written as the user writes them, on the command line or in Python.

    Args:
        message: with flags, as `--gpus=2`. They stay on the command line, and become arguments, as `num_devices=2`, for
            people in Python. What has several lines is another program's text, and stays as it is.
    """
    if is_from_command_line() or "\n" in message:
        return message
    return _FLAG.sub(_as_argument, message)


def _as_argument(flag: re.Match[str]) -> str:
    name, value, colon = flag.groups()
    if value is None and name in _SWITCHES and not colon:
        value = "True"
    elif value is not None and not (value[0].isdecimal() or value in ("True", "False", "None")):
        value = f'"{value}"'
    field = FIELDS_OF_FLAGS.get(name, name)
    return (field if value is None else f"{field}={value}") + colon


def redacted(text: str, url: str = "") -> str:
    """Returns a text without the passwords and tokens of the URLs in it, as `ftp://***@host/run`.

    Args:
        text: to be shown or written.
        url: what another program was given, whose text this may be: its password is not shown alone, either.
    """
    user = _URL_USER.search(url)
    for secret in user[0][len(user[1]) : -1].split(":", 1)[1:] if user else ():
        text = text.replace(secret, _HIDDEN) if secret else text
    return _URL_QUERY.sub(rf"\1{_HIDDEN}", _URL_USER.sub(rf"\1{_HIDDEN}@", text))


class RunError(Exception):
    """A run that has to end. The message says what was expected, what was received and what to do.

    It is the base class of all errors of a run. A program that does not catch it ends with the message in one line, and
    with the exit code `exit_code` (1, unless a subclass says otherwise).

    Args:
        message: the text. It names choices as flags, `--gpus=2`; people in Python read `num_devices=2`. Passwords in
            URLs are removed.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        def train(runner):
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(1e20), "mse")
            model.fit(np.random.rand(64, 8), np.random.rand(64, 1), epochs=10)

        try:
            kerasdp.launch(train)
        except kerasdp.RunError as error:
            print(error)  # the loss became inf at step 2 ...
        ```
    """

    exit_code = 1

    def __init__(self, message: str):
        super().__init__(redacted(addressed(message)))

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that a notebook shows: the message, which is whole, without the frames of this package.

        IPython asks every exception for this method (IPython/core/interactiveshell.py, since 0.11).
        """
        return [f"{type(self).__name__}: {self}"]


class UserError(RunError, ValueError):
    """A flag, an argument or a file that cannot be used as given. The exit code is 2. It is also a `ValueError`.

    Example:
        ```python
        import kerasdp

        try:
            config = kerasdp.Config(batch_size=0)
        except kerasdp.UserError as error:
            print(error)  # batch_size: expected a whole number of at least 1. Received: 0
        ```
    """

    exit_code = 2


class DeviceError(RunError):
    """A device failed: it has too little memory, another program holds it, the way to the others is closed."""


class NonFiniteLossError(RunError):
    """The loss became NaN or infinite, at `step`."""

    def __init__(self, message: str, step: int = 0):
        super().__init__(message)
        self.step = step


class ReplicasDifferError(RunError):
    """The replicas of one model no longer hold the same weights."""


class PreemptedError(RunError):
    """A signal (SIGTERM or SIGUSR1) asked the run to end, and the run has saved a checkpoint. The exit code is 99.

    The message says how to resume the run.

    Example:
        ```python
        import signal
        import keras
        import numpy as np
        import kerasdp

        def train(runner):
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            stop = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: signal.raise_signal(signal.SIGTERM))
            model.fit(np.random.rand(64, 8), np.random.rand(64, 1), callbacks=[stop])  # as a scheduler would stop it

        try:
            kerasdp.launch(train, workdir="runs/stopped")
        except kerasdp.PreemptedError as error:
            print(error, error.exit_code)
        ```
    """

    # Grid Engine requeues a job that ends with this code; other schedulers can be told to.
    exit_code = 99


class CheckpointError(RunError):
    """A checkpoint that cannot be used: corrupt or truncated."""


class WorkerError(RunError):
    """A worker process died or raised; the text holds that worker's error."""


def way_to_resume(workdir: str | None, checkpoint_dir: str | None) -> str:
    """Returns what resumes a run that has these folders, as it is typed on the command line or in Python."""
    folders = {"workdir": workdir, "checkpoint_dir": checkpoint_dir}
    given = {name: folder for name, folder in folders.items() if folder is not None}
    if is_from_command_line():
        return " ".join([*(shlex.quote(f"--{name}={folder}") for name, folder in given.items()), "--resume"])
    return ", ".join(["launch(...", *(f'{name}="{folder}"' for name, folder in given.items()), "resume=True)"])


def say_how_it_ends(error: RunError | KeyboardInterrupt) -> int:
    """Prints what a program says last that an error or Ctrl-C ends; returns its exit code."""
    line = str(error) if isinstance(error, PreemptedError) else f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        line = "; ".join(["interrupted", *getattr(error, "__notes__", [])])
    print(line, file=sys.stderr, flush=True)
    return error.exit_code if isinstance(error, RunError) else _EXIT_CODE_OF_INTERRUPT


def end_in_a_line() -> None:
    """Lets a `RunError`, or Ctrl-C, that nobody catches end the program as a recipe ends: a line, and its exit code.

    A program can only say so to `sys.excepthook`, which gets what has ended it; what catches the error is as ever.
    An exit code is what the hook raises: Python (3.11 to 3.14) ends with a SystemExit that comes out of it.
    With KERASDP_TRACEBACK=1 in the environment the frames are shown.
    """
    former = sys.excepthook
    if os.environ.get("KERASDP_TRACEBACK") == "1" or getattr(former, "__module__", None) == __name__:
        return

    def show(kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
        if isinstance(error, (RunError, KeyboardInterrupt)):
            raise SystemExit(say_how_it_ends(error))
        former(kind, error, frames)

    sys.excepthook = show
