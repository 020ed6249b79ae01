"""Trains a model of keras_models.py, or a built-in one, with kerasdp; how it is asked for repetitions: `protocol.py`.

    echo | python benchmarks/kit_loop.py --backend=torch --model=gpt --vocabulary=2000 --batch_size=32 --devices=2
    python benchmarks/kit_loop.py --backend=jax --model=resnet18 --batch_size=4 --devices=4 --traffic < /dev/null

The contender beside the hand-written loops, with their flags.
"""

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import protocol
import traffic

import kerasdp
from kerasdp.benchmark import kerasdp_program
from kerasdp.config.validation import MODELS


class ComputedTokens:
    """So many samples for gpt that no machine holds them: each is computed from its number."""

    num_threads = 1

    def __init__(self, num_samples: int, vocabulary: int):
        self.num_samples, self.vocabulary = num_samples, vocabulary

    def inputs(self, indices: np.ndarray) -> np.ndarray:
        """Returns tokens, `(rows, length)`."""
        return self._tokens(indices)[:, :-1]

    def targets(self, indices: np.ndarray) -> tuple[np.ndarray, None]:
        """Returns the tokens that follow."""
        return self._tokens(indices)[:, 1:], None

    def _tokens(self, indices: np.ndarray) -> np.ndarray:
        places = np.arange(protocol.SHAPES["gpt"][0] + 1)
        return ((np.asarray(indices, "int64")[:, None] * 7919 + places * 104729) % self.vocabulary).astype("int32")


def task(args: Namespace, config: kerasdp.Config) -> tuple[Any, Any, Callable[[], Any]]:
    """Returns the samples, their labels, and what builds the model."""
    import keras_models

    if args.traffic:
        traffic.prepare(config.backend)
    if args.model in MODELS:
        return kerasdp_program.of_config(config)
    build = functools.partial(keras_models.make_model, args)
    if args.samples:
        return ComputedTokens(args.samples, args.vocabulary), None, build
    x, y = protocol.make_data(args)
    count = len(x) // config.batch_size * config.batch_size  # full batches only
    return x[:count], y[:count], build


def main() -> None:
    """Starts the run."""
    flags = protocol.parser(__doc__, models=[*protocol.WIDTHS, *MODELS])
    flags.add_argument("--backend", required=True, choices=["torch", "jax", "tensorflow"])
    flags.add_argument("--compile", default="on", choices=["on", "off"], help="of torch")
    flags.add_argument("--samples", type=int, help="of gpt: how many there are, each computed from its number")
    flags.add_argument("--dataset", default="synthetic", help="of a built-in model")
    args = protocol.parse(flags)
    if args.samples and args.model != "gpt":
        flags.error("--samples: for gpt")
    has_norm = args.model not in ("gpt", "lenet", "mlp") and args.devices > 1
    choices = {"model": args.model, "dataset": args.dataset} if args.model in MODELS else {}
    config = kerasdp.Config(
        backend=args.backend, num_devices=args.devices, batch_size=args.batch_size, precision=args.precision,
        device=args.device, batch_norm=args.batch_norm if has_norm else "sync", verbose=0,
        optimizer=f"sgd(learning_rate={protocol.LEARNING_RATE}, momentum={protocol.MOMENTUM})",
        compile=args.compile if args.backend == "torch" else "auto", checkpoint_every="never", **choices,
    )  # fmt: skip
    count = protocol.traffic_of(args, args.backend)  # before jax makes its devices
    kerasdp_program.run(config, args.steps, functools.partial(task, args), count)


if __name__ == "__main__":
    main()
