"""Starts programs without their imports: a process that holds a backend, Keras and the kit, and forks for each one.

    python server.py BACKEND SOCKET

Whoever asks (see `helpers.run`) connects to the socket, and sends for each program a request: argv, folder and
environment as JSON, with three pipes: for the answers, which are the process's id and its exit code, and for the
program's stdout and stderr. The server ends when the last connection is closed.
"""

import atexit
import contextlib
import importlib
import json
import multiprocessing.spawn
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

# What a run imports that is not the kit's, and what the kit itself imports, in the order of a run.
SHARED = ("matplotlib.figure", "matplotlib.backends.backend_agg", "safetensors.numpy", "absl.flags")
KIT = ("launch", "flags", "training.runner", "data.datasets", "models", "parity")


def main() -> None:
    """Imports everything once, and answers until nobody is connected any more."""
    backend, path = sys.argv[1:]
    os.environ["KERAS_BACKEND"] = backend
    for module in (f"kerasdp.backends.{backend}.data_parallel", *(f"kerasdp.{name}" for name in KIT), *SHARED):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a keeper
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{path}.new")
        door.listen()
        os.rename(f"{path}.new", path)  # from here on it can be found
        connections: list[socket.socket] = []
        while True:
            for ready in select.select([door, *connections], [], [])[0]:
                if ready is door:
                    connections.append(door.accept()[0])
                    continue
                message, descriptors, *_ = socket.recv_fds(ready, 1 << 20, 3)
                if message and os.fork() == 0:
                    for each in (door, *connections):
                        each.close()
                    _keep(*descriptors, **json.loads(message))
                for descriptor in descriptors:
                    os.close(descriptor)
                if not message:
                    ready.close()
                    connections.remove(ready)
            if not connections:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # from here on nobody finds it; who did so before is still served
                if not select.select([door], [], [], 0)[0]:
                    return


def _keep(answers: int, *outputs: int, **request: Any) -> NoReturn:
    """Starts one program, tells its process's id, waits for its end, and tells its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if process == 0:
        os.close(answers)
        _run(list(outputs), **request)
    for output in outputs:
        os.close(output)
    os.write(answers, b"%d\n" % process)
    os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    os._exit(0)


def _run(descriptors: list[int], argv: list[str], cwd: str, env: dict[str, str]) -> None:
    """Becomes the program, as `python ARGV` would, in a session of its own."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    multiprocessing.util.spawnv_passfds = _fork_or_spawn
    # A shell starts its background jobs, maybe the tests, with Ctrl-C switched off, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _end(lambda: runpy.run_path(argv[0], run_name="__main__"))


def _end(work: Callable[[], object]) -> NoReturn:
    """Does the work, and ends the process as Python does."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    if "OMP_NUM_THREADS" in os.environ and "torch" in sys.modules:  # which was read when torch was loaded
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    code = 0
    try:
        try:
            work()
        except SystemExit:
            raise
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            code = 1
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


_spawn = multiprocessing.util.spawnv_passfds


def _fork_or_spawn(path: str, arguments: list[str], descriptors: list[int]) -> int:
    """In place of starting Python again: forks, where a worker of `multiprocessing`, or its server, is asked for.

    It gets what a new process gets: its pipes, the environment, and by pickling what it has to do.
    """
    mains = "spawn_main(", "forkserver import main"
    command = next((str(each) for each in arguments if any(main in str(each) for main in mains)), None)
    if command is None:  # the tracker of resources
        return _spawn(path, arguments, descriptors)
    process = os.fork()
    if process:
        return process
    kept = sorted({*descriptors, 0, 1, 2})
    for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGINT}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    multiprocessing.util._finalizer_registry.clear()
    sys.argv[:] = [sys.argv[0], "--multiprocessing-fork"]
    sys.modules["__main__"] = type(sys)("__main__")
    return _end(lambda: exec(command, {}))


if __name__ == "__main__":
    main()
