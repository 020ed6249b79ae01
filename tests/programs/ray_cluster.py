"""Runs recipes/ray_train.py on a cluster of two simulated nodes, of one core each.

python ray_cluster.py SETTINGS: fields of kerasdp.Config as JSON, and
    remove_at_step: behind it the node that is not the driver's is killed, and a new one comes
"""

import json
import pathlib
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "recipes"))

import ray
import ray.cloudpickle
import ray_train
import train
from ray.cluster_utils import Cluster

import kerasdp

for module in (ray_train, train):  # which the workers cannot import
    ray.cloudpickle.register_pickle_by_value(module)


def main():
    settings = json.loads(sys.argv[1])
    remove_at_step = settings.pop("remove_at_step", None)
    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    other = cluster.add_node(**node)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=True, logging_level="warning")
    codes = []
    trained = threading.Thread(target=lambda: codes.append(exit_code(settings)))
    trained.start()
    if remove_at_step:  # in the main thread, in which alone Ray starts nodes
        path = pathlib.Path(settings["workdir"]) / "steps.jsonl"
        while not path.exists() or f'"step": {remove_at_step},' not in path.read_text():
            assert trained.is_alive()
            time.sleep(0.05)
        cluster.remove_node(other, allow_graceful=False)
        print("a node was killed", flush=True)
        cluster.add_node(**node)
    trained.join()
    ray.shutdown()
    cluster.shutdown()
    sys.exit(codes[0])


def exit_code(settings):
    settings = {"device": "cpu", "log_every": 1, "verbose": 2, "workers": 2} | settings
    sys.argv = ["ray_train.py", *(f"--{name}={value}" for name, value in settings.items())]
    try:
        ray_train.main(ray_train.FLAGS(sys.argv))
    except kerasdp.RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    main()
