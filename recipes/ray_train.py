"""Trains as recipes/train.py does, over the workers of a Ray cluster.

    pip install 'kerasdp[ray]'
    python recipes/ray_train.py --workers=2
    python recipes/ray_train.py --workers=4 --gpus=1 --max_restarts=3 --workdir=/shared/runs/mine
    python recipes/ray_train.py --help

Connects with the cluster that this machine is part of, or that $RAY_ADDRESS names; where there is none, it starts one
of this machine. --gpus is the number of devices of each worker; with torch that is one. --workdir is in a folder that
all nodes share, or --checkpoint_dir is a URL. When a worker or its node is lost, all start again from the last
checkpoint, --max_restarts times.

Expected of the first line: the loss curve of recipes/train.py.

Copy this file and recipes/train.py into your project and change what you like.
"""

import importlib.util
import os
import socket
import sys
from typing import Any

import train  # recipes/train.py: its function, with its flags
from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 1, "Workers of the run, each with --gpus devices.", lower_bound=1)
flags.adopt_module_key_flags(train)


def work(told: dict[str, Any]) -> str | None:
    """Runs in each worker of Ray, a process of the run; returns a mistake that no restart helps."""
    import ray.train
    import ray.util
    from ray.train.collective import broadcast_from_rank_zero

    context, choices = ray.train.get_context(), told["choices"]
    os.chdir(told["folder"])  # from where paths such as --model=my_model.py:build are meant
    train.FLAGS(told["command"], known_only=True)  # a worker has a command line of its own
    if choices.get("backend") == "jax" and choices["device"] == "cpu":  # Ray joins JAX on GPUs and TPUs alone
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = broadcast_from_rank_zero(f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}")
        os.environ["JAX_COORDINATOR_ADDRESS"] = address
        os.environ["JAX_NUM_PROCESSES"] = str(context.get_world_size())
        os.environ["JAX_PROCESS_ID"] = str(context.get_world_rank())
    try:
        kerasdp.launch(train.train, **choices)
    except kerasdp.UserError as error:
        return str(error)
    return None


def main(argv):
    """Runs in the process that was started; `train.train` runs in the workers."""
    choices = kerasdp.flags.values(argv)
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # Ray's workers would leave the folder of the script
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")  # for a cluster that is gone Ray would try 13 minutes
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    except ImportError as error:
        raise kerasdp.UserError("Ray is not installed: pip install 'kerasdp[ray]'") from error
    workdir = os.path.abspath(choices["workdir"])
    if not FLAGS.resume and os.path.exists(os.path.join(workdir, "checkpoints")):
        raise kerasdp.UserError(f"--workdir: {workdir} holds a run; continue it (--resume), or choose another folder")
    ray.init(logging_level="warning", ignore_reinit_error=True)
    device = FLAGS.device or "auto"
    if device == "auto":
        device = "gpu" if ray.cluster_resources().get("GPU") else "cpu"
    if FLAGS.backend == "jax" or importlib.util.find_spec("torch") is None:
        from ray.train.v2.jax import JaxTrainer as Trainer

        choices["backend"] = "jax"
    else:
        from ray.train.torch import TorchTrainer as Trainer
    count, restarts = FLAGS.gpus or 1, FLAGS.max_restarts or 0
    choices |= {"device": device, "workdir": workdir, "max_restarts": 0, "resume": True}
    trainer = Trainer(
        work,
        train_loop_config={"choices": choices, "command": sys.argv, "folder": os.getcwd()},
        scaling_config=ScalingConfig(
            num_workers=FLAGS.workers,
            use_gpu=device == "gpu",
            resources_per_worker={"CPU": count, **({"GPU": count} if device == "gpu" else {})},
        ),
        run_config=RunConfig(name="ray", storage_path=workdir, failure_config=FailureConfig(max_failures=restarts)),
    )
    try:
        mistake = trainer.fit().return_value
    except TrainingFailedError as error:
        raise kerasdp.RunError(f"the workers failed ({str(error).strip().splitlines()[-1]})") from error
    if mistake:
        raise kerasdp.UserError(mistake)


if __name__ == "__main__":
    app.run(main)
