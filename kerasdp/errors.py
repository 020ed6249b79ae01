"""Defines the errors that end a run. Each has a one-line message for the user, and an exit code."""

import os
import re
import shlex
import sys
import types

# Flags whose name differs from their field of `Config`.
FIELDS_OF_FLAGS = {"gpus": "num_devices"}

# Environment variable that is set while a recipe runs from the command line. Worker processes inherit it.
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
    """Makes messages of this process and its workers show options as flags, such as `--gpus=2`."""
    os.environ[_FROM_COMMAND_LINE] = "1"


def is_from_command_line() -> bool:
    """Returns whether the run was started from the command line. If so, messages show options as flags."""
    return _FROM_COMMAND_LINE in os.environ


def addressed(message: str) -> str:
    """Returns a message in which options are flags or Python arguments, depending on how the program was started.

    If a command line started the program, flags stay flags. Otherwise a flag such as `--gpus=2` becomes an argument,
    `num_devices=2`.

    Args:
        message: a message in which options are flags. A message with several lines comes from another program, and is
            not changed.
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
    """Returns a text without the passwords and tokens of its URLs, such as `ftp://***@host/run`.

    Args:
        text: a text to show or write.
        url: a URL whose password is removed, too, even if the text contains the password without the URL.
    """
    user = _URL_USER.search(url)
    for secret in user[0][len(user[1]) : -1].split(":", 1)[1:] if user else ():
        text = text.replace(secret, _HIDDEN) if secret else text
    return _URL_QUERY.sub(rf"\1{_HIDDEN}", _URL_USER.sub(rf"\1{_HIDDEN}@", text))


class RunError(Exception):
    """The base class of all errors that end a run. The message says what is wrong, and what to do.

    A program that does not catch the error prints the message as one line. The exit code of the program is the
    attribute `exit_code`. It is 1, unless a subclass changes it.

    Args:
        message: text of the error. It contains options as flags, such as `--gpus=2`. Python users see arguments, such
            as `num_devices=2`. Passwords in URLs are removed.

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
        """Returns the lines that a notebook shows: only the message, without the stack.

        IPython calls this method to show an exception (IPython/core/interactiveshell.py, since 0.11).
        """
        return [f"{type(self).__name__}: {self}"]


class UserError(RunError, ValueError):
    """Raised if a flag, an argument or a file cannot be used. The exit code is 2. The error is also a `ValueError`.

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
    """Raised if a device fails: it is out of memory, in use by another program, or disconnected from other devices."""


class NonFiniteLossError(RunError):
    """Raised if the loss becomes NaN or infinite."""


class ReplicasDifferError(RunError):
    """Raised if the weights of a model differ between replicas."""


class PreemptedError(RunError):
    """Raised if SIGTERM or SIGUSR1 stops a run, after the run has saved a checkpoint. The exit code is 99.

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
    """Raised if a checkpoint is corrupt or truncated."""


class WorkerError(RunError):
    """Raised if a worker process dies or raises an error. The message contains the error of the worker."""


def way_to_resume(workdir: str | None, checkpoint_dir: str | None) -> str:
    """Returns a text with the flags, or the call of `launch` in Python, that resume a run with these folders."""
    folders = {"workdir": workdir, "checkpoint_dir": checkpoint_dir}
    given = {name: folder for name, folder in folders.items() if folder is not None}
    if is_from_command_line():
        return " ".join([*(shlex.quote(f"--{name}={folder}") for name, folder in given.items()), "--resume"])
    return ", ".join(["launch(...", *(f'{name}="{folder}"' for name, folder in given.items()), "resume=True)"])


def say_how_it_ends(error: RunError | KeyboardInterrupt) -> int:
    """Prints the last message of a program that ends because of an error or Ctrl-C. Returns the exit code."""
    line = str(error) if isinstance(error, PreemptedError) else f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        line = "; ".join(["interrupted", *getattr(error, "__notes__", [])])
        line = f"\n{line}" if sys.stderr.isatty() else line  # else it would be on the line of the progress bar
    print(line, file=sys.stderr, flush=True)
    return error.exit_code if isinstance(error, RunError) else _EXIT_CODE_OF_INTERRUPT


def end_in_a_line() -> None:
    """Makes an uncaught `RunError` or Ctrl-C end the program with a one-line message and its exit code.

    The function sets `sys.excepthook`, so it does not affect code that catches the error. The hook raises `SystemExit`
    to set the exit code (Python 3.11 to 3.14). With KERASDP_TRACEBACK=1 in the environment the function does nothing,
    so that Python prints the full traceback.
    """
    former = sys.excepthook
    if os.environ.get("KERASDP_TRACEBACK") == "1" or getattr(former, "__module__", None) == __name__:
        return

    def show(kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
        if isinstance(error, (RunError, KeyboardInterrupt)):
            raise SystemExit(say_how_it_ends(error))
        former(kind, error, frames)

    sys.excepthook = show
