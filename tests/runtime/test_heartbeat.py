"""Who hangs, by what the ranks wrote down."""

import os
import time

import pytest

from kerasdp.runtime import heartbeat


@pytest.fixture
def write(tmp_path):
    def write(rank, place, seconds_ago, silent_for=0.0, where=None):
        now = time.monotonic()
        record = heartbeat._RECORD.pack(1000 + rank, place, now - seconds_ago, now - silent_for)
        (tmp_path / f"rank-{rank}").write_bytes(record)
        if where:
            (tmp_path / f"rank-{rank}.where").write_text(where)

    return write


def find(tmp_path):
    return heartbeat.find_hanging(str(tmp_path), 10)


def test_nothing_to_see(tmp_path, write):
    assert find(tmp_path) is None
    heartbeat.Heartbeat(str(tmp_path), 0)
    assert find(tmp_path) is None
    write(0, -1, 100)  # has not trained yet, or has ended
    assert find(tmp_path) is None


def test_one_that_moves_is_enough(tmp_path, write):
    write(0, 8, 100)
    write(1, 9, 1)
    assert find(tmp_path) is None


def test_a_process_that_is_stopped(tmp_path, write):
    write(0, 8, 20)
    write(1, 8, 20, silent_for=19)
    assert find(tmp_path) == (
        "rank 1 hangs in step 5 (its process is stopped): nothing moved for 10 s", [1000, 1001]
    )  # fmt: skip


def test_a_rank_that_is_behind(tmp_path, write):
    """It is still between two steps (in a callback, or at its data), while the other one waits in the next step."""
    write(0, 10, 20, where="site-packages/torch/distributed.py:3, in all_reduce")
    write(1, 9, 21, where="mine.py:7, in load")
    assert find(tmp_path)[0].startswith("rank 1 hangs in step 6 (at mine.py:7, in load)")


def test_a_rank_that_is_busy_elsewhere(tmp_path, write):
    """All are in the same step; one is in code of the user's, the others wait for it in the framework's."""
    package = os.path.dirname(pytest.__file__).removesuffix("/pytest")
    write(0, 10, 20, where=f"{package}/torch/autograd/graph.py:3, in backward")
    write(1, 10, 20, where="mine.py:7, in call")
    assert find(tmp_path)[0].startswith("rank 1 hangs in step 6 (at mine.py:7, in call)")


def test_a_real_one_says_where_it_is(tmp_path):
    beating = heartbeat.Heartbeat(str(tmp_path), 0)
    assert heartbeat.find_hanging(str(tmp_path), 0.1) is None
    beating.beat(4, False)
    time.sleep(1.7)
    text, processes = heartbeat.find_hanging(str(tmp_path), 1)
    assert processes == [os.getpid()]
    assert text.startswith(f"rank 0 hangs in step 5 (at {__file__}:")
    beating.rest()
    assert heartbeat.find_hanging(str(tmp_path), 0) is None
