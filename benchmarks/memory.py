"""Measures what each choice that spares memory costs and spares, on a GPT or ResNet-50.

    python benchmarks/memory.py --backend=torch
    python benchmarks/memory.py --backend=jax --devices=2 --blocks=12
    python benchmarks/memory.py --backend=torch --device=gpu --devices=1 --dim=1024 --blocks=24 --length=512
    python benchmarks/memory.py --model=resnet50

Each row is a separate run, on virtual CPU devices unless `--device=gpu`.

On Linux. Expected: a table in Markdown: the most memory that a GPU used, or that a process took beside what it had
before the training, and the median milliseconds of a step.
"""

import argparse
import functools
import time
from typing import Any

import numpy as np

import kerasdp

CHOICES: list[dict[str, Any]] = [
    {}, {"accumulate": 4}, {"precision": "bfloat16"}, {"remat": "blocks"}, {"shard": "optimizer"}, {"shard": "weights"},
    {"shard": "weights", "remat": "blocks"},
]  # fmt: skip


def gpt(dim: int, blocks: int, length: int, words: int) -> Any:
    """Returns a decoder: `(rows, length)` tokens to `(rows, length, words)` logits."""
    import keras
    from keras import layers

    class Block(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layers.MultiHeadAttention(4, dim // 4)
            self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
            self.dense = [layers.Dense(4 * dim, "gelu"), layers.Dense(dim)]

        def build(self, shape: Any) -> None:
            self.attention.build(shape, shape)
            for layer, own in zip((*self.norms, *self.dense), (shape, shape, shape, (*shape[:-1], 4 * dim))):
                layer.build(own)

        def call(self, x: Any) -> Any:
            normed = self.norms[0](x)
            x = x + self.attention(normed, normed, use_causal_mask=True)
            return x + self.dense[1](self.dense[0](self.norms[1](x)))

    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, dim)(tokens)
    for _ in range(blocks):
        x = Block()(x)
    return keras.Model(tokens, layers.Dense(words)(layers.LayerNormalization()(x)))


def train(runner: "kerasdp.Runner", name: str, shape: tuple[int, ...], rows: int, steps: int) -> dict[str, float]:
    """Trains; returns the most megabytes of a GPU, or that the process has grown by, and milliseconds of a step."""
    import keras

    def resident(which: str) -> float:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1e3 for line in file if line.startswith(which))

    with runner.scope():
        model = gpt(*shape) if name == "gpt" else kerasdp.build_model(name, (64, 64, 3), 10)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss)
    times: list[float] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: times.append(time.perf_counter()))
    random, num = np.random.RandomState(0), rows * steps
    x = y = random.randint(0, shape[-1], (num, shape[2]))
    if name != "gpt":
        x, y = random.randint(0, 256, (num, 64, 64, 3)).astype("uint8"), np.arange(num) % 10
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forgets the most so far
    before = resident("VmRSS")
    runner.fit(model, x, y, batch_size=rows, callbacks=[note], verbose=0)
    if runner.config.device == "cpu":
        most = resident("VmHWM") - before
    else:
        strategy = runner.strategy
        most = max(strategy.processes.all_gather_object(strategy.peak_memory_bytes())) / 1e6
    return {"most": most, "ms": 1000 * float(np.median(np.diff(times)[2:]))}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="gpt", choices=["gpt", "resnet50"])
    defaults = {"devices": 2, "dim": 256, "blocks": 8, "length": 128, "words": 2000, "rows": 16, "steps": 12}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    shape = args.dim, args.blocks, args.length, args.words
    run = functools.partial(train, name=args.model, shape=shape, rows=args.rows, steps=args.steps)
    settings = {"backend": args.backend, "device": args.device, "num_devices": args.devices, "batch_size": args.rows}
    print("| choices | measured | step |\n|---|---|---|")
    left_out = {"shard"} if args.devices == 1 else set()
    if args.device == "cpu":  # most have no arithmetic of bfloat16: PyTorch takes minutes a step
        left_out.add("precision")
    for choice in (choice for choice in CHOICES if not left_out & choice.keys()):
        name = " ".join(f"`--{key}={value}`" for key, value in choice.items()) or "as it is"
        try:
            measured = kerasdp.launch(run, kerasdp.Config(**settings, **choice, verbose=0))
        except kerasdp.UserError as error:
            print(f"| {name} | {error} |", flush=True)
            continue
        print(f"| {name} | {measured['most']:.0f} MB | {measured['ms']:.0f} ms |", flush=True)


if __name__ == "__main__":
    main()
