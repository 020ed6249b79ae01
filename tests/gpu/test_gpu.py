"""The promises on GPUs and TPUs: `python -m pytest -m gpu --junitxml=gpu-report.xml`, whose file has what is found."""

import json
import os

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3600)]

each_backend = pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
each_count = pytest.mark.parametrize("count", [1, 2, 4, 8])
SHORT = (
    "--epochs=9", "--max_steps=40", "--batch_size=64", "--optimizer=sgd(learning_rate=0.01, momentum=0.9)",
    "--precision=float32",
)  # fmt: skip
# Steps whose losses are compared with those on the CPU, and how far they may be apart. In float32 a ReLU near zero may
# fall on the other side, after which losses part by luck (seen between virtual CPU devices: 3e-4 from the 20th step).
FARTHEST = {
    ("lenet", "float64"): (40, 1e-9),
    ("convnet", "float64"): (40, 1e-9),
    ("lenet", "float32"): (40, 1e-5),
    ("convnet", "float32"): (10, 1e-4),
}


def apart(expected, received):
    assert len(expected) == len(received) > 0
    return float(np.abs(np.subtract(expected, received)).max())


def compiled(backend, choice="on"):
    """What asks for compiled steps: torch alone has such a flag."""
    return [f"--compile={choice}"] if backend == "torch" else []


@each_backend
@each_count
def test_the_default_command(machine, backend, count, record_property):
    machine.need(backend, count)
    done = machine.train(backend, count)
    record_property("test accuracy", round(done.report["final"]["val_accuracy"], 4))
    record_property("seconds an epoch", round(done.report["seconds_per_epoch"], 3))
    record_property("bytes", done.report["peak_memory_bytes"])
    assert done.report["final"]["val_accuracy"] > 0.96
    assert done.report["num_devices"] == count


@each_backend
@each_count
@pytest.mark.parametrize(("model", "precision"), FARTHEST)
def test_losses_are_those_on_the_cpu(machine, backend, count, model, precision, record_property):
    machine.need(backend, count)
    flags = (*SHORT, f"--model={model}", f"--precision={precision}")
    expected = machine.train_on_cpu(backend, *flags, *compiled(backend, "off"))
    received = machine.train(backend, count, *flags, *compiled(backend))
    steps, farthest = FARTHEST[model, precision]
    record_property("apart in 40 steps", f"{apart(expected.losses, received.losses):.1e}")
    record_property(f"in {steps}", f"{apart(expected.losses[:steps], received.losses[:steps]):.1e}")
    assert apart(expected.losses[:steps], received.losses[:steps]) < farthest


@each_backend
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_learns(machine, backend, precision, record_property):
    machine.need(backend)
    done = machine.train(backend, 1, f"--precision={precision}", *compiled(backend))
    record_property("test accuracy", round(done.report["final"]["val_accuracy"], 4))
    assert done.report["final"]["val_accuracy"] > 0.95


@each_backend
@each_count
@pytest.mark.parametrize("model", ["lenet", "convnet"])
@pytest.mark.parametrize("choice", ["on", "off"])
def test_no_step_waits_for_the_device(machine, backend, count, model, choice):
    machine.need(backend, count)
    if choice == "off" and backend != "torch":
        pytest.skip(f"{backend}'s steps are compiled as the model says")
    settings = {"compile": choice} if backend == "torch" else {}
    program = [PROGRAMS / "gpu_waits.py", backend, count, machine.device, model, json.dumps(settings)]
    assert result_of(run(*program, timeout=900))["steps"] == 40


def test_no_stage_waits_for_the_device(machine):
    machine.need("torch", 2)
    settings = {"strategy": "pipeline"}
    program = [PROGRAMS / "gpu_waits.py", "torch", 2, machine.device, "lenet", json.dumps(settings)]
    assert result_of(run(*program, timeout=900))["steps"] == 40


@pytest.mark.parametrize(("count", "choice"), [(1, "on"), (2, "cudagraphs")])
def test_a_step_of_torch_is_one_cuda_graph(machine, count, choice):
    machine.need("torch", count)
    machine.need_gpu("a CUDA graph")
    flags = (*SHORT, "--model=convnet")
    expected = machine.train("torch", count, *flags, "--compile=off")
    received = machine.train("torch", count, *flags, f"--compile={choice}", TORCH_LOGS="cudagraphs,perf_hints")
    assert "skipping cudagraphs" not in received.errors
    assert "ecording" in received.errors  # torch's word for making a CUDA graph
    steps, farthest = FARTHEST["convnet", "float32"]
    assert apart(expected.losses[:steps], received.losses[:steps]) < farthest


@each_backend
@each_count
def test_clipping_by_the_global_norm(machine, backend, count):
    machine.need(backend, count)
    flags = [*SHORT[:3], "--model=convnet", "--precision=float64"]
    flags.append("--optimizer=sgd(learning_rate=0.01, momentum=0.9, global_clipnorm=0.5)")
    expected = machine.train_on_cpu(backend, *flags, *compiled(backend, "off"))
    assert apart(expected.losses, machine.train(backend, count, *flags, *compiled(backend)).losses) < 1e-9


@each_backend
@pytest.mark.parametrize("count", [1, 2])
def test_resumed_twice_with_emptied_caches_it_is_bit_equal(machine, backend, count, tmp_path):
    """What was compiled and tuned before is not there: each part of the run has a home folder of its own."""
    machine.need(backend, count)
    flags = ["--epochs=9", "--model=convnet", "--deterministic", "--checkpoint_every=20", *compiled(backend)]
    whole = machine.train(backend, count, *flags, "--max_steps=60", **caches_in(tmp_path / "whole"))
    for part, steps in enumerate((20, 40, 60)):
        again = ["--resume"] if part else []
        received = machine.train(
            backend, count, *flags, f"--max_steps={steps}", *again,
            workdir=tmp_path / "run", **caches_in(tmp_path / f"part-{part}"),
        )  # fmt: skip
    assert len(received.losses) == 60
    assert (received.losses == whole.losses).all()


def caches_in(folder):
    """Where the frameworks keep what they have compiled or measured."""
    names = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    for name in names:
        os.makedirs(folder / name)
    return {name: str(folder / name) for name in names} | {"JAX_COMPILATION_CACHE_DIR": str(folder / "jax")}


@each_backend
@pytest.mark.parametrize(
    ("count", "flags"),
    [
        (1, ("--accumulate=4",)),
        (2, ("--strategy=pipeline",)),
        (2, ("--strategy=tensor",)),
    ],
    ids=["accumulate", "pipeline", "tensor"],
)
def test_a_model_or_a_batch_in_parts(machine, backend, count, flags, record_property):
    machine.need(backend, count)
    if "--strategy=tensor" in flags and backend != "jax":
        pytest.skip("--strategy=tensor is there on jax alone")
    if "--strategy=pipeline" in flags and backend != "torch":
        pytest.skip("--strategy=pipeline is there on torch alone")
    known = (*SHORT, "--model=lenet", "--precision=float64")
    expected = machine.train_on_cpu(backend, *known)
    received = machine.train(backend, count, *known, *flags)
    record_property("bytes", received.report["peak_memory_bytes"])
    assert apart(expected.losses, received.losses) < 1e-9


@pytest.mark.parametrize("model", ["convnet", "resnet18"])
@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16"])
def test_benchmark(machine, model, precision, tmp_path, record_property):
    """Speed beside the hand-written loops; nothing is asserted of it, since machines differ."""
    backends = [backend for backend in BACKENDS if machine.is_rehearsal or has_devices(machine, backend)]
    if not backends:
        pytest.skip("no framework sees a GPU or TPU")
    small = ["--batch_size=8", "--steps_per_round=1", "--rounds=1"] if machine.is_rehearsal else ["--batch_size=256"]
    done = run(
        "benchmarks/compare.py", f"--model={model}", f"--backends={','.join(backends)}", "--device_counts=1",
        f"--precision={precision}", f"--device={machine.device}", f"--workdir={tmp_path}", *small, timeout=3400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for line in (line for line in done.stdout.splitlines() if "images" in line or "kerasdp" in line):
        record_property("", line.strip())
    assert (tmp_path / "benchmark.json").exists()


def has_devices(machine, backend):
    try:
        machine.need(backend)
    except pytest.skip.Exception:
        return False
    return True
