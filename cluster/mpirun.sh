#!/bin/bash
# Trains with jax on several machines with Open MPI, which starts the processes by ssh. (For torch: torchrun.sh.)
# Run it on the first machine:
#
#     cluster/mpirun.sh
#
# Environment and code are at the same path on each machine. Edit the four lines marked with <--.

hosts=node0:1,node1:1               # <-- each machine, and how many processes: one, which uses all its devices
export JAX_COORDINATOR_ADDRESS=node0:29400      # <-- where the first one listens for the others
source .venv/bin/activate           # <-- your environment

# Open MPI numbers the processes; jax takes these numbers from variables of its own.
place='export JAX_NUM_PROCESSES=$OMPI_COMM_WORLD_SIZE JAX_PROCESS_ID=$OMPI_COMM_WORLD_RANK; exec "$@"'

#   --bind-to none     it would bind each of two processes to one core
#   --tag-output       says of each line which process wrote it
# To save and stop, with exit code 99: pkill -USR1 -x mpirun. (After SIGTERM it kills its processes within a second.)
mpirun --host "$hosts" --bind-to none --tag-output -x PATH -x JAX_COORDINATOR_ADDRESS ${PYTHONPATH:+-x PYTHONPATH} \
    bash -c "$place" bash \
    python recipes/train.py --workdir=runs/mine --resume --checkpoint_every=10m \
    --backend=jax --model=lenet --dataset=digits --batch_size=64 --epochs=20    # <-- your run
