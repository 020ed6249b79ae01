"""Prepares the server process from which worker processes are forked. The server imports this module first.

The server ends when the program that started it ends, even during the import of a framework. A signal to the process
group would end the server and the workers. So the server blocks SIGTERM and SIGUSR1. Each worker unblocks both signals
just after its fork. Before that, a signal to the worker stays pending.
"""

import os
import signal

from kerasdp.processes.workers import end_with_parent

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

end_with_parent()
signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS))
