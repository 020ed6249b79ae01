"""Measures kerasdp, hand-written training loops and plain Keras `fit` side by side, on this machine.

    python recipes/benchmark.py                                                # convnet, all installed backends
    python recipes/benchmark.py --model=resnet18 --batch_size=256 --precision=bfloat16 --backends=torch,jax
    python recipes/benchmark.py --device_counts=1,2,4 --backends=jax --peers=jax
    python recipes/benchmark.py --model=my_model.py:build --dataset=digits     # which backend is fastest for my model?

Each contender is a program of its own: kerasdp; --peers, hand-written loops in benchmarks/ that train convnet,
resnet18 and resnet50 with the same arithmetic, and Keras' own `fit` (`keras`). All are started and warmed up; then they
train in turn, --steps_per_round steps each, --rounds times, so that whatever else the machine does affects all of them.

Expected: a table with images a second (the median of the rounds, the lowest and the highest), the time to the first
step, which compiles, and the peak memory; the ratio of kerasdp to each peer; which backend is fastest. The same is in
benchmark.json and in charts in --workdir. On GPUs and TPUs also the model FLOPs
utilization (MFU): the operations that the model needs over what the chip could do in that time.

All train with SGD, random images, and, on several devices, batch norm on each device's shard of a batch, as the
frameworks do by default; --batch_norm=sync is for those that can, and measures kerasdp against itself without it (the
peer `replica-norm`). Virtual CPU devices share the cores: expect no gain from more of them. Run nothing else meanwhile.
"""

import kerasdp

if __name__ == "__main__":
    kerasdp.main(kerasdp.benchmark.compare, flags="benchmark")
