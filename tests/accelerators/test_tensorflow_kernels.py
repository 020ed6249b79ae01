"""On GPUs TensorFlow's steps stay on the device: by the kernels that the wheel brings, for the graphs of real runs."""

import pytest

from tests.helpers import PROGRAMS, result_of, run

pytestmark = pytest.mark.proof
# What is left, and why.
LEFT = {
    # The loss of float64, which is for telling round-off from mistakes.
    "float64": [["no kernel", "SparseSoftmaxCrossEntropyWithLogits"]],
}
ONE = ["convnet", "kept-several", "kept-tokens", "accumulate-float16"]
TWO = ["adam", "convnet", "clipnorm", "uneven", "uneven-replica", "bfloat16", "float64", "kept-tokens", "resnet50"]
TWO += ["accumulate-float16"]


def judged(count, *cases):
    found = result_of(run(PROGRAMS / "tensorflow_kernels.py", count, *cases, backend="tensorflow", timeout=1500))
    if found is None:
        pytest.skip("the wheel of TensorFlow has no kernels for GPUs")
    return found


def test_a_step_on_gpus_stays_on_the_device():
    """Two replicas, whose operations are not compiled, with all that has gone through the host before."""
    found = judged(2, "kept-several")
    case, faults = found["kept-several"], found["faults"]
    assert case["found"] == []
    assert case["num_roots"] == 3 and case["seen"]["Conv2D"] >= 6 and case["seen"]["CollectiveReduceV2"] >= 4
    assert case["seen"]["compiled call"] > 20
    # What the judge is for.
    assert faults == {
        "stack": [["no kernel", "Pack"]],
        "reshape": [["host memory", "Mul"], ["host memory", "Reshape"], ["the host waits", "StridedSlice of ArgMax"]],
        "cond": [["the host waits", "StatelessIf of All"]],
        "fine": [],
    }


@pytest.mark.parametrize(("count", "cases"), [(1, ONE), (2, TWO)])
def test_all_steps_stay_on_the_device(count, cases):
    found = judged(count, *cases)
    for case in cases:
        assert found[case]["found"] == (LEFT.get(case, []) if count == 2 else []), case
        compiled = sum(number for kind, number in found[case]["seen"].items() if kind == "compiled step")
        assert compiled == (found[case]["num_roots"] if count == 1 else 0)
        assert found[case]["num_roots"] >= 3


def test_what_gpus_cannot_sum_goes_in_a_wider_type():
    """NCCL takes no bfloat16 from TensorFlow."""
    found = result_of(run(PROGRAMS / "tensorflow_deterministic.py", "collectives", backend="tensorflow"))
    assert found["sent"] == {"bfloat16": "float32", "uint8": "int32", "bool": "int32", "float16": "float16",
                             "int64": "int64", "float64": "float64"}  # fmt: skip


def test_xla_is_told_to_be_deterministic(tmp_path):
    """Of each function that a run compiles, by the options that XLA writes down."""
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    found = result_of(run(PROGRAMS / "tensorflow_deterministic.py", "runs", XLA_FLAGS=flags))
    told = [path.read_text() for path in tmp_path.glob("*debug_options*")]
    assert len(told) > 5 and all("xla_gpu_deterministic_ops: true" in text for text in told)
    assert len(found["losses"]) == 3


@pytest.mark.parametrize("model", ["lenet", "convnet"])
@pytest.mark.parametrize("count", [1, 2])
def test_deterministic_kernels_teach_the_same(model, count):
    """In float64 to round-off: Keras' cross-entropy is then computed in another way."""
    found = result_of(run(PROGRAMS / "tensorflow_deterministic.py", "losses", model, count, backend="tensorflow"))
    usual, deterministic = found["usual"], found["deterministic"]
    assert len(usual) == 40 and usual[0] != usual[-1]
    assert max(abs(one - other) for one, other in zip(usual, deterministic, strict=True)) < 1e-13
