"""`kerasdp.all_rows`, where no other device is needed; `training/test_own_steps.py` has the others."""

import numpy as np
import pytest

import kerasdp
from kerasdp.same.replica_context import ReplicaContext, use

ROWS = np.arange(6.0).reshape(3, 2)


def context(**options):
    return ReplicaContext(num_replicas=2, rows=3, num_rows=3, total_rows=6, gather=lambda own: own[None], **options)


def test_nothing_to_gather():
    """Outside of a step, and with jax, whose layers see the whole batch."""
    assert kerasdp.all_rows(ROWS) is ROWS
    with use(ReplicaContext(num_replicas=4)):
        assert kerasdp.all_rows(ROWS) is ROWS


@pytest.mark.parametrize("wrong", [ROWS.T, np.concatenate([ROWS, ROWS]), np.float32(1)])
def test_axis_0_is_not_the_samples(wrong):
    words = "expected a tensor with one entry on axis 0 for each of the 3 samples of this device"
    with use(context()), pytest.raises(kerasdp.UserError, match=words):
        kerasdp.all_rows(wrong)


def test_micro_batches():
    with use(context(is_micro_batch=True)), pytest.raises(kerasdp.UserError, match="not available with micro-batches"):
        kerasdp.all_rows(ROWS)
