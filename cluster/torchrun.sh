#!/bin/bash
# Trains on several machines with torchrun, which starts a process for each device.
# Run it on each machine:
#
#     (umask 077 && openssl rand -hex 32 > ~/.kerasdp_secret)      once; copy it to machines that do not share it: scp -p
#     cluster/torchrun.sh
#
# Environment, code and the folder of --workdir are shared, or at the same path. Edit the five lines marked with <--.

machines=2                          # <-- how many; 1:2: begins with one, and continues when the second joins or leaves
devices=gpu                         # <-- of each machine: all its GPUs, or a number (with jax: 1)
first=node0:29400                   # <-- the first machine, where all meet
source .venv/bin/activate           # <-- your environment

# Who joins the run must know this, which is the same on each machine. Torchrun itself does not ask for it: whoever
# reaches its port can run code, so let a firewall keep strangers out.
KERASDP_SECRET="$(cat ~/.kerasdp_secret)" || exit 2
export KERASDP_SECRET

# If a machine or a process fails, torchrun starts all processes again, up to 3 times; --resume continues from the last
# checkpoint. Without this variable the new processes read the addresses of the old ones, and hang (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="$machines" --nproc-per-node="$devices" --max-restarts=3 \
    --rdzv-id=mine --rdzv-backend=c10d --rdzv-endpoint="$first" \
    recipes/train.py --workdir=runs/mine --resume --checkpoint_every=10m \
    --backend=torch --model=lenet --dataset=digits --batch_size=64 --epochs=20    # <-- your run
