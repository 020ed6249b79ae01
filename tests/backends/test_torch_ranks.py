"""What ranks of torch exchange: small messages through sockets, gradients in buckets, batches that one reads."""

import os

import pytest

from tests import helpers

pytestmark = pytest.mark.skipif("torch" not in helpers.BACKENDS, reason="only torch has a process a device")


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def results(request):
    """What a rank has; a message may arrive on one and not on the other."""
    return helpers.results("torch_ranks.py", "torch")[request.param]


@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16", "bool"])
def test_sockets_gather_what_gloo_gathers(results, dtype):
    takes, is_same, is_of_dtype, shape = results["gathered"][f"torch.{dtype}"]
    assert takes and is_same and is_of_dtype and shape == [2, 3, 2]


def test_sockets_take_small_messages_only(results):
    assert results["gathered"]["large"] == [True, [0.0, 1.0]]
    assert not results["gathered"]["too large"]
    assert not results["gathered"]["empty"]


@pytest.mark.parametrize("case", ["one bucket", "many buckets", "nothing shared"])
def test_gradients_are_averaged(results, case):
    """Of inputs (1, 2, 4) and three times these."""
    found = results["buckets"][case]
    assert found["gradients"] == [[2.0, 4.0, 8.0], [[4.0, 8.0, 16.0]] * 2, [2.0], None]
    assert found["shared"] == (None if case == "nothing shared" else [3.0, 30.0])
    assert (found["exchanges"] > 1) == (case == "many buckets")
    assert found["is freed"]


def test_nothing_is_taken_from_a_program_that_does_not_know_the_key(results):
    size, text = results["keys"]
    assert size == 2 and text.startswith("another program has connected to rank ")


def test_statistics_have_a_group_of_their_own_on_gpus(results):
    """So that they do not come after the gradients; the losses are the same."""
    (losses, *others), (same_losses, *own) = results["statistics"]
    assert others == [1, True, False] and own == [1, True, True]
    assert losses == same_losses


def test_values_are_handed_out_as_they_were_when_given(results):
    """A generator may fill its arrays again for its next batch, while this one is under way."""
    assert {name: sum(are_right) for name, are_right in results["scattered"].items()} == dict.fromkeys(
        ["nothing", "an error", "arrays", "strings", "many arrays", "a large array", "a large text"], 8
    )


def test_ranks_share_the_cores_when_they_compile(results):
    assert results["processes that compile"] == max(1, os.cpu_count() // 2)
