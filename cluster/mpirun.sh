#!/bin/bash
# Trains with jax on several machines with Open MPI.
# Open MPI starts the processes by ssh. For torch use torchrun.sh. Run it on the first machine:
#
#     cluster/mpirun.sh
#
# The environment and the code must be at the same path on each machine. Edit the four lines marked with <--.

hosts=node0:1,node1:1               # <-- machines, with one process each, which uses all devices of the machine
export JAX_COORDINATOR_ADDRESS=node0:29400      # <-- address and port of the first process
source .venv/bin/activate           # <-- your environment

# Open MPI numbers the processes. The next line copies the numbers to the variables that jax reads.
place='export JAX_NUM_PROCESSES=$OMPI_COMM_WORLD_SIZE JAX_PROCESS_ID=$OMPI_COMM_WORLD_RANK; exec "$@"'

#   --bind-to none     otherwise mpirun binds each of two processes to one core
#   --tag-output       marks each line of output with its process
# To save and stop with exit code 99: pkill -USR1 -x mpirun. (mpirun kills its processes one second after SIGTERM.)
mpirun --host "$hosts" --bind-to none --tag-output -x PATH -x JAX_COORDINATOR_ADDRESS ${PYTHONPATH:+-x PYTHONPATH} \
    bash -c "$place" bash \
    python recipes/train.py --workdir=runs/mine --resume --checkpoint_every=10m \
    --backend=jax --model=lenet --dataset=digits --batch_size=64 --epochs=20    # <-- your run
