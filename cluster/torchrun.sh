#!/bin/bash
# Trains with torch on several machines with torchrun, which starts a process for each device.
# Run it on each machine:
#
#     cluster/torchrun.sh
#
# Environment, code and the folder of --workdir are shared, or at the same path. Edit the five lines marked with <--.
# Whoever reaches the ports of torchrun and torch can run code there: the network between the machines is trusted.

machines=2                          # <-- how many; 1:2: begins with one, and continues when the second joins or leaves
devices=gpu                         # <-- of each machine: all its GPUs, or a number
first=node0:29400                   # <-- the first machine, where all meet
source .venv/bin/activate           # <-- your environment

# If a machine or a process fails, torchrun starts all processes again, up to 3 times; --resume continues from the last
# checkpoint. Without this variable the new processes read the addresses of the old ones, and hang (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="$machines" --nproc-per-node="$devices" --max-restarts=3 \
    --rdzv-id=mine --rdzv-backend=c10d --rdzv-endpoint="$first" \
    recipes/train.py --workdir=runs/mine --resume --checkpoint_every=10m \
    --backend=torch --model=lenet --dataset=digits --batch_size=64 --epochs=20    # <-- your run
