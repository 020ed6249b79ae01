#!/bin/bash
# Trains with torch on several machines with torchrun, one process for each device.
# Run it on each machine:
#
#     cluster/torchrun.sh
#
# The environment, the code and the folder of --workdir must be shared, or at the same path. Edit the five lines marked
# with <--. Use a private network: a program that reaches the ports of torchrun and torch can run code there.

machines=2                          # <-- number of machines. 1:2 starts with one machine; a second one can join and leave
devices=gpu                         # <-- devices of each machine: all GPUs, or a number
first=node0:29400                   # <-- the first machine; all machines connect to it
source .venv/bin/activate           # <-- your environment

# If a machine or a process fails, torchrun restarts all processes, up to 3 times. They resume from the last checkpoint.
# Without this variable, the new processes read the addresses of the old processes and hang (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="$machines" --nproc-per-node="$devices" --max-restarts=3 \
    --rdzv-id=mine --rdzv-backend=c10d --rdzv-endpoint="$first" \
    recipes/train.py --workdir=runs/mine --resume --checkpoint_every=10m \
    --backend=torch --model=lenet --dataset=digits --batch_size=64 --epochs=20    # <-- your run
