"""Writes down how a model trains in all ways that this machine has, or verifies what others wrote.

    python recipes/certify.py --model=my_model.py:build --workdir=card                  # writes card/card.json
    python recipes/certify.py --model=my_model.py:build --card=card/card.json           # verifies it, here
    python recipes/certify.py --model=lenet --backends=torch,jax --device_counts=1,2

Expected of the first: a line for each way, exit code 0, and card.json, card.md and card.svg, a badge, in the workdir.
Of the second: "as the card says" for each way, and exit code 0; or 1, with what differs. Two minutes on two CPU cores.

What a card names is not run: you name the model, and the card is compared with it.
"""

import functools
import os

import kerasdp
from kerasdp.parity import certificate


def build_model(config: kerasdp.Config) -> object:
    """Runs in every process, after the backend is chosen. Yours may build any compiled Keras model."""
    data = kerasdp.load_data(config)
    model = kerasdp.build_model(config, data.input_shape, data.num_classes)
    model.compile(optimizer=kerasdp.make_optimizer(config, data.train), loss=kerasdp.make_loss(config))
    return model


def load_data(config: kerasdp.Config) -> object:
    """Runs in every process, after `build_model`. Yours may return `(x, y)`."""
    return kerasdp.load_data(config).train


def certify(config: kerasdp.Config, backends: list[str] | None, device_counts: list[int], card: str | None) -> bool:
    """Runs here, and starts a process for each way to train."""
    source = certificate.source_of(config.model)
    model, data = functools.partial(build_model, config), functools.partial(load_data, config)
    ways = {"backends": backends, "device_counts": device_counts, "report": print, "device": config.device}
    what = {"model": os.path.basename(config.model), "dataset": os.path.basename(config.dataset)}
    what |= {name: getattr(config, name) for name in ("optimizer", "learning_rate", "kernel_initializer")}
    if card is not None:
        differences = certificate.verify(certificate.read_card(card), model, data, what=what, source=source, **ways)
        print("\n".join(differences) or f"all is as {card} says")
        return not differences
    choices = {"steps": config.max_steps or 5, "batch_size": config.batch_size, "seed": config.seed}
    made = certificate.certify(model, data, what=what, source=source, **ways, **choices)
    for path in certificate.write_card(made, config.workdir):
        print(path)
    return all(way["passed"] for trained in made["trained"].values() for way in trained["ways"])


if __name__ == "__main__":
    kerasdp.main(certify, flags="certify")
