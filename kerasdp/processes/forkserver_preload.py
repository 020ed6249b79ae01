"""Imported by the server that workers are forked from, before all else.

It ends with the program that has started it, also while it imports a framework. Signals to a group of processes would
end it, and its workers with it: it blocks them, and what is forked from it gets them, also one of the moment before.
"""

import os
import signal

from kerasdp.processes.workers import end_with_parent

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

end_with_parent()
signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS))
