"""Starts `programs/watched.py` on hosts of `netns`, and knows where each process of the run is."""

import json
import os
import pathlib
import select
import shutil
import sys
import tempfile
import time

from tests.helpers import PROGRAMS, ROOT, environment, finish, result_of, start

SECRET = "only the hosts of the run know this"  # noqa: S105
PORT = 29500
ON_ONE_MACHINE = {"torch": "loader", "jax": "records", "tensorflow": "records"}


def start_on(host, program, *arguments, backend, **variables):
    """Starts a program on a host, in a process that has the framework already."""
    command = [PROGRAMS / "on_host.py", host.namespace, host.name, program, *arguments]
    return start(*command, backend=backend, PYTHONPATH=str(ROOT), **variables)


class Run:
    """A run of several hosts, or of one machine.

    Attributes:
        folder: for its files.
        temporary: its TMPDIR, which has the rights of /tmp.
        is_cold: whether its programs start as a user starts them.
        programs: what was started, by the number of the host.
    """

    def __init__(self, hosts, backend, *, variables=None, is_cold=False, **settings):
        self.hosts, self.backend, self.is_cold = hosts, backend, is_cold
        # Of /tmp, since the path of a Unix socket has 107 letters at most.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kdp-", dir="/tmp"))  # noqa: S108
        self.folder.chmod(0o755)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        os.chmod(self.temporary, 0o1777)  # noqa: S103
        self.variables = {"TMPDIR": str(self.temporary), **(variables or {})}
        self.settings = {"backend": backend, "folder": str(self.folder), "num_devices": 1} | settings
        self.programs = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        (self.folder / "continue").touch()  # a process that is left goes on, and ends
        for program in self.programs.values():
            if program.poll() is None:
                program.send_signal(9)
            program.stdout.close()
            program.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, number, **variables):
        """Starts the process of one host; on one machine, number 0."""
        settings = dict(self.settings)
        if len(self.hosts) > 1:
            place = f"{self.hosts[0].address}:{PORT}"
            settings |= {"hosts": str(len(self.hosts)), "host_rank": number, "coordinator": place}
        return self.start_as(number, self.hosts[number], settings, **variables)

    def start_as(self, number, host, settings, **variables):
        """Starts a process with settings of its own."""
        arguments = PROGRAMS / "watched.py", json.dumps(settings)
        given = self.variables | variables
        if self.is_cold:
            env = environment(PYTHONPATH=str(ROOT), **given)
            self.programs[number] = host.start(sys.executable, *arguments, env=env, cwd=ROOT)
        else:
            self.programs[number] = start_on(host, *arguments, backend=self.backend, **given)
        return self.programs[number]

    def wait_for(self, mark, num_ranks, seconds=60.0):
        """Waits until so many ranks are there; returns how long that took."""
        begin = time.monotonic()
        while not all((self.folder / f"{mark}-{rank}").exists() for rank in range(num_ranks)):
            ended = {number: program.poll() for number, program in self.programs.items()}
            if any(code is not None for code in ended.values()):
                self.fail(f"ended before {mark}: {ended}")
            if time.monotonic() - begin > seconds:
                self.fail(f"not all of {num_ranks} ranks are at {mark} after {seconds:.1f} s")
            time.sleep(0.02)
        return time.monotonic() - begin

    def fail(self, words):
        """Raises, with what the programs have said."""
        texts = []
        for number, program in self.programs.items():
            for stream in (program.stdout, program.stderr):
                os.set_blocking(stream.fileno(), False)
                texts.append(f"{number}: {(os.read(stream.fileno(), 1 << 16) if has(stream) else b'').decode()}")
        raise AssertionError("\n".join([words, *texts]))

    def results(self, timeout=60):
        """Lets it continue; returns the losses, where the program prints them."""
        (self.folder / "continue").touch()
        done = [finish(program, timeout) for program in self.programs.values()]
        return [result_of(each) for each in done if each.returncode or "RESULT" in each.stdout]


def has(stream):
    """Whether a pipe has something to read, or its end."""
    return bool(select.select([stream], [], [], 0)[0])
