"""Exchanges values of every kind with the other processes of a run, hundreds of times, at a pace of its own.

python exchanges.py BACKEND
"""

import random
import sys
import threading
import time

import numpy as np

import kerasdp

NUM_ROUNDS = 400


def exchange(runner):
    processes, pace = runner.strategy.processes, random.Random(runner.strategy.processes.rank)
    scatters, received = [processes.open_scatter() for _ in range(2)], [[], []]

    def take(which):
        for number in range(30):
            parts = [np.full(10_000, 1000 * which + number + rank) for rank in range(processes.num_processes)]
            received[which].append(int(scatters[which](parts if processes.rank == 0 else [], number % 7)[0]))

    threads = [threading.Thread(target=take, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for number in range(NUM_ROUNDS):
        if pace.random() < 0.1:
            time.sleep(0.02 * pace.random())
        latest = processes.all_reduce_max_delayed(2 * number + processes.rank)
        assert latest == (2 * number - 1 if number else 0), (number, latest)
        if number % 40 == 0:
            assert processes.all_gather_object({"of": processes.rank}) == [{"of": 0}, {"of": 1}]
            assert processes.any_rank(processes.rank == 1) and not processes.any_rank(False)
    for thread in threads:
        thread.join()
    assert received == [[1000 * which + number + processes.rank for number in range(30)] for which in range(2)], (
        received
    )
    return "exchanged"


if __name__ == "__main__":
    print(kerasdp.launch(exchange, backend=sys.argv[1], device="cpu", verbose=0))
