"""Defines the arguments of `kerasdp.launch` as absl flags, and returns their values for `launch`.

Example:
    ```python
    from absl import app
    import kerasdp

    kerasdp.flags.define()

    def train(runner):
        print(runner.config.batch_size)  # 64, or the value of --batch_size

    def main(argv):
        kerasdp.launch(train, **kerasdp.flags.values(argv))

    if __name__ == "__main__":
        app.run(main)
    ```
"""

import datetime
import os
from collections.abc import Sequence
from typing import Any

from absl import flags

from kerasdp.config import Config
from kerasdp.config.choices import choices_of
from kerasdp.errors import UserError, end_in_a_line, say_flags

__all__ = ["define", "values"]

_DEFINE: dict[type, Any] = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}

flags.disclaim_key_flags()  # --help lists them among the flags of the program that calls `define`


def define(*names: str, **defaults: Any) -> None:
    """Defines an absl flag for each argument of `kerasdp.launch`: `--backend`, `--gpus`, `--precision`, `--workdir` ...

    A flag that the program has already defined, such as a `--batch_size` with another meaning, is not changed.

    Args:
        *names: names of the flags to define, such as `"backend", "gpus"`. Without names all flags are defined.
        **defaults: default values that differ from the defaults of `kerasdp.launch`, by name of the flag.

    Raises:
        UserError: if `kerasdp.launch` has no argument for one of these flags.

    Example:
        ```python
        from absl import app, flags
        import kerasdp

        flags.DEFINE_integer("num_units", 4, "Units of the hidden layer.")
        kerasdp.flags.define(batch_size=32)

        def train(runner):
            print(flags.FLAGS.num_units, runner.config.batch_size)  # 4 32, or what the command line says

        def main(argv):
            kerasdp.launch(train, **kerasdp.flags.values(argv))

        if __name__ == "__main__":
            app.run(main)
        ```
    """
    choices = {choice.flag: choice for choice in choices_of(Config).values()}
    if unknown := {*names, *defaults} - choices.keys():
        raise UserError(f"kerasdp.flags.define: expected some of {', '.join(choices)}. Received: {', '.join(unknown)}")
    for known in choices.values():
        if (known.flag in names or not names) and known.flag not in flags.FLAGS:
            is_usual = known.default_text and known.flag not in defaults  # absl adds another default itself
            text = f"{known.help} Default: {known.default_text}." if is_usual else known.help
            _DEFINE[known.kinds[0]](known.flag, defaults.get(known.flag), text)


def values(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the arguments of `kerasdp.launch` that the command line sets.

    Without `--workdir` the files of the run go to a new folder in `runs/`. After this call, messages show options as
    flags, and an uncaught error of a run is printed as one line.

    Args:
        argv: the list that `app.run` passes to `main`: the name of the program, and arguments that are not flags.

    Returns:
        A dictionary of values, by name of the argument.

    Raises:
        UserError: if `argv` has arguments that are not flags.

    Example:
        ```python
        from absl import flags
        import kerasdp

        kerasdp.flags.define(seed=7)
        argv = flags.FLAGS(["train.py", "--batch_size=32"])  # app.run does it with sys.argv
        print(kerasdp.flags.values(argv))  # {"batch_size": 32, "seed": 7, "workdir": "runs/..."}
        ```
    """
    say_flags()
    end_in_a_line()
    if argv[1:]:
        raise UserError(f"expected flags only. Received: {' '.join(argv[1:])!r}; --help lists the flags")
    known = [choice for choice in choices_of(Config).values() if choice.flag in flags.FLAGS]
    given = {choice.name: flags.FLAGS[choice.flag].value for choice in known}
    if "workdir" in given and given["workdir"] is None and (given.get("checkpoint_dir") or not given.get("resume")):
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        given["workdir"] = os.path.join("runs", f"{now}-{os.getpid()}")
    return {name: value for name, value in given.items() if value is not None}


def of_program() -> dict[str, Any]:
    """Returns the values of the flags that the program defines in addition to the arguments of `launch`, by name."""
    choices = {choice.flag for choice in choices_of(Config).values()}
    if not flags.FLAGS.is_parsed():
        return {}
    return {
        name: value if isinstance(value, (bool, int, float, list)) or value is None else str(value)
        for name, value in flags.FLAGS.flag_values_dict().items()
        if name not in choices and not str(flags.FLAGS.find_module_defining_flag(name)).startswith("absl.")
    }
