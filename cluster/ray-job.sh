#!/bin/sh
# Submits a training run to a Ray cluster.
# Run it in the folder of your project. The folder is sent to the cluster, without the files in .gitignore.
#
#     RAY_ADDRESS=http://HEAD:8265 sh cluster/ray-job.sh --backend=jax --workers=4 --gpus=1 --workdir=/shared/runs/mine
#
# Ray runs any code that it receives. Protect the cluster with a firewall and a token (ray get-auth-token --generate;
# RAY_AUTH_MODE=token on all nodes and here).
#
# All nodes must share the folder --workdir, or the checkpoints must be in an object store:
# --checkpoint_dir=s3://bucket/run. A failed run restarts --max_restarts times. To continue it after that, submit it
# again with --resume.
exec ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --working-dir . -- \
    python recipes/ray_train.py --max_restarts=3 "$@"
