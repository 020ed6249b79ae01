#!/bin/sh
# Submits a run to a Ray cluster, from the folder of the project, which is sent along.
# What .gitignore names is not sent.
#
#     RAY_ADDRESS=http://HEAD:8265 sh cluster/ray-job.sh --backend=jax --workers=4 --gpus=1 --workdir=/shared/runs/mine
#
# Ray runs whatever is sent to it: keep strangers out with a token (ray get-auth-token --generate; RAY_AUTH_MODE=token on
# all nodes and here) and a firewall.
#
# --workdir is in a folder that all nodes share; or the checkpoints are in an object store:
# --checkpoint_dir=s3://bucket/run. Submitted again with --resume, the run continues; within one submission it is
# restarted --max_restarts times.
exec ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --working-dir . -- \
    python recipes/ray_train.py --max_restarts=3 "$@"
