"""Measures kerasdp, hand-written training loops and plain Keras `fit` side by side, on this machine.

    python benchmarks/compare.py                                               # convnet, all installed backends
    python benchmarks/compare.py --model=resnet18 --batch_size=256 --precision=bfloat16 --backends=torch,jax
    python benchmarks/compare.py --device_counts=1,2,4 --backends=jax --peers=jax
    python benchmarks/compare.py --model=my_model.py:build --dataset=digits    # which backend is fastest for my model?

Each contender is a separate program: kerasdp; --peers, hand-written loops in this folder that train convnet, resnet18
and resnet50 with the same arithmetic, and Keras' own `fit` (`keras`). All are started and warmed up; then they train in
turn, --steps_per_round steps each, --rounds times, so that whatever else the machine does affects all of them.

Expected: a table with images a second (the median of the rounds, the lowest and the highest), the time to the first
step, which compiles, and the peak memory; the ratio of kerasdp to each peer; which backend is fastest. With --workdir
the same is in benchmark.json and in charts. On GPUs and TPUs also the model FLOPs utilization (MFU): the operations
that the model needs over what the chip could do in that time.

All train with SGD, random images, and, on several devices, batch norm on each device's shard of a batch, as the
frameworks do by default; --batch_norm=sync is for those that can, and measures kerasdp against itself without it (the
peer `replica-norm`). Virtual CPU devices share the cores: expect no gain from more of them. Run nothing else meanwhile.

--help lists all flags. The contenders take only a few training flags.
"""

from absl import app, flags
from contenders import PEERS, SHAPES, Task
from measure import compare

import kerasdp
from kerasdp.processes.devices import choose_backend

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "convnet", f"{', '.join(SHAPES)}, or another model of kerasdp or your own, without loops.")
flags.DEFINE_string("dataset", None, "Of another model than the loops': a data set of kerasdp. Default: digits.")
flags.DEFINE_string("data_dir", None, "The folder of the data set images.")
flags.DEFINE_list("backends", None, "Default: all that are installed.")
flags.DEFINE_list("device_counts", ["1"], "Numbers of devices.")
flags.DEFINE_list("peers", None, f"Some of {', '.join(PEERS)}; or none. Default: all that can train the same.")
flags.DEFINE_integer("rounds", 5, "How often each is measured, in turn.")
flags.DEFINE_integer("steps_per_round", 20, "Training steps of each round.")
# What all contenders can train; and batch norm as the frameworks do it by themselves.
kerasdp.flags.define(
    "batch_size", "precision", "device", "compile", "batch_norm", "deterministic", "seed", "workdir",
    batch_norm="replica",
)  # fmt: skip


def given() -> tuple[kerasdp.Config, Task, list[str] | None, list[int], list[str] | None, int, int]:
    """Returns what `measure.compare` gets, as the flags say."""
    config = kerasdp.Config(**kerasdp.flags.values() | {"workdir": FLAGS.workdir})  # None: no files
    task = Task(FLAGS.model, FLAGS.dataset, FLAGS.data_dir)
    if task.model not in SHAPES:
        task = task._replace(dataset=task.dataset or "digits")
    elif task.dataset or task.data_dir:
        name = "dataset" if task.dataset else "data_dir"
        raise kerasdp.UserError(f"--{name} has no effect here: {task.model} is measured on random images")
    counts, rounds, steps = FLAGS.device_counts, FLAGS.rounds, FLAGS.steps_per_round
    if not all(text.isdecimal() and int(text) for text in counts) or min(rounds, steps) < 1:
        raise kerasdp.UserError("--device_counts, --rounds, --steps_per_round: expected numbers of at least 1")
    backends = [choose_backend(name) for name in FLAGS.backends] if FLAGS.backends else None
    peers = None if FLAGS.peers is None else [name for name in FLAGS.peers if name != "none"]
    return config, task, backends, [int(text) for text in counts], peers, rounds, steps


def main(arguments: list[str]) -> None:
    """Measures what the flags say."""
    choices = given()
    if arguments[1:]:
        raise kerasdp.UserError(f"expected flags only. Received: {arguments[1]!r}; --help lists all flags")
    compare(*choices)


if __name__ == "__main__":
    app.run(main)
