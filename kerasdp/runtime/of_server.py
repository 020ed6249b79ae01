"""Imported by the server that workers are forked from, before all else.

It ends with the program that has started it, also while it imports a framework. Signals to a group of processes would
end it, and its workers with it: it ignores them, and its workers do not.
"""

import os
import signal

from kerasdp.runtime.workers import end_with_parent

_SERVER = os.getpid()


def _listen() -> None:
    """Lets a worker get the signals, and leaves the processes that it forks as they are."""
    if os.getppid() == _SERVER:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


end_with_parent()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
os.register_at_fork(after_in_child=_listen)
