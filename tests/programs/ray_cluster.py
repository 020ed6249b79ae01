"""Runs recipes/train.py's `train` with kerasdp.ray on a cluster of two simulated nodes, of one core each.

python ray_cluster.py SETTINGS: fields of kerasdp.Config as JSON, and
    remove_at_step: behind it the node that is not the driver's is killed; a new one comes after `spare_after` seconds,
        if that is given. Each epoch ends with a pause, or the run could have ended before the node has
    num_workers: as in kerasdp.ray.run
"""

import functools
import json
import os
import pathlib
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "recipes"))

import ray
from ray.cluster_utils import Cluster
from train import train

import kerasdp


def main():
    settings = json.loads(sys.argv[1])
    remove_at_step, spare_after = settings.pop("remove_at_step", None), settings.pop("spare_after", None)
    num_workers = settings.pop("num_workers", 2)
    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    other = cluster.add_node(**node)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=True, logging_level="warning")

    returned = []
    trained = threading.Thread(target=lambda: returned.append(run(settings, num_workers, 5 if remove_at_step else 0)))
    trained.start()
    if remove_at_step:  # in the main thread, in which alone Ray starts nodes
        path = pathlib.Path(settings["workdir"]) / "steps.jsonl"
        while not path.exists() or f'"step": {remove_at_step},' not in path.read_text():
            assert trained.is_alive()
            time.sleep(0.05)
        cluster.remove_node(other, allow_graceful=False)
        print("a node was killed", flush=True)
        if spare_after is not None:
            time.sleep(spare_after)
            cluster.add_node(**node)
    trained.join()
    ray.shutdown()
    cluster.shutdown()
    sys.exit(returned[0])


def run(settings, num_workers, pause):
    """Trains, prints what came out, and returns the exit code. `pause`: seconds behind each epoch."""
    fields = {"device": "cpu", "log_every": 1, "verbose": 2} | settings
    begin = time.monotonic()
    try:
        train_function = functools.partial(return_history, pause)
        history = kerasdp.ray.run(train_function, kerasdp.Config(**fields), num_workers=num_workers)
    except kerasdp.RunError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    print("RESULT", json.dumps({"loss": history["loss"], "seconds": time.monotonic() - begin}))
    return 0


def return_history(pause, runner):
    """What recipes/train.py does; returns the metrics, too, which the recipe does not."""
    found = []

    def at_epoch_end(epoch, logs):
        found.append(logs)
        time.sleep(pause)

    runner.state.epoch_listeners.append(at_epoch_end)
    train(runner)
    assert threading.current_thread() is threading.main_thread()  # where signals are handled
    return {"loss": [logs["loss"] for logs in found], "pid": os.getpid()}


if __name__ == "__main__":
    main()
