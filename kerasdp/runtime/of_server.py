"""Imported by the server that workers are forked from, before all else.

It ends with the program that has started it, also while it imports a framework. What is forked from it gets signals,
and it does not itself.
"""

import os

from kerasdp.runtime import signals, workers

workers.end_with_parent()
os.register_at_fork(after_in_child=signals.let_in)
