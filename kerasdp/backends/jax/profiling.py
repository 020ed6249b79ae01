"""Records what JAX does, for `--profile`."""

import jax

HOW_TO_OPEN = "pip install xprof, then: xprof --logdir="


def start(folder: str) -> None:
    """Begins to record."""
    jax.profiler.start_trace(folder)


def stop(folder: str) -> None:
    """Waits for the steps that are on their way, ends the record, and writes it."""
    jax.block_until_ready(jax.live_arrays())
    jax.profiler.stop_trace()
