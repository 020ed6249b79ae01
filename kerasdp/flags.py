"""Defines the arguments of `kerasdp.launch` as absl flags, and gives `launch` what a command line says.

Example:
    ```python
    from absl import app
    import kerasdp

    kerasdp.flags.define()

    def train(runner):
        print(runner.config.batch_size)  # 64, or the value of --batch_size

    def main(_):
        kerasdp.launch(train, **kerasdp.flags.values())

    if __name__ == "__main__":
        app.run(main)
    ```
"""

import datetime
import os
from typing import Any

from absl import flags

from kerasdp.config import Config
from kerasdp.config.choices import choices_of
from kerasdp.errors import end_in_a_line, say_flags

__all__ = ["define", "values"]

# Choices that `launch` does not have: a program decides them.
OF_PROGRAMS = ("model", "dataset", "data_dir", "epochs", "optimizer", "learning_rate")
_DEFINE: dict[type, Any] = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}

flags.disclaim_key_flags()  # --help lists them among the flags of the program that calls `define`


def define(**defaults: Any) -> None:
    """Defines an absl flag for each argument of `kerasdp.launch`: `--backend`, `--gpus`, `--precision`, `--workdir` ...

    A flag that the program has defined before, as its own `--batch_size`, stays as it is.

    Args:
        **defaults: other defaults than in `kerasdp.launch`, by the name of the flag.

    Example:
        ```python
        from absl import app, flags
        import kerasdp

        flags.DEFINE_integer("num_units", 4, "Units of the hidden layer.")
        kerasdp.flags.define(batch_size=32)

        def train(runner):
            print(flags.FLAGS.num_units, runner.config.batch_size)  # 4 32, or what the command line says

        def main(_):
            kerasdp.launch(train, **kerasdp.flags.values())

        if __name__ == "__main__":
            app.run(main)
        ```
    """
    for name, known in choices_of(Config).items():
        if name not in OF_PROGRAMS and known.flag not in flags.FLAGS:
            text = f"{known.help} Default: {known.default_text}." if known.default_text else known.help
            _DEFINE[known.kinds[0]](known.flag, defaults.get(known.flag), text)


def values() -> dict[str, Any]:
    """Returns the arguments of `kerasdp.launch` that the command line gives.

    Without `--workdir` the files of the run go to a new folder in `runs/`. From here on messages name flags, and an
    error of a run ends the program with one line.

    Returns:
        Values by argument.

    Example:
        ```python
        from absl import flags
        import kerasdp

        kerasdp.flags.define(seed=7)
        flags.FLAGS(["train.py", "--batch_size=32"])  # app.run does it with sys.argv
        print(kerasdp.flags.values())  # {"batch_size": 32, "seed": 7, "workdir": "runs/..."}
        ```
    """
    say_flags()
    end_in_a_line()
    known = [choice for name, choice in choices_of(Config).items() if name not in OF_PROGRAMS]
    given = {choice.name: flags.FLAGS[choice.flag].value for choice in known if choice.flag in flags.FLAGS}
    if given.get("workdir") is None and (given.get("checkpoint_dir") or not given.get("resume")):
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        given["workdir"] = os.path.join("runs", f"{now}-{os.getpid()}")
    return {name: value for name, value in given.items() if value is not None}
