"""Trains with eager steps of torch, and counts what in a step waits for the GPU, on a CUDA device that is none.

python device_waits.py DEVICE CASES [SETTINGS]: `gpu` or `cpu`, in JSON names in `CASES`, and fields of kerasdp.Config
"""

import collections
import functools
import json
import sys

import cuda_on_cpu
import numpy as np

if sys.argv[1] == "gpu":
    cuda_on_cpu.start()

import torch  # noqa: E402
from starting import printed
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

# Steps of a short and of a long run, and samples of a step. The counts of the short run are subtracted from the counts
# of the long one. The first run of a model has more than five steps: in the first five kerasdp reads the weights.
SHORT, LONG, NUM_ROWS = 6, 12, 4
KINDS = ("read", "sent", "native_batch_norm", "update_")
READ = ("_local_scalar_dense", "nonzero", "masked_select", "equal")


class Waits(TorchDispatchMode):
    """Counts operations that end when the device has done all that it was given."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, operation.overloadpacket.__name__
        result = operation(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            self.counts[what_waits(name, args, kwargs, result)] += 1
        if name in KINDS:
            self.counts[name] += 1
        return result


def what_waits(name, args, kwargs, result):
    """What is waited for; nothing if nothing is."""
    if name in READ and args[0].is_cuda:
        return "read"
    if name == "lift_fresh" and args[0].is_cuda:
        return "sent"  # `torch.as_tensor(1.0, device="cuda")`, whose copy no mode sees (torch 2.13)
    if name not in ("_to_copy", "copy_") or kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)):
        return ""
    source = args[name == "copy_"]
    if source.is_cuda == result.is_cuda:
        return ""
    return "read" if source.is_cuda else "sent"


def sgd(**arguments):
    return lambda keras: keras.optimizers.SGD(0.01, momentum=0.9, **arguments)


def named(name, **arguments):
    return lambda keras: getattr(keras.optimizers, name)(**arguments)


CASES = {
    "sgd": sgd(),
    "decay": lambda keras: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.01, 100)),
    "average": sgd(use_ema=True),
    "scaled": lambda keras: keras.optimizers.LossScaleOptimizer(sgd()(keras)),
    "accumulating": sgd(gradient_accumulation_steps=2),
    "adam": named("Adam"),
    "global_clipnorm": named("Adam", global_clipnorm=1.0),
    "rmsprop": named("RMSprop", momentum=0.9, centered=True),
    "nadam": named("Nadam"),
    "lamb": named("Lamb"),
    "muon": named("Muon"),
    "adafactor": named("Adafactor"),
}


class OwnStep:
    """Made with `keras.Model` once that is there: a `train_step` as in Keras' guide."""

    def train_step(self, data):
        import keras

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True), sample_weight=sample_weight)
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics if metric.name == "loss"}


def model_of(keras, case):
    layers = keras.layers
    inputs = keras.Input((8, 8, 1))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(4, 3)(layers.Rescaling(1 / 255)(inputs))))
    x = layers.Dropout(0.3)(layers.Flatten()(layers.MaxPooling2D()(x)))
    kind = type("OwnStepModel", (OwnStep, keras.Model), {}) if case == "own step" else keras.Model
    model = kind(inputs, layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(CASES.get(case, sgd())(keras), loss, metrics=["accuracy"])
    return model


def train(cases, runner):
    """By case: what a step of each kind waits for, the loss, and how often a loss or a rate was waited for."""
    numbers, found = np.random.RandomState(0), {}
    x = numbers.randint(0, 256, (LONG * NUM_ROWS, 8, 8, 1)).astype("uint8")
    y = numbers.randint(0, 3, len(x))
    for case in cases:
        found[case] = one_case(case, x, y, runner)
    if sys.argv[1] == "gpu":
        of_steps, *of_copies = cuda_on_cpu.Stream.made
        found["streams"] = {
            "threads": sorted({stream.thread.name for stream in of_copies}),
            "awaited": [of_steps.num_awaited, sum(stream.num_awaited for stream in of_copies)],
            "kept": [of_steps.num_kept, sum(stream.num_kept for stream in of_copies)],
        }
        found["pinned"] = pinned(runner)
    return found


def one_case(case, x, y, runner):
    import keras

    with runner.scope():
        model = model_of(keras, case)
    losses, found, waited = [], {}, cuda_on_cpu.Event.num_waited
    size = {"batch_size": NUM_ROWS}
    calls = {"fit": lambda rows: losses.append(runner.fit(model, x[:rows], y[:rows], **size).history["loss"][0])}
    if case == "sgd":
        calls["evaluate"] = lambda rows: runner.evaluate(model, x[:rows], y[:rows], **size)
        calls["predict"] = lambda rows: runner.predict(model, x[:rows], **size)
    for name, call in calls.items():
        counts = []
        for steps in (SHORT, SHORT, LONG):  # the first one builds
            with Waits() as waits:
                call(steps * NUM_ROWS)
            counts.append(waits.counts)
        found[name] = {kind: (counts[2][kind] - counts[1][kind]) / (LONG - SHORT) for kind in KINDS}
    return found | {"losses": losses, "waited": cuda_on_cpu.Event.num_waited - waited}


def pinned(runner):
    """Bytes of a batch that are sent from pinned memory, by the way in which its inputs come."""
    from kerasdp.data.batch import Batch
    from kerasdp.data.sampling import CachedRows, DeviceCache

    sizes, pin_memory = [], torch.Tensor.pin_memory
    torch.Tensor.pin_memory = lambda tensor: sizes.append(tensor.nbytes) or pin_memory(tensor)
    array, rows = np.zeros((100, 10), "float32"), np.arange(5, dtype="int32")
    kept = CachedRows(kept=DeviceCache(array), numbers=rows)
    found = {}
    for name, inputs in (("kept", kept), ("kept, again", kept), ("read", array[rows])):
        batch = runner.strategy.shard_batch(
            Batch(inputs=inputs, targets=None, sample_weight=None, indices=rows, own_indices=rows)
        )
        found[name], sizes[:] = [*sizes], []
        assert batch.inputs.shape == (5, 10) and batch.inputs.is_cuda
    return found


def imitate_cuda():
    """More of what a build for the CPU does not have."""
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = lambda _: torch.zeros(1), lambda *_: None


def main():
    device, cases, *settings = sys.argv[1], *map(json.loads, sys.argv[2:])
    if device == "gpu":
        imitate_cuda()
    choices = settings[0] if settings else {"compile": "off"}
    printed(functools.partial(train, cases), "torch", device=device, log_every=1, **choices)


if __name__ == "__main__":
    main()
