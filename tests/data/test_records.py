"""Records that libraries read by their numbers: once each, the same as arrays."""

import io

import grain
import numpy as np
import pytest
from array_record.python import array_record_module
from PIL import Image

import kerasdp
from kerasdp.data.sampling import Order
from kerasdp.errors import UserError

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


@pytest.mark.parametrize(
    "records, message",
    [
        (iter([]), "a list_iterator without __len__ or __getitem__"),
        ([], "an empty list"),
        ([(np.zeros(2), 0), (np.zeros(3), 1)], "input arrays must have the same shape; crop or pad them in `decode`"),
    ],
)
def test_what_cannot_be_samples(records, message):
    with pytest.raises(UserError) as caught:
        kerasdp.RecordSource(records).inputs(np.arange(2))
    assert message in str(caught.value)


def test_array_record_through_grain(tmp_path):
    """Several files with one number for each record."""
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
    source = kerasdp.RecordSource(records, decode)
    np.testing.assert_array_equal(source.inputs(indices), images[indices])
    np.testing.assert_array_equal(source.targets(indices)[0], indices)
