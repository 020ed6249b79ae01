"""Runs a function in worker processes on this machine, and returns the result or raises the first error."""

import contextlib
import ctypes
import dataclasses
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from kerasdp.config import Config
from kerasdp.errors import RunError, WorkerError
from kerasdp.processes import hardware, outcome, signals, watchdog
from kerasdp.processes.outcome import Outcome, Place
from kerasdp.processes.sending import not_run_again, sent

_SECONDS_BETWEEN_LOOKS = 0.25
# When a worker has failed, the others get so long to end by themselves.
_SECONDS_TO_END = 5.0
# A failed worker keeps its connections open for so long. So its error is recorded before the errors that it causes in
# others. A worker that died without a record is noticed at once, but an error recorded just before may be its effect.
_SECONDS_TO_STAY, _SECONDS_OF_DOUBT = 1.0, 0.5
# For each to write where it stands.
_SECONDS_TO_WRITE = 1.0
# What a process reads of its environment when it imports a framework: a server that has imported it is of no use to
# workers that are to have it otherwise.
_OF_IMPORTS = ("KERAS_", "CUDA_", "PYTHON", "LD_")


def supervise(work: Callable[..., Any], settings: Config, train: Callable[..., Any]) -> Any:
    """Runs `work(settings, train)` in a new process, and restarts the process after a failure.

    Args:
        work: function that runs the workers.
        settings: settings of the run. `supervise` reads `max_restarts`, and sets `resume` for a restart.
        train: the user-defined training function.

    Returns:
        The result of `work`.

    Raises:
        WorkerError: if a worker died or made no progress, after `max_restarts` restarts.
    """
    for restart in range(1, settings.max_restarts + 2):
        try:
            return run_workers(work, (settings, train), names=["the worker"])
        except WorkerError as error:
            if restart > settings.max_restarts or signals.noted() is not None:
                raise
            line = f"restart {restart} of {settings.max_restarts}, from the last checkpoint"
            print(f"{error}\n{line}", file=sys.stderr, flush=True)
        settings = dataclasses.replace(settings, resume=True)
    raise AssertionError("not reached")


def run_workers(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    names: list[str],
    variables: Callable[[int], Mapping[str, str]] = lambda number: {},
    preload: list[str] | None = None,
) -> Any:
    """Calls a function in one or more new processes, monitors the processes, and returns the result of the first one.

    Args:
        function: a module-level function.
        args: arguments of the function. An argument may be any function, including a nested function or a lambda.
        names: names of the processes, for error messages. One process starts for each name.
        variables: function that takes the number of a process, and returns additional environment variables for the
            process.
        preload: modules that each process needs. A server process imports these modules once. Each worker of this run
            and of later runs is forked from the server. None: workers start without a server. This is necessary if a
            worker uses a GPU that the current process uses, too.

    Raises:
        UserError: if an argument refers to an object that cannot be pickled.
        RunError: the error of the process that failed first. It is raised after all processes have ended.
        SystemExit: if a signal ended the processes, and the current process received the signal, too.
    """
    with contextlib.ExitStack() as stack:
        given = [stack.enter_context(sent(value)) if callable(value) else value for value in args]
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kerasdp-", ignore_cleanup_errors=True))
        places = [Place(folder, number, len(names)) for number in range(len(names))]
        environment = dict(os.environ)
        context: Any = multiprocessing.get_context("spawn" if preload is None else _server(preload))
        workers = Workers(
            [
                context.Process(
                    target=_work, args=(place, environment | dict(variables(place.number)), function, given), name=name
                )
                for place, name in zip(places, names)
            ],
            places,
        )
        stack.callback(workers.kill)
        with signals.passed_on(workers.living):
            for process in workers.processes:
                with signals.delayed():  # one whose start is cut short would run, and nobody would know of it
                    _start(process)
            workers.wait()
        ended = outcome.read(places[0])
        return ended and pickle.loads(ended.result)


class Workers:
    """A group of processes that run the same function."""

    def __init__(self, processes: list[Any], places: list[Place]):
        """Creates a group of `multiprocessing` processes that have not started. `places` has one entry per process."""
        self.processes, self._places = processes, places
        self._died: dict[int, float] = {}

    def living(self) -> list[Any]:
        """Returns the processes that have started and have not ended."""
        return [process for process in self.processes if process.pid is not None and process.is_alive()]

    def kill(self) -> None:
        """Kills all running processes, and waits until they have ended."""
        for process in self.living():
            process.kill()
        for process in self.processes:
            if process.pid is not None:
                process.join()

    def wait(self) -> None:
        """Waits until the function has returned in all processes.

        Raises:
            RunError: if a process fails or makes no progress.
            SystemExit: if a signal ends the processes, or a process calls `sys.exit`.
        """
        failed_since = 0.0
        while True:
            living = self.living()
            multiprocessing.connection.wait([each.sentinel for each in living], _SECONDS_BETWEEN_LOOKS)
            if failed := self._failed():
                failed_since = failed_since or time.monotonic()
                if not living or time.monotonic() - failed_since > _SECONDS_TO_END:
                    self.kill()
                    raise self._error(*failed) from None
            elif not living:
                return
            elif error := self._hanging():
                raise error

    def _hanging(self) -> WorkerError | None:
        """Returns an error if the watchdog timer of a worker has expired; otherwise returns None.

        The stack of each worker is printed before an error is returned.
        """
        seconds = next(filter(None, map(watchdog.seconds_without_a_move, self._places)), 0)
        if not seconds:
            return None
        stacks = self._stacks()
        for name, stack in stacks.items():
            print(f"{name}:\n{stack.strip()}", file=sys.stderr, flush=True)
        where = watchdog.describe_stacks(stacks)
        return WorkerError(f"{where}: no progress for {seconds} s; if a step takes longer, use a higher --hang_timeout")

    def _stacks(self) -> dict[str, str]:
        """Returns the stack of each running worker, by name of the worker."""
        living = [(place, each) for place, each in zip(self._places, self.processes) if each in self.living()]
        for place, process in living:
            if not watchdog.read_stack(place):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, watchdog.SIGNAL)
        time.sleep(_SECONDS_TO_WRITE)
        return {process.name: watchdog.read_stack(place) for place, process in living}

    def _failed(self) -> list[tuple[int, Outcome | None]]:
        """Returns the failed workers, in the order in which they failed.

        Returns:
            A list of tuples: number of a worker, and its `Outcome`, or None if the worker left no record.
        """
        living = self.living()
        found = {place.number: outcome.read(place) for place in self._places}
        for number, process in enumerate(self.processes):
            if found[number] is None and process not in living:
                self._died.setdefault(number, time.monotonic() - _SECONDS_OF_DOUBT)
        when = self._died | {number: each.time for number, each in found.items() if each and each.frames}
        return [(number, found[number]) for number in sorted(when, key=lambda number: when[number])]

    def _error(self, first: tuple[int, Outcome | None], *others: tuple[int, Outcome | None]) -> BaseException:
        number, ended = first
        name = self.processes[number].name
        error = ended and ended.as_error(name)
        if isinstance(error, SystemExit) and error.code and len(self.processes) > 1:
            print(f"{name} called sys.exit({error.code!r})", file=sys.stderr, flush=True)
        if error and not isinstance(error, WorkerError | SystemExit):
            # If all raise, the first worker may know more: which checkpoint is left, say.
            of_rank0 = [each.as_error(name) for other, each in others if other == 0 and each]
            return next((each for each in of_rank0 if not isinstance(each, WorkerError | SystemExit)), error)
        if error:
            return error
        if (signal_number := signals.noted()) is not None:
            return SystemExit(128 + signal_number)
        return WorkerError(f"{name} {outcome.how_it_ended(self.processes[number].exitcode or 0)}")


def _work(place: Place, environment: dict[str, str], function: Callable[..., Any], args: list[Any]) -> None:
    """Runs a function in a worker process, and records the return value or the error in a file at `place`."""
    os.environ.clear()
    os.environ.update(environment)
    end_with_parent()
    hardware.keep_memory(os.environ.get("KERAS_BACKEND", ""))
    # Lets what `train` starts, such as a DataLoader's workers, start as in any program: a process that was spawned
    # spawns its own ones, to which classes of a script or a notebook cannot be sent.
    usual, *_ = multiprocessing.get_all_start_methods()
    multiprocessing.set_start_method(usual, force=True)
    outcome.current = place
    watchdog.begin(place)
    # Ctrl-C reaches every process of a terminal: the parent says what becomes of this one. Not SIG_IGN, which programs
    # that are started here would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        outcome.write_result(function(*args))
        return
    except SystemExit as end:
        if signals.noted() is not None:
            raise
        outcome.write_error(end)
    except BaseException as error:
        outcome.write_error(error)
        if not isinstance(error, RunError):
            time.sleep(_SECONDS_TO_STAY)
    sys.stdout.flush()
    sys.stderr.flush()
    if place.num_workers > 1:
        # Not in order: what is left of a framework would wait for workers that wait for this one.
        os._exit(0)


_server_state: Any = None


def _server(preload: list[str]) -> str:
    """Returns the `multiprocessing` start method for processes that need the modules in `preload`.

    Only the main thread uses a server, because the server ends with the thread that started it.

    Returns:
        `"forkserver"` if a server can fork processes with the environment and the outputs of this process. Otherwise
        `"spawn"`.
    """
    global _server_state
    if threading.current_thread() is not threading.main_thread():
        return "spawn"
    variables = {name: value for name, value in os.environ.items() if name.startswith(_OF_IMPORTS)}
    outputs = []
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            found = os.fstat(descriptor)
            outputs.append((descriptor, found.st_dev, found.st_ino))
    state = preload, variables, outputs
    is_first = _server_state is None
    if is_first:
        multiprocessing.set_forkserver_preload(["kerasdp.processes.forkserver_preload", *preload])
    try:
        multiprocessing.forkserver.ensure_running()  # also one that has crashed
    except OSError:  # the path of its socket, in TMPDIR, is too long (Python 3.11)
        return "spawn"
    if is_first:
        _server_state = state
        first = multiprocessing.get_context("forkserver").Process(target=os.getpid)
        _start(first)  # which waits for the imports
        first.join()
    return "forkserver" if _server_state == state else "spawn"


def _start(process: Any) -> None:
    try:
        with not_run_again():
            process.start()
    except (EOFError, ConnectionError) as error:
        raise WorkerError(
            f"{process.name} cannot start, because the server process that imports the framework has ended; check "
            "whether the system has enough memory"
        ) from error


def peak_memory_of_process() -> int:
    """Returns the peak memory of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes there, else kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def end_with_parent() -> None:
    """Makes Linux kill this process when its parent process dies, even if `kill -9` ended the parent process.

    The function has no effect on other operating systems.
    """
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
