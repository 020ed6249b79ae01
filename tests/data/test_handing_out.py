"""Batches that come ready-made, where one rank reads them and hands them out."""

import queue
import threading
import time

import keras
import numpy as np
import pytest

from kerasdp.data.batch import Feed
from kerasdp.data.batch_reader import IndexedReader
from kerasdp.data.sampling import Split
from kerasdp.data.streams import StreamReader
from kerasdp.errors import WorkerError
from kerasdp.run_state import RunState

X, Y = np.arange(44).reshape(22, 2), np.arange(22)


def batches(count=5):
    return ((X[first : first + 4], Y[first : first + 4]) for first in range(0, 4 * count, 4))


class Scatter:
    """Queues between threads, for each rank and number."""

    num_processes = 3

    def __init__(self, rank, queues):
        self.rank, self.queues = rank, queues

    def __call__(self, values, number):
        if self.rank == 0:
            for rank in range(1, 3):
                self.queues[rank].setdefault(number, queue.Queue()).put(values[rank])
            return values[0]
        time.sleep(0.05 if self.rank == 2 else 0)  # it has not read all that it asked for when an epoch is left
        return self.queues[self.rank].setdefault(number, queue.Queue()).get(timeout=20)


def in_each_rank(work):
    """Runs `work(scatter, rank)` as three ranks; returns what each gave, or raised."""
    queues, found = [{} for _ in range(3)], [None] * 3

    def run(rank):
        try:
            found[rank] = work(Scatter(rank, queues), rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("is_indexed", [False, True])
def test_one_process_reads_and_all_train(is_indexed):
    opened = []

    class Indexed(keras.utils.PyDataset):
        """Its second epoch has other targets."""

        epochs = 0

        def __len__(self):
            return 6

        def __getitem__(self, index):
            opened.append(index)
            return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4] + 100 * (self.epochs > 1)

        def on_epoch_begin(self):
            self.epochs += 1

    def generator(rank):
        opened.append(rank)
        yield from batches(6)

    def work(scatter, rank):
        place = Split(3, (rank, 3))
        if is_indexed:
            reader = IndexedReader(Indexed(workers=2), place, scatter=scatter)
        else:
            reader = StreamReader(generator(rank), place, scatter=scatter)
        reader.first()
        rows = reader.sample(5)
        feed = Feed(reader, lambda batch: batch, RunState())
        iterator = iter(feed)
        stopped = [next(iterator) for _ in range(2)]
        feed.close()  # four have been read by then
        return rows, stopped + (list(feed) if is_indexed else [])

    found = in_each_rank(work)
    for rows, _ in found:
        assert rows[1].tolist() == [0, 1, 2, 3, 0]
    for place, parts in enumerate(zip(*(read for _, read in found), strict=True)):
        number = place - 2 if is_indexed and place > 1 else place
        expected = X[4 * number : 4 * number + 4]
        assert np.concatenate([part.inputs for part in parts])[: len(expected)].tolist() == expected.tolist()
        targets = Y[4 * number : 4 * number + 4] + 100 * (place > 1 and is_indexed)
        joined = np.concatenate([part.targets for part in parts])
        assert joined[: len(targets)].tolist() == targets.tolist()
    assert sorted(set(opened)) == (list(range(6)) if is_indexed else [0])


def test_what_goes_wrong_where_it_is_read_ends_all():
    def generator():
        yield next(batches())
        raise OSError("the disk is gone")

    def work(scatter, rank):
        reader = StreamReader(generator(), Split(3, (rank, 3)), scatter=scatter)
        return list(Feed(reader, lambda batch: batch, RunState()))

    found = in_each_rank(work)
    assert isinstance(found[0], OSError)
    assert all(isinstance(error, WorkerError) and "the disk is gone" in str(error) for error in found[1:])


def test_the_end_is_that_of_the_process_that_reads():
    def work(scatter, rank):
        reader = StreamReader(batches(5 - rank), Split(3, (rank, 3)), scatter=scatter)
        return len(list(Feed(reader, lambda batch: batch, RunState())))

    assert in_each_rank(work) == [5, 5, 5]
