"""The model of docs/contributing/scaling.md: its sums by hand, and what it hides."""

import sys

import numpy as np
import pytest

from tests.helpers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from scaling_model import BUCKET, CLUSTERS, NVLINK, Cluster, Counted, Link, least_batch, seconds_of_step  # noqa: E402

FLOPS = 1e12
LINK = Link(alpha=1e-5, beta=1e9)
MODEL = Counted(
    name="made", layer_bytes=np.full(8, 30e6), layer_flops=np.full(8, 2e9), gathered=8_000, num_gatherings=4
)


def test_sums_by_hand():
    """Eight devices: a large sum moves 2 x 7/8 of its bytes, after three rounds there and back; a small one, three."""
    assert LINK.all_reduce(8e9, 8) == pytest.approx(2 * 3 * 1e-5 + 2 * 7 / 8 * 8)
    assert LINK.all_reduce(10.0, 8) == pytest.approx(3 * (1e-5 + 1e-8))
    assert LINK.all_reduce(1e9, 1) == 0
    assert LINK.all_gather(1e6, 8) == pytest.approx(3 * 1e-5 + 7e-3)
    # In a ring of 3 the rounds are 4, of halving and doubling 2 x 2; the bytes are the same.
    assert LINK.all_reduce(3e9, 3) == pytest.approx(4 * 1e-5 + 4)


def test_hosts_sum_within_and_then_between():
    """16 GPUs: each host sums; then each adapter of a GPU sums an eighth with the other host's, or one adapter all."""
    within = NVLINK.all_reduce(8e9, 8)
    assert Cluster("", LINK, 8).all_reduce(8e9, 16) == pytest.approx(within + LINK.all_reduce(1e9, 2))
    assert Cluster("", LINK, 1).all_reduce(8e9, 16) == pytest.approx(within + LINK.all_reduce(8e9, 2))
    assert Cluster("", LINK, 1).all_reduce(8e9, 8) == within


def test_what_is_sent_hides_behind_the_backward_pass():
    compute, alone = seconds_of_step(MODEL, LINK, 1, 64, FLOPS, True)
    assert compute == alone == pytest.approx(3 * 16e9 * 64 / FLOPS)
    # Without a cost of sending nothing is added; at worst all is.
    assert seconds_of_step(MODEL, Link(0.0, np.inf), 64, 64, FLOPS, True)[1] == pytest.approx(compute)
    assert BUCKET < 30e6  # each layer is a bucket
    sending = 8 * LINK.all_reduce(30e6, 64)
    assert compute < seconds_of_step(MODEL, LINK, 64, 64, FLOPS, False)[1] < compute + sending
    # What is sent last, of the first layer, cannot hide; a batch that is large enough hides the rest.
    assert seconds_of_step(MODEL, LINK, 64, 4096, FLOPS, False)[1] == pytest.approx(
        64 * compute + LINK.all_reduce(30e6, 64)
    )
    # Layers wait for batch norm's statistics, which nothing hides.
    waits = 4 * LINK.all_gather(2_000, 64)
    assert seconds_of_step(MODEL, LINK, 64, 4096, FLOPS, True)[1] == pytest.approx(
        64 * compute + LINK.all_reduce(30e6, 64) + waits
    )


def test_the_least_batch():
    fast, slow = ([least_batch(MODEL, cluster, count, FLOPS, False) for count in (8, 1024)] for cluster in CLUSTERS)
    assert all(int(one) <= int(other) for one, other in zip(fast, slow, strict=True))
    assert least_batch(MODEL, Link(1e4, 1e9), 8, FLOPS, False) == "more"
