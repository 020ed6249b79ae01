"""Records the steps that `--profile` names with the profiler of the backend."""

import importlib
import os
from typing import Any

import keras

from kerasdp.config import Config
from kerasdp.reporting.report import say
from kerasdp.runtime.run_state import RunState


class Profile(keras.callbacks.Callback):
    """Records some steps. What is recorded computes the same, only slower.

    Args:
        config: `profile` and `backend` are read.
        state: of the run.
        folder: of its files; the profile goes into `profile`.
    """

    def __init__(self, config: Config, state: RunState, folder: str):
        super().__init__()
        self._state, self._folder = state, os.path.join(folder, "profile")
        self._first, self._last = config.profiled_steps
        self._profiler = importlib.import_module(f"kerasdp.backends.{config.backend}.devices")
        self._is_running = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begins before the first of the steps; a resumed run may begin behind it."""
        if not self._is_running and self._first <= self._state.step + 1 <= self._last:
            self._profiler.start_profiler(self._folder)
            self._is_running = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Ends behind the last one."""
        if self._state.step >= self._last:
            self._end()

    def on_train_end(self, logs: Any = None) -> None:
        """Ends with the training, if that is earlier."""
        self._end()

    def _end(self) -> None:
        if self._is_running:
            self._is_running = False
            self._profiler.stop_profiler(self._folder)
            how = self._profiler.HOW_TO_OPEN_PROFILE
            how = f"{how}{self._folder}" if how.endswith("=") else how
            say(f"profile up to step {self._state.step} in {self._folder}; {how}")
