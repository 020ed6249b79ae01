"""Measures what a small GPT needs with and without rematerialization: on one virtual device, or, in parts, on two.

python remat_memory.py BACKEND COMPILE REMAT SHARD: COMPILE as `--compile`, for torch alone

Prints, in MiB, the peak of the process' memory in a step above what it has between steps (with tensorflow: before the
first; of what is freed it has none with MALLOC_MMAP_THRESHOLD_ set), or, of eager steps of torch, what tensors hold at
most; the seconds of a step, and losses.
"""

import contextlib
import functools
import os
import sys
import time

import numpy as np
from starting import printed

BLOCKS, LENGTH, WIDTH, HEADS, BATCH, STEPS = int(os.environ.get("BLOCKS", 8)), 256, 128, 4, 16, 6


def gpt():
    import keras
    from keras import layers

    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
            self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1)
            self.up, self.down, self.drop = layers.Dense(4 * WIDTH, "gelu"), layers.Dense(WIDTH), layers.Dropout(0.1)

        def call(self, x):
            normed = self.norms[0](x)
            x = x + self.attention(normed, normed, use_causal_mask=True)
            return x + self.drop(self.down(self.up(self.norms[1](x))))

    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(64, WIDTH)(tokens)
    for _ in range(BLOCKS):
        x = Block()(x)
    return keras.Model(tokens, layers.Dense(64)(layers.LayerNormalization()(x)))


def mib(line):
    """Of this process: `VmRSS`, what it has; `VmHWM`, the most that it had since `forget_peak`."""
    with open("/proc/self/status") as status:
        return next(int(text.split()[1]) for text in status if text.startswith(line)) / 1024


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def live_bytes():
    """The context in which tensors of torch are counted, for eager steps; gives what there is, and the most of it."""
    import weakref

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        known, now, most = set(), 0, 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            results = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(results):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                    storage = tensor.untyped_storage()
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
            return results

        def forget(self, key, size):
            self.known.remove(key)
            self.now -= size

    return Counting()


def train(runner, is_eager):
    import keras

    class Times(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(float(logs["loss"]))
            ends.append(time.perf_counter())
            # What compiling takes does not count. TensorFlow, which compiles little, keeps what a step has freed.
            if len(ends) == 2 and keras.backend.backend() != "tensorflow":
                forget_peak()
                before.append(mib("VmRSS"))

    ends, losses, before = [], [], []
    with runner.scope():
        model = gpt()
        model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.RandomState(0).randint(0, 64, (STEPS * BATCH, LENGTH))
    before.append(mib("VmRSS"))
    with live_bytes() if is_eager else contextlib.nullcontext() as counted:
        runner.fit(model, x, x, batch_size=BATCH, epochs=1, verbose=0, callbacks=[Times()])
    return {
        "mib": counted.most / 2**20 if is_eager else mib("VmHWM") - before[-1],
        "seconds": float(np.median(np.diff(ends))),
        "losses": losses,
    }


if __name__ == "__main__":
    backend, compiles, remat, shard = sys.argv[1:]
    settings = {"compile": compiles} if backend == "torch" else {}
    if shard != "none":
        settings["shard"] = shard
    is_eager = (backend, compiles) == ("torch", "off")
    num_devices = 1 if shard == "none" else 2
    printed(functools.partial(train, is_eager=is_eager), backend, num_devices, remat=remat, check="off", **settings)
