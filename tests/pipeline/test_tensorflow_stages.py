"""The promise: on TensorFlow a stage is built once, and does what its schedule says, in this order."""

import pytest

from kerasdp.pipeline.plan import actions
from tests.helpers import BACKENDS, PROGRAMS, result_of, run

pytestmark = pytest.mark.skipif("tensorflow" not in BACKENDS, reason="of TensorFlow's pipelines")


@pytest.mark.proof
def test_stages_are_built_once_and_work_in_the_order_of_their_schedule():
    two, six, one_by_one, frozen = result_of(run(PROGRAMS / "tensorflow_stages.py", backend="tensorflow"))
    assert two["calls"] == six["calls"] == one_by_one["calls"]  # by micro-batch: three times as many
    for result, count in ((two, 2), (six, 6), (one_by_one, 6)):
        expected = [
            [list(action) for action in actions(result["pipeline_schedule"], stage, 2, count)] for stage in range(2)
        ]
        assert result["orders"] == expected
    # A gradient for each micro-batch of two steps; none of a weight that is not trained.
    assert (six["gradients"], frozen["gradients"]) == (12, 0)


@pytest.mark.proof
def test_resnet50_in_12_micro_batches_is_built_in_a_minute():
    result = result_of(run(PROGRAMS / "tensorflow_stages.py", "resnet50"))
    first, second = result["seconds"]
    print(f"ResNet-50, 32x32, 12 micro-batches: {first:.0f} s for the first step, {second:.1f} s for the next, "
          f"{result['bytes'] / 2**30:.1f} GiB")  # fmt: skip
    assert first < 60
    assert result["bytes"] < 2 * 2**30
