"""Imported by the server that workers are forked from: what is forked from it gets signals, and it does not itself."""

import os

from kerasdp.runtime import signals

os.register_at_fork(after_in_child=signals.let_in)
