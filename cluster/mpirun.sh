#!/bin/bash
# Trains on several machines with Open MPI, which starts the processes by ssh.
# Run it on the first machine:
#
#     cluster/mpirun.sh
#
# Environment and code are at the same path on each machine. Edit the four lines marked with <--.

hosts=node0:1,node1:1               # <-- each machine, and how many processes: one, which uses all its devices
coordinator=node0:29400             # <-- where the first one listens for the others
source .venv/bin/activate           # <-- your environment

# Who joins the run must know this; each start makes a new one. Open MPI hands it on over its own connection (-x), on no
# command line; the environment of a process is read by its user and by root alone.
export KERASDP_SECRET="$(python -c 'import secrets; print(secrets.token_hex(32))')"

# Open MPI tells each process its number, but not where the first one listens: --coordinator does.
#   --bind-to none     it would bind each of two processes to one core
#   --tag-output       says of each line which process wrote it
# To save and stop, with exit code 99: pkill -USR1 -x mpirun. (After SIGTERM it kills its processes within a second.)
mpirun --host "$hosts" --bind-to none --tag-output -x PATH -x KERASDP_SECRET ${PYTHONPATH:+-x PYTHONPATH} \
    python recipes/train.py --coordinator="$coordinator" --workdir=runs/mine --resume --checkpoint_every=10m \
    --backend=jax --model=lenet --dataset=digits --batch_size=64 --epochs=20    # <-- your run
