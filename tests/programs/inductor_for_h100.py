"""Lets Inductor write the kernels of compiled steps for an H100, and prints what they do; none is compiled or runs.

python inductor_for_h100.py CASES: a JSON list of cases; each holds fields of kerasdp.Config, and
    image: shape of an image, [28, 28, 1] if it is left out
    num_devices: if there are several, what rank 0 of them computes, for which `check` is to be off

Needs the triton of this torch, in the environment or in a folder of PYTHONPATH. Leans on private names of torch 2.13.
"""

import functools
import json
import os
import re
import sys
import tempfile
import types

import capture_for_cuda
import numpy as np

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Which of two ways was the faster is kept elsewhere, whatever is disabled.
folder = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name

import torch  # noqa: E402
import torch._dynamo.device_interface  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
import torch._inductor.runtime.hints  # noqa: E402
import triton  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.runtime import benchmarking  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import kerasdp  # noqa: E402
from kerasdp.backends.torch.train_step import RankSteps  # noqa: E402

H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
)


class Driver:
    """What triton asks of a GPU's driver before it compiles anything."""

    utils = types.SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": H100.shared_memory_per_block_optin}
    )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda

    def is_active(self):
        return True


def pretend():
    """Lets torch and triton find an H100."""
    interface = torch._dynamo.device_interface.CudaInterface
    answers = {
        "get_device_properties": H100,
        "get_device_capability": (9, 0),
        "get_device_name": H100.name,
        "mem_get_info": (70 << 30, 80 << 30),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
        "_is_compiled": True,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name, answer in {
        "get_device_properties": H100, "get_compute_capability": 90, "is_available": True, "get_raw_stream": 0,
        "synchronize": None,
    }.items():  # fmt: skip
        setattr(interface, name, staticmethod(lambda *_, answer=answer, **__: answer))
    interface.Worker.get_device_properties = staticmethod(lambda *_, **__: H100)
    triton.runtime.driver.set_active(Driver())


class Timed:
    """Counts what Inductor would have timed on the GPU, to choose between ways to compute."""

    def __init__(self):
        self.number = 0
        for kind in (benchmarking.TritonBenchmarker, benchmarking.InductorBenchmarker):
            kind.benchmark = kind.benchmark_gpu = self.benchmark

    def benchmark(self, *_, **__):
        self.number += 1
        return 1.0


def counts(code, num_timed, mutated):
    """What a program of Inductor's does; `mutated`: its inputs that it changes, and that are not where they were."""
    step = code.partition("\ndef get_args")[0]  # what follows is for measuring it
    return {
        "timed": num_timed,
        "mutated elsewhere": mutated,
        "inputs": len(set(re.findall(r"\barg\d+_1\b", step))),
        "triton kernels": len(set(re.findall(r"^(triton_\w+) =", step, re.M))),
        "kernels on the CPU": len(re.findall(r"^cpp_\w+ =", step, re.M)),
        "partitions": len(re.findall(r"^def partition_\d+", step, re.M)),
        "collectives": len(re.findall(r"^ *buf\d+ = torch\.ops\._c10d_functional\.all_", step, re.M)),
        "kernels run": len(re.findall(r"^ *triton_\w+\.run\(", step, re.M)),
        "library calls": len(re.findall(r"^ *(?:buf\d+ = )?(?:extern_kernels|torch\.ops\.aten)\.\w+", step, re.M)),
        "waits": len(re.findall(r"\.copy_\(.*, False\)|\.item\(\)|empty_strided_cpu\w*\(", step)),
        "deterministic": sorted(set(re.findall(r"'deterministic': (\w+)", step))),
    }


def train(image, found, runner):
    """A step, an evaluated and a predicted batch, compiled as far as that goes and then trained without."""
    import keras

    x = np.random.RandomState(0).randint(0, 256, (64, *image)).astype("uint8")
    with runner.scope():
        model = kerasdp.build_model(runner.config, image, 10)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(kerasdp.make_optimizer(runner.config), loss, metrics=["accuracy"])

    timed, static = Timed(), set()
    compiler = torch._inductor.compile_fx._InProcessFxCompile
    codegen = compiler.codegen_and_compile

    def noting(self, gm, example_inputs, inputs_to_check, graph_kwargs):
        static.clear()
        static.update(graph_kwargs["static_input_idxs"])
        return codegen(self, gm, example_inputs, inputs_to_check, graph_kwargs)

    def written(graph):
        code = graph.codegen()[0]
        mutated = len({*graph.mutated_input_idxs} - static)
        found.append(counts(code if isinstance(code, str) else code.value, timed.number, mutated))
        timed.number = 0
        raise RuntimeError("no kernel is compiled here")

    compiler.codegen_and_compile, GraphLowering.compile_to_module = noting, written
    runner.fit(model, x, np.arange(64) % 10, batch_size=64)
    runner.predict(model, x, batch_size=64)


def main():
    pretend()
    results = []
    for case in json.loads(sys.argv[1]):
        steps, image = [], tuple(case.pop("image", (28, 28, 1)))
        work = functools.partial(train, image, steps)
        if case.setdefault("num_devices", 1) > 1:
            capture_for_cuda.be_first_of(case["num_devices"])
            torch.cuda.get_device_properties = lambda *_: H100
            RankSteps.distributed = lambda steps, _: steps.model  # which the others would have to join
        kerasdp.launch(work, backend="torch", device="gpu", verbose=0, **({"compile": "on"} | case))
        results.append(steps)
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
