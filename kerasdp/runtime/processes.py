"""Runs a function in a process of its own."""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from kerasdp.errors import RunError, WorkerError
from kerasdp.runtime import signals
from kerasdp.runtime.modules import not_run_again
from kerasdp.runtime.sending import sent

# After these, a process that was asked to end is killed.
_SECONDS_TO_END = 10.0


def call_in_new_process(function: Callable[..., Any], *args: Any, name: str) -> Any:
    """Calls a function in a new process, which ends with this one, however that ends; returns its result.

    Args:
        function: of a module.
        *args: its arguments. Functions among them may be written anywhere.
        name: of the process, for errors.

    Raises:
        UserError: if an argument refers to something that cannot be sent.
        RunError: the function's own, or a `WorkerError` if the process died or raised anything else.
        SystemExit: if the process was ended by a signal that this one got, too.
    """
    with contextlib.ExitStack() as stack:
        given = [stack.enter_context(sent(value)) if callable(value) else value for value in args]
        return _call(function, given, name)


def _call(function: Callable[..., Any], args: list[Any], name: str) -> Any:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, name, function, *args))
    try:
        with signals.passed_on(lambda: [process] if process.pid else []):
            with not_run_again():
                process.start()
            sender.close()
            result = receiver.recv()
            process.join(timeout=30)  # ends by itself
    except EOFError:
        process.join()
        exit_code = process.exitcode or 0  # None before it ends
        signals.leave_as(exit_code)
        raise WorkerError(f"{name} {how_it_ended(exit_code)}") from None
    finally:
        if process.pid is not None and process.is_alive():
            process.terminate()
            process.join(_SECONDS_TO_END)
            process.kill()
            process.join()
    if isinstance(result, RunError):
        raise result
    return result


def peak_memory_of_process() -> int:
    """Returns the most bytes that this process has used."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes there, else kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def how_it_ended(exit_code: int) -> str:
    """Returns an exit code in words."""
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def end_with_parent() -> None:
    """Lets the system end this process when the one that started it dies, even by `kill -9`. On Linux only."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def start_processes_as_usual() -> None:
    """Lets what `train` starts, such as a DataLoader's workers, start as in any program.

    A process that was spawned spawns its own ones, to which classes of a script or a notebook cannot be sent.
    """
    usual, *_ = multiprocessing.get_all_start_methods()
    multiprocessing.set_start_method(usual, force=True)


def _send_result(sender: Any, name: str, function: Callable[..., Any], *args: Any) -> None:
    end_with_parent()
    start_processes_as_usual()
    try:
        result = function(*args)
    except RunError as error:
        result = error
    except KeyboardInterrupt:  # which the parent gets, too
        os._exit(128 + signal.SIGINT)
    except Exception:
        result = WorkerError(f"{name} failed\n{traceback.format_exc()}".rstrip())
    with contextlib.suppress(BrokenPipeError):
        sender.send(result)
