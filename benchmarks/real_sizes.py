"""Measures the sizes that people train, on one GPU: kerasdp, Keras' `fit`, loops by hand, models of public packages.

    python benchmarks/real_sizes.py --budget=12                     # what is worth most first, for 12 minutes
    python benchmarks/real_sizes.py --models=gpt,resnet50 --contenders=kerasdp-torch,torch
    python benchmarks/real_sizes.py --tiny --models=gpt             # a rehearsal: tiny, on the CPU

GPT-2 124M on 16 texts of 1,024 tokens, ResNet-50 on 128 images of 224 x 224, BERT-base on 64 texts of 128 tokens,
ViT-B/16 on 64 images, and adapters (LoRA) of a decoder with 1.1 billion weights on 4 texts of 1,024 tokens:
`protocol.REAL`. bfloat16, SGD with momentum, random samples. Each contender runs alone, in its own process. It has
`--limit` seconds, and an empty compile cache.

Expected: a table in Markdown, a row as soon as it is measured: the median milliseconds of a step, the model FLOPs
utilization (MFU, `measure.utilization`), the seconds from the start of the process to the end of its first 20 steps,
and the peak GPU memory that the framework reports. On a CPU it is the memory of the process. A row without figures
says why.
"""

import argparse
import contextlib
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
import time

import measure
import protocol
from contenders import FOLDER, Contender, caches_in
from flops import training_flops

from kerasdp.config import versions

STEPS, ROUNDS, FIRST_STEPS, TINY_BATCH = 20, 3, 20, 4
MODELS = {
    "gpt": "GPT-2 124M", "resnet50": "ResNet-50", "bert": "BERT-base", "vit": "ViT-B/16", "llama": "LoRA of 1.1B",
}  # fmt: skip
# Which packages their public models need.
PUBLIC = {
    "gpt": ["transformers"], "resnet50": ["torchvision"], "bert": ["transformers"], "vit": ["timm"],
    "llama": ["transformers", "peft"],
}  # fmt: skip
# Backend and command, those first that are worth most: of each group all models are measured before the next begins.
KIT, FIT = "kit_loop.py --backend=", "keras_fit.py --backend="
GROUPS: list[dict[str, tuple[str, str]]] = [
    {
        "kerasdp-torch": ("torch", f"{KIT}torch"),
        "torch": ("torch", "torch_loop.py --compile"),
        "kerasdp-jax": ("jax", f"{KIT}jax"),
        "jax": ("jax", "jax_loop.py"),
        "keras-jax": ("jax", f"{FIT}jax --jit_compile=on"),
    },
    {
        "keras-torch": ("torch", f"{FIT}torch --jit_compile=off"),
        "public-torch": ("torch", "torch_loop.py --compile --public"),
        "keras-torch-jit": ("torch", f"{FIT}torch --jit_compile=on"),
    },
    {
        "kerasdp-tensorflow": ("tensorflow", f"{KIT}tensorflow"),
        "tensorflow": ("tensorflow", "tensorflow_loop.py --compile"),
        "keras-tensorflow-jit": ("tensorflow", f"{FIT}tensorflow --jit_compile=on"),
        "keras-tensorflow": ("tensorflow", f"{FIT}tensorflow --jit_compile=off"),
    },
    {"keras-jax-eager": ("jax", f"{FIT}jax --jit_compile=off")},
]
COMMANDS = {name: command for group in GROUPS for name, command in group.items()}
HEAD = "| model | contender | ms a step | MFU | first 20 steps | GPU memory |\n|---|---|---|---|---|---|"


def missing(model: str, name: str) -> str:
    """Returns the package that a contender needs for a model and that is not there; empty if all are."""
    needed = [COMMANDS[name][0], *(PUBLIC[model] if name == "public-torch" else [])]
    return next((package for package in needed if importlib.util.find_spec(package) is None), "")


def measured(model: str, name: str, args: argparse.Namespace, limit: float) -> measure.Measured:
    """Runs a contender alone, with an empty cache; returns what it took, or its error."""
    backend, command = COMMANDS[name]
    program, *words = command.split()
    flags = [
        f"--model={model}", f"--batch_size={args.batch_sizes[model]}", f"--steps={args.steps}",
        f"--first_steps={FIRST_STEPS}",
        *(["--device=cpu", "--vocabulary=500"] if args.tiny else ["--size=real", "--precision=bfloat16"]),
    ]  # fmt: skip
    contender = Contender(
        name=name, backend=backend, num_devices=1, limit=limit,
        command=(sys.executable, os.path.join(FOLDER, program), *words, *flags),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kerasdp-") as cache, contextlib.redirect_stdout(sys.stderr):
        os.environ |= caches_in(cache)
        (found,) = measure.run([contender], args.rounds, args.steps, args.batch_sizes[model])
    return found


def row_of(found: measure.Measured, args: argparse.Namespace, flops: float | None) -> list[str]:
    """Returns the figures of a row. `flops`: of a sample's training step."""
    if found.error:
        return [found.error.replace("|", "/")[:160], "", "", ""]
    # Which counts a training step as three forward passes.
    share = measure.utilization(found, flops and flops / 3, "bfloat16")
    return [
        f"{1000 * statistics.median(found.seconds) / args.steps:,.1f}",
        "-" if share is None else f"{share:.1%}",
        f"{found.ready['seconds_to_first_steps']:.0f} s",
        f"{found.last['peak_memory_bytes'] / 2**30:.2f} GiB",
    ]


def parsed() -> argparse.Namespace:
    """Returns the flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--models", default=",".join(MODELS), help="a list")
    flags.add_argument("--contenders", default=",".join(COMMANDS), help="a list")
    flags.add_argument("--budget", type=float, help="minutes, after which nothing is measured any more")
    flags.add_argument("--limit", type=float, default=240, help="seconds that a contender may take")
    flags.add_argument("--rounds", type=int, default=ROUNDS, help="how often its steps are measured")
    flags.add_argument("--steps", type=int, default=STEPS, help="training steps of each round")
    flags.add_argument("--tiny", action="store_true", help="small models in float32 on the CPU: a rehearsal")
    args = flags.parse_args()
    args.models, args.contenders = args.models.split(","), args.contenders.split(",")
    for name, known in (("models", MODELS), ("contenders", COMMANDS)):
        if unknown := [one for one in getattr(args, name) if one not in known]:
            flags.error(f"--{name}: expected some of {', '.join(known)}. Received: {unknown[0]!r}")
    args.batch_sizes = {name: TINY_BATCH if args.tiny else protocol.REAL[name].batch_size for name in args.models}
    return args


def main() -> None:
    """Prints the table."""
    args = parsed()
    end = time.monotonic() + 60 * args.budget if args.budget else float("inf")
    device, skipped = "", []
    print(HEAD, flush=True)
    for group, model in itertools.product(GROUPS, args.models):
        for name in (name for name in group if name in args.contenders):
            left = end - time.monotonic()
            if left < 1:
                skipped.append(f"{name} on {MODELS[model]}")
                continue
            if package := missing(model, name):
                cells = [f"{package} is not installed", "", "", ""]
            else:
                found = measured(model, name, args, min(args.limit, left))
                device = device or found.ready.get("device", "")
                cells = row_of(found, args, None if args.tiny else training_flops(model))
            print(f"| {' | '.join([MODELS[model], name, *cells])} |", flush=True)
    print(f"\n{device or 'no device'}; {', '.join(f'{name} {version}' for name, version in versions().items())}")
    if skipped:
        print(f"No time was left for {', '.join(skipped)}.")


if __name__ == "__main__":
    main()
