"""Runs a recipe: reads the flags, runs, and ends the program."""

import atexit
import functools
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kerasdp.cli.parse import PARSERS, parse
from kerasdp.errors import PreemptedError, RunError, from_command_line
from kerasdp.launch import launch


def main(
    function: Callable[..., Any],
    flags: str = "train",
    *,
    defaults: dict[str, Any] | None = None,
    unused: Sequence[str] = (),
) -> None:
    """Runs a function as the command line says, and ends the program.

    A user's mistake is one line and exit code 2; a run that fails is its error and exit code 1.

    Args:
        function: what the recipe does. With the flags of `"train"`, `"evaluate"` and `"predict"` it runs in the
            workers, as `kerasdp.launch` calls it; else it runs here, and False from it is exit code 1.
        flags: which flags there are, by their recipe's name: `"train"`: `function(runner)`; `"parity"`:
            `function(config, backends, device_counts)`; `"pipeline"`: `function(config, split_sizes, repetitions)`;
            `"benchmark"`: `function(config, backends, device_counts, peers, rounds, steps)`; `"ray_train"`:
            `function(config, num_workers, cpus_per_worker, grid)`; `"sweep"`: `function(config, space, num_trials)`;
            `"from_scratch"`: `function(config)`; `"evaluate"` and `"predict"`: `function(runner, request)`, with a
            `kerasdp.inference.Request`; `"export"`: `function(config, request, path)`; `"transfer"`:
            `function(config, backbone, weights, head_epochs, fine_tuning_rate)`.
        defaults: with the flags of `"train"`: values of flags that are not given, other than usual.
        unused: with the flags of `"train"`: those that the recipe has no use for, and refuses.

    Raises:
        SystemExit: where the exit code is not 0.
    """
    try:
        with from_command_line():
            if flags == "train":
                launch(function, parse(sys.argv, defaults, unused))
            elif flags in ("evaluate", "predict"):
                config, request = PARSERS[flags](sys.argv)
                launch(functools.partial(function, request=request), config)
            elif function(*PARSERS[flags](sys.argv)) is False:
                sys.exit(1)
    except PreemptedError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    finally:  # all is done: Ctrl-C while Python ends is no error of the frameworks' own last functions
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
