"""What the recipes call: reads the flags, runs, and ends the program."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kerasdp.cli.flags import parse, parse_benchmark, parse_comparison, parse_study
from kerasdp.config import Config
from kerasdp.errors import PreemptedError, RunError
from kerasdp.launch import launch


def main(train: Callable[..., Any]) -> None:
    """Runs `train(runner)` as the flags say, and ends the program.

    A user's mistake is one line and exit code 2; a run that fails is its own error and exit code 1.
    """
    with _ending_in_one_line():
        launch(train, parse(sys.argv))


def main_study(study: Callable[[Config, list[int], int], Any]) -> None:
    """Calls `study(config, split_sizes, repetitions)` as the flags say, and ends the program as `main`."""
    with _ending_in_one_line():
        study(*parse_study(sys.argv))


def main_benchmark(compare: Callable[..., Any]) -> None:
    """Calls `compare` with what `parse_benchmark` gives, and ends the program as `main`."""
    with _ending_in_one_line():
        compare(*parse_benchmark(sys.argv))


def main_comparison(compare: Callable[[Config, list[str] | None, list[int]], bool]) -> None:
    """Calls `compare(config, backends, device_counts)` as the flags say, and ends the program.

    Exit code 1 if it returns False; else as `main`.
    """
    with _ending_in_one_line():
        if not compare(*parse_comparison(sys.argv)):
            sys.exit(1)


@contextlib.contextmanager
def _ending_in_one_line() -> Iterator[None]:
    try:
        yield
    except PreemptedError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
