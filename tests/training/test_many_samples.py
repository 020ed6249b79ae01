"""A thousand million samples cost no memory and no time before the first batch, also where a run resumes."""

import json
import resource
import time

import keras
import numpy as np

import kerasdp
from kerasdp.checkpoint import files
from kerasdp.data.sampling import Order

MANY, BATCH, STEPS = 10**9, 64, 3
ORDER = Order(num_samples=MANY, batch_size=BATCH)


class Computed:
    """Rows that are a function of their number."""

    num_samples, num_threads = MANY, 2

    def __init__(self):
        self.read = []

    def inputs(self, indices):
        self.read += indices.tolist()
        return np.sin(indices[:, None] * np.arange(1.0, 5.0)).astype("float32")

    def targets(self, indices):
        return (indices[:, None] % 7).astype("float32"), None


def train(runner):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = Computed()
    runner.fit(model, data, epochs=2, validation_data=Computed(), validation_steps=2, verbose=0)
    return data.read


def move_to_the_middle(workdir):
    """Lets the newest checkpoint be one of the middle of the epoch; returns the step."""
    path, saved = files.load_newest(str(workdir / "checkpoints"), print)
    middle = ORDER.num_batches // 2
    state = {**saved.state, "batch": middle, "step": middle}
    files.save(files.path_of(str(workdir / "checkpoints"), middle), files.Checkpoint(arrays=saved.arrays, state=state))
    return middle


def peak():
    """The most memory that this process ever had, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_run_begins_and_resumes_at_once(tmp_path):
    """An order of so many samples would take 8 GB, and what is read alone a minute."""
    fields = {"backend": keras.backend.backend(), "device": "cpu", "num_devices": 1, "batch_size": BATCH, "verbose": 0}
    fields |= {"workdir": str(tmp_path), "log_every": 1, "checkpoint_every": "1"}
    before = peak()
    for resumes in (False, True):
        begin, middle = time.perf_counter(), move_to_the_middle(tmp_path) if resumes else 0
        read = kerasdp.launch(train, **fields, max_steps=middle + STEPS, resume=resumes)
        assert set(np.concatenate([ORDER.batch(0, middle + step) for step in range(STEPS)])) <= set(read)
        assert len(read) < 30 * BATCH  # it reads ahead
        assert time.perf_counter() - begin < 60 and peak() - before < 2**20
    lines = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, middle + 1, middle + 2, middle + 3]
