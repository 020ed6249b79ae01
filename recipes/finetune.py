"""Fine-tunes a model with adapters (LoRA), or in full: one of KerasHub, of a file, or of a run.

    python recipes/finetune.py --lora_rank=8                          # no download: a small model, trained first
    python recipes/finetune.py --lora_rank=8 --weights=runs/base --dataset=mine.py:data --also_train='*logits*'
    python recipes/finetune.py --lora_rank=8 --preset=bert_tiny_en_uncased --dataset=mine.py:texts --export=mine.keras
    python recipes/finetune.py --lora_rank=8 --backend=jax --gpus=4 --shard=weights --remat=blocks --frozen=bfloat16
    python recipes/finetune.py --lora_rank=8 --checkpoint_weights=trained --workdir=runs/tuned        # then --resume

--dataset is a name, or a function that returns (x_train, y_train), (x_test, y_test): arrays, or texts, which a preset
preprocesses. --export writes a plain model, with the adapters in its weights. Copy this file, and text.py beside it.
"""

import functools
import pathlib
from pydoc_data.topics import topics

from text import build

import kerasdp


def main(config: kerasdp.Config, base: dict, adapters: dict, prompt: str | None) -> None:
    """Runs on this machine; `train` runs in the workers."""
    kerasdp.launch(functools.partial(train, base=base, adapters=adapters, prompt=prompt), config)


def windows(text: str, length: int = 32, most: int = 1000):
    """Returns (x, y) to train on, and to evaluate on: codes of characters, and of those that follow."""
    import numpy as np

    codes = np.frombuffer(text.encode("ascii", "ignore"), "uint8")[: most * (length + 1)].astype("int32")
    rows = codes[: len(codes) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    return [(part[:, :-1], part[:, 1:]) for part in (rows[len(rows) // 10 :], rows[: len(rows) // 10])]


def train(runner: "kerasdp.Runner", base: dict, adapters: dict, prompt: str | None) -> None:
    """Runs in every worker process, after the backend is chosen."""
    config, say = runner.config, print if runner.is_chief and runner.config.verbose != 0 else lambda line: None
    with runner.scope():
        model, *data = kerasdp.load_pretrained(config, **base) if base else (build(128),)
    if not base:
        fit(runner, model, *windows(" ".join(topics.values())), epochs=2)  # however long the second one is
        data = windows(pathlib.Path(functools.__file__).read_text())
    say(kerasdp.add_adapters(model, **adapters) if adapters else f"all of {model.count_params():,} weights train")
    before, after = fit(runner, model, *data, epochs=config.epochs)
    runner.add_to_report(before=before, after=after)
    say("held out: " + ", ".join(f"{name} {value:.4g} -> {after[name]:.4g}" for name, value in before.items()))
    if config.export:
        kerasdp.export(model, config.export)
    if prompt is not None:
        can = hasattr(model, "generate") and getattr(model, "preprocessor", None) and runner.num_replicas == 1
        say(model.generate(prompt) if can else "--prompt: continued by tasks of KerasHub that generate, on one device")


def fit(runner, model, train, test, epochs):
    """Compiles, as after any change of what trains, and fits; returns what an evaluation gives before and after."""
    is_task = hasattr(model, "backbone")  # of KerasHub, which knows its loss and metrics
    own = {} if is_task else {"loss": kerasdp.make_loss(runner.config), "metrics": ["accuracy"]}
    model.compile(kerasdp.make_optimizer(runner.config), **own)
    before = runner.evaluate(model, *test, return_dict=True)
    runner.fit(model, *train, validation_data=test, epochs=epochs)
    return before, runner.evaluate(model, *test, return_dict=True)


if __name__ == "__main__":
    kerasdp.main(main, flags="finetune")
