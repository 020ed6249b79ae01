"""Trains on a Ray cluster: one run over several workers, or a sweep of many runs at a time.

    pip install 'kerasdp[ray]'
    python recipes/ray_train.py --workers=2                                  # recipes/train.py over two workers
    python recipes/ray_train.py --workers=1:4 --max_restarts=3 --backend=torch --checkpoint_dir=s3://bucket/run
    python recipes/ray_train.py --sweep='learning_rate=0.01,0.03; batch_size=32,64,128' --workdir=runs/sweep
    python recipes/ray_train.py --help

Connects with the cluster that this machine is part of, or that $RAY_ADDRESS names; where there is none, it starts one
of this machine. --gpus is the number of devices of each worker, or of each run of a sweep. --workdir is in a folder
that all nodes share, or --checkpoint_dir is given.

Expected of the second line: the loss curve of recipes/train.py. A sweep prints a table, and leaves it and a picture of
all curves in its workdir; with --resume it continues.

Copy this file and recipes/train.py into your project and change what you like.
"""

from train import train  # recipes/train.py: the same function

import kerasdp


def main(config: kerasdp.Config, num_workers: tuple, cpus: float | None, grid: dict | None) -> None:
    """Runs on this machine; `train` runs in the workers."""
    if grid:
        kerasdp.ray.sweep(train, config, grid, cpus_per_run=cpus)
    else:
        kerasdp.ray.run(train, config, num_workers=num_workers, cpus_per_worker=cpus)


if __name__ == "__main__":
    kerasdp.main(main, flags="ray_train")
