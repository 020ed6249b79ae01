"""Turns the command line of a fine-tuning into what it trains."""

from kerasdp.cli.flags import FLAGS, TRANSFER
from kerasdp.cli.parse import OF_LEARNING, config_of_flags, of_other_recipes, other_defaults, read, value_of
from kerasdp.config import Config
from kerasdp.errors import UserError

_DEFAULTS = {"dataset": "images", "optimizer": "adam(learning_rate=0.001)", "batch_size": 32, "epochs": 5}


def parse_transfer(arguments: list[str]) -> tuple[Config, str, str, int, float]:
    """Turns a command line into the run, the backbone, its weights, epochs of the first fit, rate of the second.

    Args and errors as in `kerasdp.cli.parse.parse`.
    """
    with other_defaults(_DEFAULTS):
        read(
            arguments,
            without=of_other_recipes(TRANSFER)
            | dict.fromkeys(OF_LEARNING, "a fine-tuning has two fits with a rate each")
            | {"model": "use --backbone", "max_steps": "use --head_epochs and --epochs"},
        )
        size = value_of("size").split(",")
        if len(size) != 2 or not all(text.strip().isdecimal() and int(text) > 0 for text in size):
            raise UserError(f"--size: expected height and width, as 160,160. Received: {value_of('size')!r}")
        dataset = value_of("dataset")
        if dataset == "images":
            dataset = f"images(size=({int(size[0])},{int(size[1])}))"
        elif FLAGS["size"].present:
            raise UserError("--size has no effect here: it is that of the images of a folder (--data_dir)")
        for flag in ("head_epochs", "fine_tuning_rate"):
            if value_of(flag) <= 0:
                raise UserError(f"--{flag}: expected a number above 0. Received: {value_of(flag)}")
        choices = value_of("backbone"), value_of("weights"), value_of("head_epochs"), value_of("fine_tuning_rate")
        return config_of_flags(dataset=dataset), *choices
