"""Runs a function in worker processes of this machine, watches over them, and finds the error that ended them."""

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
# A worker that fails stays so long, with its connections, so that its error is seen before those that it causes. One
# that left nothing behind is seen at once; what another one wrote down a moment before may be for it.
_SECONDS_TO_STAY, _SECONDS_OF_DOUBT = 1.0, 0.5
# For each to write where it stands.
_SECONDS_TO_WRITE = 1.0
# What a process reads of its environment when it imports a framework: a server that has imported it is of no use to
# workers that are to have it otherwise.
_OF_IMPORTS = ("KERAS_", "CUDA_", "PYTHON", "LD_")


def supervise(work: Callable[..., Any], settings: Config, train: Callable[..., Any]) -> Any:
    """Runs `work(settings, train)` in a process of its own, restarts it if allowed; returns its result.

    Args:
        work: runs the workers.
        settings: `max_restarts` is read.
        train: the user-defined function.

    Raises:
        WorkerError: if a worker died or hung, and `max_restarts` are used up.
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
    """Calls a function in a new process for each name, watches over them, and returns what the first one returned.

    Args:
        function: of a module.
        args: its arguments. Functions among them may be written anywhere.
        names: of the processes, for errors.
        variables: returns what a process has in its environment besides what is here, by its number.
        preload: modules that each process needs. A server imports them once, and forks for each process, in this run
            and later ones. None: each process starts by itself, as it must to use a GPU which is in use here.

    Raises:
        UserError: if an argument refers to something that cannot be sent.
        RunError: of the first process that failed. All others are ended first.
        SystemExit: if the processes were ended by a signal that this one got, too.
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
    """Processes that run the same function."""

    def __init__(self, processes: list[Any], places: list[Place]):
        """`processes`: of `multiprocessing`, not yet started."""
        self.processes, self._places = processes, places
        self._died: dict[int, float] = {}

    def living(self) -> list[Any]:
        """Returns those that have been started and have not ended."""
        return [process for process in self.processes if process.pid is not None and process.is_alive()]

    def kill(self) -> None:
        """Ends all at once."""
        for process in self.living():
            process.kill()
        for process in self.processes:
            if process.pid is not None:
                process.join()

    def wait(self) -> None:
        """Waits until all have returned.

        Raises:
            RunError: if one fails, or nothing moves in one.
            SystemExit: if they end because of a signal, or call `sys.exit`.
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
        """Returns the error of a run in which nothing moves, and prints where each worker stands."""
        seconds = next(filter(None, map(watchdog.seconds_without_a_move, self._places)), 0)
        if not seconds:
            return None
        stacks = self._stacks()
        for name, stack in stacks.items():
            print(f"{name}:\n{stack.strip()}", file=sys.stderr, flush=True)
        where = watchdog.describe_stacks(stacks)
        return WorkerError(f"{where}: nothing moved for {seconds} s; a higher --hang_timeout waits longer")

    def _stacks(self) -> dict[str, str]:
        """Returns where each living worker stands, by its name."""
        living = [(place, each) for place, each in zip(self._places, self.processes) if each in self.living()]
        for place, process in living:
            if not watchdog.read_stack(place):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, watchdog.SIGNAL)
        time.sleep(_SECONDS_TO_WRITE)
        return {process.name: watchdog.read_stack(place) for place, process in living}

    def _failed(self) -> list[tuple[int, Outcome | None]]:
        """Returns the workers that failed, the first one first.

        Each by its number, with how it ended; None: it left nothing.
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
    """Runs in a worker, which leaves its files at a place."""
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
    """Returns the way to start processes that have these modules: by forking a server, if it would be as here.

    The server ends with the thread that has started it, since it ends with this process: so only the main one has it.
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
            f"{process.name} could not be started: the process that imports the framework for all workers has ended; "
            "is the system short of memory?"
        ) from error


def peak_memory_of_process() -> int:
    """Returns the most bytes that this process has used."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes there, else kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def end_with_parent() -> None:
    """Lets the system end this process when the one that started it dies, even by `kill -9`. On Linux only."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
