"""Starts `programs/watched.py` on a host of `netns`, and knows where each process of the run is."""

import json
import os
import pathlib
import shutil
import sys
import tempfile
import time

from tests.helpers import PROGRAMS, ROOT, environment, finish, result_of, start


class Run:
    """A run of one machine.

    Attributes:
        folder: for its files.
        temporary: its TMPDIR, which has the rights of /tmp.
        program: what was started.
    """

    def __init__(self, host, backend, *, is_cold=False, **settings):
        """`is_cold`: whether the program starts as a user starts it."""
        # Of /tmp, since the path of a Unix socket has 107 letters at most.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kdp-", dir="/tmp"))  # noqa: S108
        self.folder.chmod(0o755)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        os.chmod(self.temporary, 0o1777)  # noqa: S103
        settings = {"backend": backend, "folder": str(self.folder), "num_devices": 1} | settings
        variables = {"TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        program = PROGRAMS / "watched.py", json.dumps(settings)
        if is_cold:
            self.program = host.start(sys.executable, *program, env=environment(**variables), cwd=ROOT)
        else:
            command = [PROGRAMS / "on_host.py", host.namespace, host.name, *program]
            self.program = start(*command, backend=backend, **variables)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        (self.folder / "continue").touch()  # a process that is left goes on, and ends
        if self.program.poll() is None:
            self.program.send_signal(9)
        self.program.stdout.close()
        self.program.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def wait_for(self, mark, num_ranks, seconds=60.0):
        """Waits until so many ranks are there."""
        begin = time.monotonic()
        while not all((self.folder / f"{mark}-{rank}").exists() for rank in range(num_ranks)):
            if self.program.poll() is not None:
                raise AssertionError(f"it has ended before {mark}: {finish(self.program, 20)}")
            assert time.monotonic() - begin < seconds, f"not all of {num_ranks} ranks are at {mark}"
            time.sleep(0.02)

    def losses(self, timeout=60):
        """Lets it continue; returns the losses."""
        (self.folder / "continue").touch()
        return result_of(finish(self.program, timeout))
