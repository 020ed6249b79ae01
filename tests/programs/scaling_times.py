"""Compares the model of benchmarks/scaling_model.py with steps on 1, 2 and 4 virtual devices: scaling_times.py MODEL.

The link is that of gloo between two processes, measured here; the arithmetic that of one device, whose cores all share.
"""

import json
import pathlib
import statistics
import sys
import time

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
BATCH, ROUNDS, STEPS = 32, 5, 5


def sums(rank, port, results):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    seconds = []
    for numbers in (16, 2**20):
        tensor, found = torch.ones(numbers), []
        for _ in range(30):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            found.append(time.perf_counter() - start)
        seconds.append(statistics.median(found))
    if rank == 0:
        results.put(seconds)


def measured_link():
    import torch
    import torch_loop
    from scaling_model import Link

    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(sums, (torch_loop.free_port(), results), 2)
    small, large = results.get()
    return Link(alpha=small / 2, beta=4 * 2**20 / max(large - small, 1e-6))  # of two devices each sends all of it once


def measured_steps(model):
    """Seconds of a step on 1, 2 and 4 devices, which train in turn."""
    from contenders import Contender
    from measure import run

    words = [sys.executable, str(BENCHMARKS / "kit_loop.py"), "--backend=torch", "--compile=off", f"--model={model}"]
    words += [f"--batch_size={BATCH}", f"--steps={STEPS}", "--device=cpu"]
    programs = [
        Contender(name=str(count), backend="torch", num_devices=count, command=(*words, f"--devices={count}"))
        for count in (1, 2, 4)
    ]
    return [statistics.median(one.seconds) / STEPS for one in run(programs, ROUNDS, STEPS, BATCH)]


def main():
    from scaling_model import counted, seconds_of_step

    link, measured, model = measured_link(), measured_steps(sys.argv[1]), counted(sys.argv[1], "torch")
    flops = 3 * model.layer_flops.sum() * BATCH / measured[0]
    predicted = [
        seconds_of_step(model, link, count, BATCH // count, flops / count, sync=False)[1] for count in (1, 2, 4)
    ]
    print(f"alpha {link.alpha * 1e6:.0f} us, beta {link.beta / 1e9:.2f} GB/s")
    print("RESULT", json.dumps({"measured": measured, "predicted": predicted}))


if __name__ == "__main__":
    main()
