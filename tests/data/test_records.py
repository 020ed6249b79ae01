"""Records that libraries read by their numbers: once each, decoded here or in processes, the same as arrays."""

import io
import os
import pickle
import threading

import cloudpickle
import grain
import numpy as np
import pytest
from array_record.python import array_record_module
from PIL import Image

import kerasdp
from kerasdp.data.batch import SampleReader
from kerasdp.data.sampling import Order, Split
from kerasdp.errors import UserError, WorkerError

X, Y = np.arange(44).reshape(22, 2) / 7, np.arange(22)


class Rows:
    """As a map-style data set of torch; notes what was read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 22

    def __getitem__(self, index):
        self.read.append(index)
        return X[index], Y[index]


class ManyRows(Rows):
    def __getitem__(self, index):
        raise AssertionError

    def __getitems__(self, indices):
        self.read += indices
        return [(X[index], Y[index], 0.5) for index in indices]


@pytest.mark.parametrize("records, weight", [(Rows(), None), (ManyRows(), 0.5)], ids=["one", "several"])
def test_each_record_of_a_batch_is_read_once(records, weight):
    source = kerasdp.RecordSource(records)
    order = Order(num_samples=22, batch_size=7, seed=3)
    for indices in order.batches(0):
        targets, weights = source.targets(indices)
        np.testing.assert_array_equal(targets, Y[indices])
        inputs = source.inputs(np.append(indices, indices[-1:]))  # with padding
        np.testing.assert_array_equal(inputs[:-1], X[indices].astype("float32"))
        assert inputs.dtype == "float32" and (weights is None) == (weight is None)
    assert sorted(records.read) == list(range(22))


def test_a_run_that_resumes_reads_nothing_of_what_is_behind():
    records = Rows()
    reader = SampleReader(kerasdp.RecordSource(records), Order(num_samples=22, batch_size=7), Split(1), (0, 1))
    rest = [read() for read in reader.epoch(0, start=2)]
    assert records.read == np.concatenate([batch.indices for batch in rest]).tolist()
    assert len(records.read) == 22 - 2 * 7


def with_process():
    """A function that travels as its code: workers would need long to import this module, with Keras and Grain."""

    def decode(record):
        return {"process": os.getpid(), "x": record[0]}, record[1]

    return decode


@pytest.mark.parametrize("send", [False, True], ids=["made here", "sent to a rank"])
def test_processes_read_and_decode(send):
    source = kerasdp.RecordSource(Rows(), with_process(), num_workers=2)
    source = pickle.loads(cloudpickle.dumps(source)) if send else source
    indices = np.array([5, 0, 21, 5, 9])
    inputs, (targets, _) = source.inputs(indices), source.targets(indices)
    np.testing.assert_array_equal(inputs["x"], X[indices].astype("float32"))
    np.testing.assert_array_equal(targets, Y[indices])
    assert os.getpid() not in inputs["process"] and 1 <= len(set(inputs["process"])) <= 2


def test_several_threads_use_the_same_processes():
    source = kerasdp.RecordSource(Rows(), with_process(), num_workers=2)
    source.inputs(np.arange(1))
    order, found = Order(num_samples=22, batch_size=3), {}

    def read(number):
        found[number] = source.targets(order.batch(0, number))[0].tolist()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(order.num_batches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: batch.tolist() for number, batch in enumerate(order.batches(0))}


def test_reading_may_be_done_by_the_processes_too():
    class Squares:
        def __getitem__(self, index):
            return os.getpid(), index**2

    source = kerasdp.RecordSource(range(9), Squares().__getitem__, num_workers=1)
    np.testing.assert_array_equal(source.targets(np.array([3, 1]))[0], [9, 1])
    assert os.getpid() not in source.inputs(np.array([3, 1]))


def test_a_failing_decode_names_the_record():
    def decode(record):
        raise ValueError("no image")

    for num_workers in (0, 1):
        with pytest.raises(ValueError, match="no image") as caught:
            kerasdp.RecordSource(Rows(), decode, num_workers=num_workers).inputs(np.array([4]))
        assert caught.value.__notes__ == ["in decode, of record 4"]


def test_a_process_that_is_killed_ends_the_run():
    def decode(record):
        os._exit(3)

    with pytest.raises(WorkerError, match="terminated abruptly.*maybe for want of memory"):
        kerasdp.RecordSource(Rows(), decode, num_workers=1).inputs(np.array([4]))


@pytest.mark.parametrize(
    "records, message",
    [
        (iter([]), "a list_iterator without __len__ and __getitem__"),
        ([], "a list without any"),
        ([b"one", b"two"], "Received: |S3 in a sample; give `decode`"),
        ([(np.zeros(2), 0), (np.zeros(3), 1)], "all input arrays must have the same shape; let `decode` crop"),
    ],
)
def test_what_cannot_be_samples(records, message):
    with pytest.raises(UserError) as caught:
        kerasdp.RecordSource(records).inputs(np.arange(2))
    assert message in str(caught.value)


def test_processes_without_a_decode_or_that_cannot_have_it():
    with pytest.raises(UserError, match="num_workers: expected 0 without decode"):
        kerasdp.RecordSource(Rows(), num_workers=2)
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"decode: cannot be sent .*lock.*; use num_workers=0"):
        kerasdp.RecordSource(Rows(), lambda record: (lock, record), num_workers=2).inputs(np.array([4]))


def test_array_record_through_grain(tmp_path):
    """Several files with one number for each record, whose images are decoded in processes."""
    images = np.random.RandomState(0).randint(0, 256, (30, 5, 4)).astype("uint8")
    for shard in range(3):
        writer = array_record_module.ArrayRecordWriter(str(tmp_path / f"{shard}.array_record"), "group_size:1")
        for number in range(10 * shard, 10 * shard + 10):
            file = io.BytesIO()
            Image.fromarray(images[number]).save(file, "PNG")
            writer.write(bytes([number]) + file.getvalue())
        writer.close()

    def decode(record):
        return np.asarray(Image.open(io.BytesIO(record[1:]))), record[0]

    records = grain.sources.ArrayRecordDataSource(sorted(map(str, tmp_path.iterdir())))
    indices = np.random.RandomState(1).permutation(30)
    for num_workers in (0, 2):
        source = kerasdp.RecordSource(records, decode, num_workers=num_workers)
        np.testing.assert_array_equal(source.inputs(indices), images[indices])
        np.testing.assert_array_equal(source.targets(indices)[0], indices)
