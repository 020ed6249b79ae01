"""Trains with kerasdp; see `protocol.py` for how it is asked for repetitions.

    echo | python benchmarks/kit_loop.py --backend=torch --model=gpt --vocabulary=2000 --batch_size=32 --devices=2
    python benchmarks/kit_loop.py --backend=jax --model=resnet18 --batch_size=4 --devices=4 --traffic < /dev/null

The contender beside the hand-written loops, with their flags: a model of keras_models.py, a built-in one, or the
user's. Or, as `compare.py` starts it, trained as a whole `kerasdp.Config` says, in JSON.
"""

import functools
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import protocol
import traffic

import kerasdp

WITHOUT_BATCH_NORM = ("lenet", "mlp", "gpt", "bert", "vit", "llama", "tagger", "unet")


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


def make_task(args: Namespace, config: kerasdp.Config) -> tuple[Any, Any, Callable[[], Any]]:
    """Returns the samples, in full batches only, their labels, and what builds the model."""
    if args.model not in protocol.WIDTHS:
        data = kerasdp.load_data(args.dataset, args.data_dir)
        indices = np.arange(data.train.num_samples // config.batch_size * config.batch_size)
        if not len(indices):
            raise kerasdp.UserError(f"--batch_size: expected at most {data.train.num_samples}, the samples there are")
        x, (y, _) = data.train.inputs(indices), data.train.targets(indices)
        return x, y, functools.partial(kerasdp.build_model, args.model, data.input_shape, data.num_classes)
    import keras_models

    build = functools.partial(keras_models.make_model, args)
    if args.samples:
        return ComputedTokens(args.samples, args.vocabulary), None, build
    x, y = protocol.make_data(args)
    count = len(y) // config.batch_size * config.batch_size
    return protocol.map_inputs(lambda array: array[:count], x), y[:count], build


def train(args: Namespace, count: Any, started: float, folder: str | None, runner: "kerasdp.Runner") -> None:
    """Runs in every worker process. `count`: of `protocol.traffic_of`; `folder`: of `protocol.passing_lines_on`."""
    import keras
    import keras_models

    protocol.resize(args)  # of a worker, too
    config, processes = runner.config, runner.strategy.processes
    if args.traffic:
        traffic.prepare(config.backend)
    x, y, build = make_task(args, config)
    with runner.scope():
        model = build()
        optimizer = keras.optimizers.SGD(protocol.LEARNING_RATE, protocol.MOMENTUM)
        model.compile(optimizer, **keras_models.make_loss(args))
    before = protocol.memory_now()

    train_own = make_own_loop(runner, model, x, y) if args.loop else None

    def repeat(steps: int) -> dict[str, float]:
        processes.any_rank(False)  # all ranks begin together
        begin = time.perf_counter()
        if train_own is not None:
            logs = train_own(steps)
            history = {name: [float(value)] for name, value in logs.items()}  # waits for the last step
            runner.state.epoch_seconds[-1] = time.perf_counter() - begin
        else:
            history = runner.fit(
                model, x, y, steps_per_epoch=steps, initial_epoch=runner._num_fits, epochs=runner._num_fits + 1
            ).history
        seconds = time.perf_counter() - begin
        growth = processes.all_gather_object(protocol.memory_growth(before))
        memory = processes.all_gather_object(runner.strategy.peak_memory_bytes())
        return {
            "seconds": runner.state.epoch_seconds[-1],
            "loss": history["loss"][0],
            "accuracy": history.get("accuracy", [0.0])[0],
            "peak_memory_bytes": max(memory) if runner.devices.is_accelerator else sum(memory),
            "growth_bytes": max(growth),
            "fit_seconds": seconds,
        }

    protocol.serve(
        repeat, args.steps, first_steps=args.first_steps, traffic=count, started=started,
        lines=protocol.lines(folder, processes.rank),
        say=protocol.say if runner.is_chief else lambda **values: None,
        parameters=sum(int(np.prod(weight.shape)) for weight in model.trainable_weights),
        flops=forward_flops(model), device=device_name(runner),
    )  # fmt: skip


def make_own_loop(runner: "kerasdp.Runner", model: Any, x: Any, y: Any) -> Callable[[int], dict[str, Any]]:
    """Returns what trains as a custom loop: so many steps, of which it gives the last one's logs."""
    import keras

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with runner.scope():
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    weights, optimizer = model.trainable_variables, model.optimizer

    @runner.step
    def train_step(batch: Any) -> dict[str, Any]:
        inputs, targets = batch

        def forward() -> tuple[Any, Any]:
            outputs = model(inputs, training=True)
            return loss_of(targets, outputs), outputs

        (loss, outputs), gradients = kerasdp.value_and_grad(forward, weights, has_aux=True)()
        optimizer.apply(gradients, weights)
        accuracy.update_state(targets, outputs)
        return {"loss": loss, "accuracy": accuracy.result()}

    def train_own(steps: int) -> dict[str, Any]:
        logs: dict[str, Any] = {}
        for batch in runner.batches(x, y, steps_per_epoch=steps):
            logs = train_step(batch)
        return logs

    return train_own


def forward_flops(model: Any) -> float | None:
    """Operations of a sample's forward pass; None where the layers' calls are not known."""
    from flops import flops_of

    from kerasdp.keras_compat.models import as_functional

    known = as_functional(model)
    return None if known is None else sum(flops_of(known))


def device_name(runner: "kerasdp.Runner") -> str:
    """Returns the name of a GPU or TPU; `"cpu"` of others."""
    from keras_fit import choose_device

    args = Namespace(backend=runner.config.backend, device=runner.config.device)
    return choose_device(args) if runner.devices.is_accelerator else "cpu"


def make_config(args: Namespace) -> kerasdp.Config:
    """Returns how it trains."""
    if args.config:
        return kerasdp.Config(**json.loads(args.config))
    has_norm = args.model not in WITHOUT_BATCH_NORM and args.devices > 1
    return kerasdp.Config(
        backend=args.backend, num_devices=args.devices, batch_size=args.batch_size, precision=args.precision,
        device=args.device, batch_norm=args.batch_norm if has_norm else "sync", verbose=0,
        compile=args.compile if args.backend == "torch" else "auto", checkpoint_every="never", shard=args.shard,
    )  # fmt: skip


def main() -> None:
    """Starts the run."""
    flags = protocol.parser(__doc__, models=None)
    flags.add_argument("--backend", required=True, choices=["torch", "jax", "tensorflow"])
    flags.add_argument("--compile", default="on", choices=["on", "off"], help="of torch")
    flags.add_argument("--shard", default="none", choices=["none", "optimizer", "weights"])
    flags.add_argument("--loop", action="store_true", help="a custom loop, instead of fit")
    flags.add_argument("--samples", type=int, help="of gpt: how many there are, each computed from its number")
    flags.add_argument("--dataset", default="synthetic", help="of a model that is none of keras_models.py")
    flags.add_argument("--data_dir", help="the folder of its files")
    flags.add_argument("--config", help="a kerasdp.Config in JSON, instead of the flags of how it is trained")
    args = protocol.parse(flags)
    if args.samples and args.model != "gpt":
        flags.error("--samples: for gpt")
    if args.size == "real":
        size = protocol.REAL[args.model]
        args.dataset = f"synthetic(shape={size.shape}, num_classes={size.num_classes}, num_samples={size.num_samples})"
    config = make_config(args)
    count = protocol.traffic_of(args, args.backend)  # before jax makes its devices
    num_ranks = config.num_devices or 1 if args.backend == "torch" else 1
    try:
        with protocol.passing_lines_on(num_ranks) as folder:
            kerasdp.launch(functools.partial(train, args, count, protocol.STARTED, folder), config)
    except kerasdp.RunError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
