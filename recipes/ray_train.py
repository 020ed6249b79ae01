"""Trains the model of recipes/train.py on the workers of a Ray cluster.

    pip install 'kerasdp[ray]'
    python recipes/ray_train.py --workers=2
    python recipes/ray_train.py --workers=4 --gpus=1 --max_restarts=3 --workdir=/shared/runs/mine
    python recipes/ray_train.py --help

Expected of the first command: the loss curve of recipes/train.py.

It connects to the Ray cluster of this machine, or of $RAY_ADDRESS. If there is no cluster, it starts one on this
machine. --gpus is the number of devices of each worker; with torch it is 1. All nodes must share the folder --workdir,
or --checkpoint_dir must be a URL. If a worker or its node fails, all workers restart from the last checkpoint, at most
--max_restarts times.
"""

import importlib.util
import os
import socket
import sys
from typing import Any

import train  # recipes/train.py: its function and flags
from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 1, "Number of Ray workers, each with --gpus devices.", lower_bound=1)
flags.adopt_module_key_flags(train)


def work(told: dict[str, Any]) -> str | None:
    """Trains in one Ray worker. Returns the text of an error that a restart cannot fix, else None."""
    import ray.train
    import ray.util
    from ray.train.collective import broadcast_from_rank_zero

    context, choices = ray.train.get_context(), told["choices"]
    os.chdir(told["folder"])  # paths such as --model=my_model.py:build start here
    train.FLAGS(told["command"], known_only=True)  # a worker does not have this command line
    if choices.get("backend") == "jax" and choices["device"] == "cpu":  # Ray connects JAX only on GPUs and TPUs
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
    """Starts the Ray workers, which call `train.train`."""
    choices = kerasdp.flags.values(argv)
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # else Ray's workers leave the folder of the script
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")  # else Ray tries to reach a dead cluster for 13 minutes
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
