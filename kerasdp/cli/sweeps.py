"""Turns the command lines of sweeps into what they train."""

import re
from typing import Any

from kerasdp.cli.flags import FLAGS, RAY, SEARCH, SWEEP
from kerasdp.cli.parse import OF_MACHINES, config_of_flags, of_other_recipes, read, value_of
from kerasdp.config import Config
from kerasdp.errors import FIELDS_OF_FLAGS, UserError

_RANGE = re.compile(r"([^.\s]\S*?)\.\.([^.\s]\S*)")


def parse_sweep(arguments: list[str]) -> tuple[Config, dict[str, Any], int | None]:
    """Turns the command line of a sweep into what all runs share, values or ranges by field, and the number of trials.

    Without `--trials` that is None, and all combinations are trained. Args and errors as in `kerasdp.cli.parse.parse`.
    """
    without = of_other_recipes(SWEEP, SEARCH) | OF_MACHINES | {"export": "each run of a sweep would write that file"}
    read(arguments, without=without)
    trials, space = value_of("trials"), values_by_field(value_of("sweep"))
    if trials is not None and trials < 1:
        raise UserError(f"--trials: expected a whole number of at least 1. Received: {trials}")
    if not space:
        raise UserError("a sweep needs choices to try: add --sweep='learning_rate=0.01,0.1; batch_size=32,64'")
    ranges = [name for name, values in space.items() if isinstance(values, tuple)]
    if ranges and trials is None:
        raise UserError(f"--sweep: the range of {ranges[0]} needs --trials=20, of which Optuna picks the values")
    return config_of_flags(), space, trials


def parse_ray(arguments: list[str]) -> tuple[Config, tuple[int, int], float | None, dict[str, Any] | None]:
    """Turns the command line of a run on Ray into what is trained, workers (fewest, most), cores of each, a grid.

    Args and errors as in `kerasdp.cli.parse.parse`.
    """
    machines = dict.fromkeys(
        ["hosts", "host_rank", "coordinator", "interface"], "Ray starts the workers: use --workers"
    )
    read(arguments, without=of_other_recipes(RAY, SWEEP) | machines | {"dry_run": OF_MACHINES["dry_run"]})
    if FLAGS["sweep"].present and FLAGS["workers"].present:
        raise UserError("--workers has no effect with --sweep, whose runs have one worker each: leave out one of them")
    fewest, _, most = value_of("workers").partition(":")
    if not (fewest.isdecimal() and (most or fewest).isdecimal() and 0 < int(fewest) <= int(most or fewest)):
        raise UserError(
            f"--workers: expected a number, or the fewest and the most as 1:4. Received: {value_of('workers')!r}"
        )
    cpus = value_of("cpus_per_worker")
    if cpus is not None and not cpus > 0:
        raise UserError(f"--cpus_per_worker: expected a number above 0. Received: {cpus}")
    grid = values_by_field(value_of("sweep"))
    for name, values in (grid or {}).items():
        if isinstance(values, tuple):
            raise UserError(f"--sweep: {name}: expected values, as 0.01,0.1; ranges are for recipes/sweep.py")
    return config_of_flags(), (int(fewest), int(most or fewest)), cpus, grid


def values_by_field(text: str | None) -> dict[str, Any] | None:
    """Returns the values of each field in `flag=value,value; flag=least..most`: a list, or the ends of a range.

    Commas in brackets belong to a value. None if there is no text.

    Raises:
        UserError: if there is no such flag, or a value is none of it.
    """
    if text is None:
        return None
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, equals, values = map(str.strip, part.partition("="))
        if not equals or name not in FLAGS:
            raise UserError(
                f"--sweep: expected flags with values, as 'learning_rate=0.01,0.1; batch_size=32'. Received: {part!r}"
            )
        parser = FLAGS[name].parser
        ends = _RANGE.fullmatch(values) if parser.syntactic_help in ("an integer", "a number") else None
        texts = ends.groups() if ends else re.split(r",(?![^(]*\))", values)
        try:
            parsed = [parser.parse(value.strip()) for value in texts]
        except ValueError as error:
            raise UserError(f"--sweep: {name}: {' '.join(str(error).split())}. Received: {values!r}") from error
        found[FIELDS_OF_FLAGS.get(name, name)] = tuple(parsed) if ends else parsed
    return found
