"""Prepares the server process that worker processes are forked from. The server imports this module first.

The server ends with the program that started it, even while it imports a framework. A signal to the process group would
end the server and its workers. So the server blocks SIGTERM and SIGUSR1, and each forked worker unblocks them. A signal
that arrived just before the fork then still reaches the worker.
"""

import os
import signal

from kerasdp.processes.workers import end_with_parent

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

end_with_parent()
signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS))
