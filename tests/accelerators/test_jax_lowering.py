"""What jax is given for GPUs and TPUs: the real steps of training, lowered for them, and compiled where that can be.

The proofs compile with XLA's own compilers for four H100 and four TPU v5e; `programs/targets.py` says which wheels.
"""

import collections
import functools
import importlib.util
import json
import operator

import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run

pytestmark = [pytest.mark.proof, pytest.mark.skipif("jax" not in BACKENDS, reason="jax is not installed")]

DATA = {"model": "convnet", "strategy": "data", "optimizer": "adam"}
TENSOR = {"model": "gpt", "strategy": "tensor"}
MORE = [
    TENSOR,
    *({"model": name, "strategy": "data"} for name in ("mlp", "lenet", "resnet18", "gpt", "pooling", "lstm")),
    {"model": "convnet", "strategy": "data", "precision": "bfloat16"},
    {"model": "convnet", "strategy": "data", "batch_norm": "replica"},
    {"model": "convnet", "strategy": "tensor", "optimizer": "adam"},
    {"model": "pooling", "strategy": "data", "accumulate": 2},
]
# Nothing of the kit's own goes by way of a library or of the host: XLA chooses the libraries when it compiles.
KNOWN_CALLS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"}
# The wheels with the compilers.
COMPILERS = {"cuda": "jax_cuda13_plugin", "tpu": "libtpu"}


@functools.cache
def _lowered(text, is_for_others):
    options = {"JAX_PLATFORMS": "cpu"} if is_for_others else {"backend": "jax"}
    (found,) = result_of(run(PROGRAMS / "lower_jax.py", text, timeout=1500, **options))
    return found


def lowered(case, *platforms):
    """The programs of a case, compiled for CPUs and for these: their compilers are found when jax is imported."""
    return _lowered(json.dumps(case | {"compile": ["cpu", *platforms]}), bool(platforms))


def name_of(case):
    return "-".join(str(value) for value in case.values())


each = pytest.mark.parametrize("case", [DATA, *MORE], ids=name_of)


def platforms_of(found):
    for program in found["programs"]:
        assert set(program["platforms"]) == {"cuda", "tpu"}
        for platform, facts in program["platforms"].items():
            yield program["name"], platform, facts


@each
def test_nothing_but_arithmetic_in_the_precision_that_was_asked_for(case):
    seen = collections.Counter()
    for name, platform, facts in platforms_of(lowered(case)):
        place = (name, platform)
        assert "f64" not in facts["types"], place
        assert set(facts["calls"]) <= KNOWN_CALLS, place
        hosts = {"infeed", "outfeed", "send", "recv"} & {op.removeprefix("stablehlo.") for op in facts["ops"]}
        assert not hosts, place
        for product, count in facts["products"].items():
            seen[product.partition(" ")[2]] += count
    # bfloat16 is multiplied as fast with this, and there is nothing more exact for it.
    kind = "bf16" if case.get("precision") == "bfloat16" else "f32"
    assert set(seen) == {f"{kind} {kind}: HIGHEST HIGHEST"}


@each
def test_state_is_donated_and_split_as_planned(case):
    found = lowered(case)
    counts = found["model"]
    assert {"train_step"} <= {program["name"] for program in found["programs"]}
    for name, platform, facts in platforms_of(found):
        arguments, place = facts["arguments"], (name, platform)
        donated = [argument for argument in arguments if argument["donated"]]
        if name == "train_step":
            state = sum(counts[kind] for kind in ("num_trainable", "num_non_trainable", "num_slots", "num_metrics"))
            assert len(donated) == state, place
            batch = [argument["sharding"] for argument in arguments if not argument["donated"]]
            assert len(batch) == 2, place  # what does not matter for the weights, as the numbers of rows, is left out
            axis = "batch" if case["strategy"] == "data" else ""
            assert [axes[0] for axes in batch] == [axis] * 2, place
            assert not any(any(axes[1:]) for axes in batch), place
            split = [argument["sharding"] for argument in donated if any(argument["sharding"] or [])]
            if case["strategy"] == "data":
                assert not split, place
            else:
                assert all(axes[-1] == "model" and not any(axes[:-1]) for axes in split), place
                assert len(split) >= 2 * counts["num_trainable"], place  # each weight here divides, and its slot


def sent_by(found, platform="cpu", names=None):
    """Bytes of each kind of collective, and how many."""
    total = collections.Counter()
    for program in found["programs"]:
        if names is None or program["name"] in names:
            for kind, (count, size) in program["compiled"][platform]["sent"].items():
                total[kind] += size
                total[f"{kind}s"] += count
    return total


def most_for_data(case, model):
    """The gradients and loss and metric; of batch norm two sums forwards, and three backwards that no weight gets."""
    channels = {"convnet": 68}.get(case["model"], 0)
    return {"all-reduce": model["gradients"] + 8 + 5 * 4 * channels, "all-gather": 0}


@pytest.mark.parametrize(
    "case",
    [DATA, *(case for case in MORE
             if case["strategy"] == "data" and case["model"] in ("mlp", "lenet", "gpt", "pooling", "lstm")
             and "accumulate" not in case)],
    ids=name_of,
)  # fmt: skip
def test_devices_send_the_gradients_and_little_else(case):
    found = lowered(case)
    sent, most = sent_by(found), most_for_data(case, found["model"])
    print(name_of(case), dict(sent), most)
    assert set(sent) <= {"all-reduce", "all-reduces", "all-gather", "all-gathers"}
    assert sent["all-reduce"] == most["all-reduce"] and sent["all-gather"] == most["all-gather"]


def test_with_cut_weights_devices_send_activations():
    found = lowered(TENSOR)
    sent = sent_by(found)
    whole = sum(found["model"]["activations"])
    print(name_of(TENSOR), dict(sent), whole)
    # Each layer's outputs once forwards and once backwards; a weight is never sent.
    assert whole / 2 < sent["all-gather"] + sent["all-reduce"] < 2 * whole


compilers = pytest.mark.parametrize("platform", [
    pytest.param(name, marks=pytest.mark.skipif(
        importlib.util.find_spec(wheel) is None, reason=f"{wheel} is not installed (tests/programs/targets.py)",
    )) for name, wheel in COMPILERS.items()
])  # fmt: skip
COMPILED = [
    DATA, {"model": "gpt", "strategy": "data"}, TENSOR,
    *({"model": "lstm", "strategy": "data", "precision": precision} for precision in ("float32", "bfloat16")),
]  # fmt: skip


@compilers
@pytest.mark.parametrize("case", COMPILED, ids=name_of)
def test_compilers_of_gpus_and_tpus_send_as_much(case, platform):
    found = lowered(case, platform)
    here, there = sent_by(found), sent_by(found, platform)
    print(name_of(case), platform, dict(here), dict(there))
    if case["strategy"] == "data":
        if case.get("precision") == "bfloat16":  # which XLA sends as float32 on CPUs, and some of it on TPUs
            assert there["all-reduce"] <= here["all-reduce"]
        else:
            assert there["all-reduce"] == here["all-reduce"]
        assert set(there) == set(here)
    for program in found["programs"]:
        step, on_cpu = program["compiled"][platform], program["compiled"]["cpu"]
        # What is updated where it is: as on the CPU, but for a counter; and more on TPUs, which pad.
        assert step["aliased"] >= on_cpu["aliased"] - 4, program["name"]
        assert not any("callback" in call for call in step["algorithms"])


@pytest.mark.skipif(importlib.util.find_spec(COMPILERS["cuda"]) is None, reason=f"{COMPILERS['cuda']} is not installed")
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_gpus_that_hold_parts_scatter_the_gradients(shard):
    """Each gets the sum of its part, and gives all others its new weights; weights in parts are gathered twice.

    XLA's compilers for CPUs, and for TPUs where there is little (jaxlib 0.10.2), sum all, and take a part.
    """
    case = DATA | {"shard": shard}
    found = lowered(case, "cuda")
    sent, most = sent_by(found, "cuda"), most_for_data(case, found["model"])
    print(name_of(case), dict(sent), most)
    whole = most["all-reduce"] - sent["all-reduce"]  # bytes of what is cut
    assert 0 < sent["all-reduce"] < 0.03 * most["all-reduce"] and sent["reduce-scatter"] == whole / 4
    assert sent["all-gather"] - most["all-gather"] == (2 if shard == "weights" else 1) * whole


@compilers
def test_deterministic_steps_compile(platform):
    """Gradients of max pooling and of embeddings scatter, which XLA refuses where it has no deterministic way."""
    flags = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
    cases = [{"model": name, "strategy": "data", "platforms": [], "compile": [platform]} for name in ("pooling", "gpt")]
    done = run(PROGRAMS / "lower_jax.py", *map(json.dumps, cases), timeout=600, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    sent = [sent_by(found, platform)["all-reduce"] for found in result_of(done)]
    assert all(map(operator.gt, sent, [17_000, 17_000]))
