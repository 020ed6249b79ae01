"""Trains many runs that differ in some flags, one after the other: every combination, or as Optuna picks them.

    pip install 'kerasdp[optuna]'
    python recipes/sweep.py --sweep='learning_rate=0.01,0.03; batch_size=32,64' --epochs=3 --workdir=runs/sweep
    python recipes/sweep.py --sweep='learning_rate=0.01,0.03; batch_size=32,64' --epochs=3 --workdir=runs/sweep --resume
    python recipes/sweep.py --sweep='learning_rate=0.001..0.1; model=mlp,lenet' --trials=20 --workdir=runs/search
    python recipes/sweep.py --help

Each run has a process and a folder of its own. With --resume a sweep continues where it was stopped, in the middle of a
run; what is finished is not trained again. Optuna keeps its study in the workdir, too.

Expected of the first sweep: a table of four runs in two minutes on two CPU cores, the best with a validation accuracy
above 0.93; sweep.csv and sweep.png in the workdir.

Copy this file and recipes/train.py into your project and change what you like.
"""

from typing import Any

from train import train  # recipes/train.py: the same function

import kerasdp


def main(config: kerasdp.Config, space: dict[str, Any], num_trials: int | None) -> None:
    """Runs on this machine; `train` runs in the workers."""
    kerasdp.sweep.run(train, config, space, num_trials=num_trials)


if __name__ == "__main__":
    kerasdp.main(main, flags="sweep")
