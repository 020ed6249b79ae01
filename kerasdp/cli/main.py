"""Runs a recipe: reads the flags, runs, and ends the program."""

import atexit
import functools
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kerasdp.cli.parse import parse, parse_benchmark, parse_comparison, parse_study
from kerasdp.cli.parse_inference import parse_evaluation, parse_export, parse_from_scratch, parse_prediction
from kerasdp.cli.parse_transfer import parse_transfer
from kerasdp.cli.sweeps import parse_ray, parse_sweep
from kerasdp.errors import PreemptedError, RunError, from_command_line
from kerasdp.launch import launch

_PARSERS: dict[str, Callable[[list[str]], tuple[Any, ...]]] = {
    "parity": parse_comparison,
    "pipeline": parse_study,
    "benchmark": parse_benchmark,
    "ray_train": parse_ray,
    "sweep": parse_sweep,
    "from_scratch": parse_from_scratch,
    "export": parse_export,
    "transfer": parse_transfer,
}
_PARSERS_OF_REQUESTS = {"evaluate": parse_evaluation, "predict": parse_prediction}


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
            elif flags in _PARSERS_OF_REQUESTS:
                config, request = _PARSERS_OF_REQUESTS[flags](sys.argv)
                launch(functools.partial(function, request=request), config)
            elif function(*_PARSERS[flags](sys.argv)) is False:
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
