"""Holds what the loops of this folder share: flags, data, and the protocol of repetitions.

A program sets up, compiles, warms up and prints a line of JSON, `{"ready": true, "seconds_to_first_step": ...}`. Each
line that it then reads asks for one repetition of `--steps` training steps, which it answers with a line of JSON,
`{"seconds": ..., "loss": ..., "accuracy": ..., "peak_memory_bytes": ...}`. It ends with its input.

So several programs can be measured in turn, as `compare.py` does; by hand:

    echo | python benchmarks/torch_loop.py --model=resnet18 --compile
"""

import argparse
import contextlib
import functools
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

STARTED = time.time()
LEARNING_RATE, MOMENTUM, NUM_CLASSES, WARM_UP_STEPS = 0.01, 0.9, 10, 3
# Of each model: the samples that there are, and a sample's shape (without the batch axis).
NUM_SAMPLES = {
    "convnet": 4096, "resnet18": 4096, "resnet50": 4096, "gpt": 4096, "segmentation": 256, "bert": 4096, "vit": 4096,
    "llama": 4096, "tagger": 4096, "unet": 256, "efficientnet": 1024,
}  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "convnet": (28, 28, 1), "resnet18": (28, 28, 1), "resnet50": (32, 32, 3),
    "gpt": (64,), "segmentation": (128, 128, 3), "bert": (64,), "vit": (32, 32, 3), "llama": (64,),
    "tagger": (32,), "unet": (32, 32, 3), "efficientnet": (64, 64, 3),
}  # fmt: skip
NUM_BLOCKS, NUM_HEADS, SEGMENTATION_CLASSES, PATCH = 2, 4, 21, 4
# Of llama: heads of keys and values, the rank of adapters, and the longest wavelength of rotary embeddings.
NUM_KEY_HEADS, LORA_RANK, LONGEST_WAVE = 2, 8, 10_000.0
# Those of keras_models.py: numbers a token, or filters of the first convolution.
WIDTHS = {
    "gpt": 64,
    "segmentation": 16,
    "bert": 128,
    "vit": 128,
    "llama": 128,
    "tagger": 128,
    "unet": 32,
    "efficientnet": 32,
}
VOCABULARY = 16_000
TEXTS = ("gpt", "bert", "llama", "tagger")  # which have a vocabulary
# Of tagger: the label of what is no token.
NO_TAG = 0
# Of unet: groups of normalization. Of efficientnet, a stage each: whether its blocks are fused, how many there are,
# their filters as a part of the stem's, strides, and how much wider they are within.
NUM_GROUPS = 8
STAGES = [(True, 1, 0.5, 1, 1), (True, 2, 1, 2, 4), (False, 2, 1.5, 2, 4), (False, 2, 3, 2, 6)]


class Size(NamedTuple):
    """How large a model is, and its samples.

    Args:
        shape: of a sample.
        num_samples: that there are.
        batch_size: samples a step, in real_sizes.py.
        width: numbers a token.
        num_blocks: of the model.
        num_heads: of attention.
        vocabulary: how many tokens there are.
        num_classes: labels.
        patch: pixels on a side of a patch.
        num_key_heads: heads of keys and values.
    """

    shape: tuple[int, ...]
    num_samples: int
    batch_size: int
    width: int | None = None
    num_blocks: int = NUM_BLOCKS
    num_heads: int = NUM_HEADS
    vocabulary: int = VOCABULARY
    num_classes: int = NUM_CLASSES
    patch: int = PATCH
    num_key_heads: int = NUM_KEY_HEADS


# `--size=real`: GPT-2 124M (its embeddings are not tied here: 163 million numbers, and as many operations), ResNet-50
# and ViT-B/16 for ImageNet, BERT-base, and adapters of a decoder about as large as TinyLlama 1.1B.
REAL = {
    "gpt": Size((1024,), 1024, 16, width=768, num_blocks=12, num_heads=12, vocabulary=50_257),
    "resnet50": Size((224, 224, 3), 512, 128, num_classes=1000),
    "bert": Size((128,), 4096, 64, width=768, num_blocks=12, num_heads=12, vocabulary=30_522),
    "vit": Size((224, 224, 3), 512, 64, width=768, num_blocks=12, num_heads=12, num_classes=1000, patch=16),
    "llama": Size((1024,), 1024, 4, width=2048, num_blocks=22, num_heads=32, vocabulary=32_000, num_key_heads=4),
}


def resize(args: argparse.Namespace) -> None:
    """Makes the models and the samples of this process as large as `--size` says."""
    if args.size == "real":
        size, names = REAL[args.model], globals()
        SHAPES[args.model], NUM_SAMPLES[args.model] = size.shape, size.num_samples
        for name in ("num_blocks", "num_heads", "num_classes", "patch", "num_key_heads"):
            names[name.upper()] = getattr(size, name)


def parser(description: str, models: Iterable[str] | None = NUM_SAMPLES) -> argparse.ArgumentParser:
    """Returns the parser of the flags of all loops, for a loop that trains these models; None: any."""
    flags = argparse.ArgumentParser(description=description, allow_abbrev=False)
    flags.add_argument("--model", default="convnet", choices=models, help="as in kerasdp/models, or in keras_models.py")
    flags.add_argument("--size", default="small", choices=["small", "real"], help=f"real: of {', '.join(REAL)}")
    flags.add_argument("--vocabulary", type=int, help=f"of texts: how many tokens there are ({VOCABULARY})")
    widths = ", ".join(f"{name} {width}" for name, width in WIDTHS.items())
    flags.add_argument("--width", type=int, help=f"numbers a token, or first filters ({widths})")
    flags.add_argument("--batch_size", type=int, default=64, help="samples a step, over all devices")
    flags.add_argument("--devices", type=int, default=1)
    flags.add_argument("--steps", type=int, default=20, help="training steps a repetition")
    flags.add_argument("--first_steps", type=int, default=0, help="so many are the warm-up, and timed with the start")
    flags.add_argument("--precision", default="auto", choices=["auto", "float32", "bfloat16"])
    flags.add_argument("--device", default="auto", choices=["auto", "cpu", "gpu"])
    flags.add_argument("--traffic", action="store_true", help="count the bytes that are sent in a step")
    flags.add_argument("--batch_norm", default="replica", choices=["replica", "sync"])
    return flags


def parse(flags: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the flags that were given."""
    args = flags.parse_args()
    if args.batch_size % args.devices:
        flags.error(f"--batch_size: expected a multiple of the {args.devices} devices. Received: {args.batch_size}")
    if args.size == "real" and args.model not in REAL:
        flags.error(f"--size=real: expected --model to be one of {', '.join(REAL)}. Received: {args.model}")
    resize(args)
    samples = NUM_SAMPLES.get(args.model, args.batch_size)  # of other models plain Keras knows
    if args.batch_size > samples:
        flags.error(f"--batch_size: expected at most {samples}. Received: {args.batch_size}")
    real = REAL[args.model] if args.size == "real" else None
    args.width = args.width or (real.width if real else WIDTHS.get(args.model))
    args.vocabulary = args.vocabulary or (real.vocabulary if real else VOCABULARY)
    return args


def make_data(args: argparse.Namespace) -> tuple[Any, np.ndarray]:
    """Makes random samples of the model `args.model`, and their labels.

    Returns:
        Images, uint8 `(samples, height, width, channels)`, and labels, int32 `(samples,)`, for segmentation
        `(samples, height, width)`; for gpt and llama tokens and those that follow, int32 `(samples, length)`; for bert
        three arrays of that shape by the names of its inputs, and labels; for tagger tokens and the tag of each, 0
        behind a text's end; for unet noisy images and their timesteps by the names of its inputs, and the noise.
    """
    random = np.random.default_rng(0)
    count, shape = NUM_SAMPLES[args.model], SHAPES[args.model]
    if args.model in ("bert", "tagger"):
        texts = make_texts(random, count, *shape, args.vocabulary)
        if args.model == "bert":
            return texts, random.integers(0, NUM_CLASSES, count, "int32")
        tags = random.integers(1, NUM_CLASSES, texts["token_ids"].shape, "int32")
        return texts["token_ids"], tags * texts["padding_mask"]
    if args.model in ("gpt", "llama"):
        tokens = random.integers(0, args.vocabulary, (count, shape[0] + 1), "int32")
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()
    if args.model == "unet":
        images, noise = random.normal(0, 1, (2, count, *shape)).astype("float32")
        return {"image": images + noise, "timestep": random.integers(0, 1000, count, "int32")}, noise
    images = random.integers(0, 256, (count, *shape), "uint8")
    if args.model == "segmentation":
        return images, random.integers(0, SEGMENTATION_CLASSES, (count, *shape[:2]), "int32")
    return images, random.integers(0, NUM_CLASSES, count, "int32")


def make_texts(random: np.random.Generator, count: int, length: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Makes pairs of sentences, padded at their ends with 0.

    Returns:
        int32 `(count, length)` each: `token_ids`, `segment_ids` (1 in the second one), `padding_mask` (1 at tokens).
    """
    lengths = random.integers(length // 4, length + 1, (count, 1))
    mask = np.arange(length) < lengths
    second = mask & (np.arange(length) >= lengths // 2)
    tokens = random.integers(1, vocabulary, (count, length)) * mask
    found = {"token_ids": tokens, "segment_ids": second, "padding_mask": mask}
    return {name: array.astype("int32") for name, array in found.items()}


def map_inputs(function: Callable[[Any], Any], x: Any) -> Any:
    """Applies a function to samples, an array or arrays by the names of a model's inputs."""
    return {name: function(part) for name, part in x.items()} if isinstance(x, dict) else function(x)


def batches(model: str, batch_size: int) -> Iterator[np.ndarray]:
    """Yields the indices of batch after batch; the samples are shuffled for each epoch."""
    random = np.random.default_rng(1)
    count = NUM_SAMPLES[model]
    while True:
        order = random.permutation(count).astype("int32")
        for start in range(0, count - batch_size + 1, batch_size):
            yield order[start : start + batch_size]


def peak_memory() -> int:
    """Returns the most memory that this process has used, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_now() -> int:
    """Returns the memory that this process has now, in bytes; 0 where the system does not say (not Linux)."""
    return _status("VmRSS")


def memory_growth(before: int) -> int:
    """Returns the most that it had since `forget_memory_peak` beyond what it had before, in bytes."""
    return _status("VmHWM") - before


def forget_memory_peak() -> None:
    """Resets the peak."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # man 5 proc


def _status(name: str) -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def say(**values: Any) -> None:
    """Prints a line of JSON."""
    print(json.dumps(values), flush=True)


def traffic_of(args: argparse.Namespace, backend: str) -> Callable[[Callable[[int], Any]], int] | None:
    """Returns what counts the bytes of a step, if `--traffic` asks for it; before devices and graphs are made."""
    if not args.traffic:
        return None
    import traffic

    traffic.prepare(backend)
    return functools.partial(traffic.bytes_a_step, backend, args.devices)


@contextlib.contextmanager
def passing_lines_on(num_ranks: int) -> Iterator[str | None]:
    """Gives the folder of the ranks' pipes, into which this process writes each line that it reads; None for one rank.

    So no rank waits for the others in a collective, which could time out.
    """
    if num_ranks == 1:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kerasdp-") as folder:
        paths = [os.path.join(folder, str(rank)) for rank in range(num_ranks)]
        for path in paths:
            os.mkfifo(path)
        threading.Thread(target=_pass_on, args=(paths,), daemon=True).start()
        yield folder


def _pass_on(paths: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(open(path, "w", buffering=1)) for path in paths]
        for line in sys.stdin:
            for pipe in pipes:
                pipe.write(line)


def lines(folder: str | None, rank: int) -> Iterable[str]:
    """Returns the lines that a rank reads. `folder`: of `passing_lines_on`."""
    return sys.stdin if folder is None else open(os.path.join(folder, str(rank)))  # noqa: SIM115


def serve(
    repeat: Callable[[int], dict[str, float]],
    steps: int,
    *,
    first_steps: int = 0,
    traffic: Callable[[Callable[[int], Any]], int] | None = None,
    lines: Iterable[str] = sys.stdin,
    say: Callable[..., None] = say,
    started: float = STARTED,
    **facts: Any,
) -> None:
    """Warms up, and runs a repetition for each line.

    Args:
        repeat: trains so many steps, waits for the end, and returns loss, accuracy and peak memory (and seconds, if it
            knows better).
        steps: of a repetition.
        first_steps: with which it warms up, to say when they have ended; 0: `WARM_UP_STEPS`.
        traffic: counts the bytes that `repeat` sends in a step; None: nobody does.
        lines: one asks for a repetition.
        say: prints.
        started: when the program began, as `time.time` tells it.
        **facts: what the first line says besides: `parameters`, the model's trainable numbers, `device`, its name.
    """
    before = memory_now()
    repeat(1)
    seconds = time.time() - started
    repeat(first_steps - 1 if first_steps else WARM_UP_STEPS)
    if first_steps:
        facts["seconds_to_first_steps"] = time.time() - started
    forget_memory_peak()  # that of compiling
    repeat(WARM_UP_STEPS)
    sent = {} if traffic is None else {"bytes_a_step": traffic(repeat)}
    say(ready=True, seconds_to_first_step=seconds, **facts, **sent)
    for _ in lines:
        start = time.perf_counter()
        result = repeat(steps)
        seconds = time.perf_counter() - start
        say(**{"seconds": seconds, "growth_bytes": memory_growth(before)} | result)
