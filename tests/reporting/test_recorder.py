"""What a run records: lines, rows, and the first loss that is not a number."""

import json
import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from kerasdp.config import Config
from kerasdp.errors import NonFiniteLossError
from kerasdp.reporting import recorder as recorder_module
from kerasdp.reporting.recorder import Progress, Recorder
from kerasdp.run_state import Position, RunState
from tests.helpers import steps_in
from tests.reporting.test_report import facts


def recorder_for(folder, log_every=2, resume=None, **fit):
    config = Config(backend=keras.backend.backend(), workdir=str(folder), log_every=log_every)
    state = RunState()
    state.begin_fit(**({"batch_size": 4, "num_batches": 5, "epochs": 2} | fit))
    strategy = SimpleNamespace(peak_memory_bytes=lambda: 7)
    recorder = Recorder(state, facts(folder, config=config), strategy, folder=str(folder))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.25), "mse")
    recorder.set_model(model)
    if resume:
        state.resume(**resume)
    state.begin_epoch(0)
    recorder.on_epoch_begin(0)
    return state, recorder


def call(state, recorder, *losses):
    """A call of the step function, of one or several steps."""
    for loss in losses:
        state.after_step(loss, np.arange(4), {}, 0.5)
    recorder.on_train_batch_end(0)


class Device:
    """A clock, and a device that takes a second for a step: the host waits for each, or runs ahead until it asks."""

    def __init__(self, runs_ahead):
        self.runs_ahead = runs_ahead
        self.now = self.free_at = 0.0

    def steps(self, number):
        """The losses of a call of so many steps."""
        self.free_at = max(self.free_at, self.now) + number
        if not self.runs_ahead:
            self.now = self.free_at
        return [Loss(self, self.free_at) for _ in range(number)]


class Loss:
    """Of a step, over at a certain time."""

    def __init__(self, device, ready_at):
        self.device, self.ready_at = device, ready_at

    def is_ready(self):
        return self.ready_at <= self.device.now

    def __float__(self):
        self.device.now = max(self.device.now, self.ready_at)
        return 1.0


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(
    ("log_every", "calls", "resumed"),
    [
        (1, [1, 1, 1, 1, 1], 0),
        (2, [1, 1, 1, 1, 1], 0),  # ends between two lines
        (1, [3, 2], 0),
        (2, [3, 1], 0),
        (1, [1, 1], 3),
        (1, [2], 3),
    ],
)
def test_each_line_has_the_speed_of_its_steps(runs_ahead, log_every, calls, resumed, tmp_path, monkeypatch):
    """Four images a step and a second: at both ends of an epoch, for one step or several a call, after a resume."""
    device = Device(runs_ahead)
    monkeypatch.setattr(recorder_module.time, "perf_counter", lambda: device.now)
    measured = {"images": 4 * resumed, "seconds": 99.0}
    resume = {"step": resumed, "position": Position(0, resumed), "measured": measured}
    state, recorder = recorder_for(tmp_path, log_every, resume if resumed else None)
    for number in calls:
        call(state, recorder, *device.steps(number))
    recorder.catch_up()
    recorder.close()
    end = resumed + sum(calls)
    assert [line["step"] for line in steps_in(tmp_path)] == [
        n for n in range(resumed + 1, end + 1) if n % log_every == 0
    ]
    assert {line["images_per_second"] for line in steps_in(tmp_path)} == {4.0}


class OnDevice:
    """A loss that says when it is read."""

    is_read = False

    def __float__(self):
        self.is_read = True
        return 1.0


def test_a_loss_is_read_when_the_next_step_is_on_its_way(tmp_path):
    state, recorder = recorder_for(tmp_path)
    first, second = OnDevice(), OnDevice()
    call(state, recorder, first)
    call(state, recorder, second)
    assert not first.is_read and not second.is_read
    call(state, recorder, OnDevice())
    assert first.is_read and second.is_read
    recorder.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_loss_that_is_not_a_number_ends_the_run(bad, tmp_path):
    state, recorder = recorder_for(tmp_path)
    for loss in (1.0, 2.0, bad, bad):
        call(state, recorder, loss)
    with pytest.raises(NonFiniteLossError, match=rf"became {bad} at step 3 \(epoch 1\) with learning rate 0.25"):
        call(state, recorder, 5.0)
    recorder.close()
    assert [line["step"] for line in steps_in(tmp_path)] == [2]


def test_a_step_without_a_loss_is_no_error(tmp_path):
    state, recorder = recorder_for(tmp_path)
    call(state, recorder, None)
    call(state, recorder, 2.0)
    recorder.catch_up()
    recorder.close()
    assert [line["loss"] for line in steps_in(tmp_path)] == [2.0]


def test_rates_have_no_digits_of_round_off(tmp_path):
    """0.03 in float32 is 0.029999999329447746 in Python."""
    state, recorder = recorder_for(tmp_path, log_every=1)
    recorder.model.optimizer.learning_rate = 0.03
    for rate in (None, keras.ops.convert_to_tensor(0.003, "float32")):
        state.after_step(1.0, np.arange(4), {}, rate)
        recorder.on_train_batch_end(0)
    state.end_epoch()
    recorder.on_epoch_end(0, {})
    recorder.catch_up()
    recorder.on_train_end()
    recorder.close()
    assert [line["learning_rate"] for line in steps_in(tmp_path)] == [0.03, 0.003]
    assert json.loads((tmp_path / "report.json").read_text())["learning_rate"] == 0.03


def test_the_bar_fits_into_a_terminal(capsys):
    """A bar that is wider than 80 columns leaves a line each time that it is drawn. The last one may be."""
    state = RunState()
    state.begin_fit(batch_size=4, num_batches=1000, epochs=1)
    state.begin_epoch(0)
    progress = Progress(state, bar=True)
    progress.seconds_between_updates = 0.0
    progress.on_epoch_begin(0)
    logs = {"accuracy": 0.9876, "loss": 0.1234}
    for batch in (0, 98, 999):
        state.after_step(0.1, np.arange(4), {}, 0.5)
        progress._progress._last_update = 0.0  # at most twenty times a second, else
        progress.on_train_batch_end(batch, logs)
    state.end_epoch()
    progress.on_epoch_end(0, logs | {"val_accuracy": 0.9, "val_loss": 0.2})
    text = re.sub(r"\x1b\[\d+m|\x08", "", capsys.readouterr().out)
    *drawn, last = [bar for bar in text.partition("\n")[2].split("\r") if "loss" in bar]
    assert len(drawn) == 3 and max(len(bar.rstrip()) for bar in drawn) < 80
    assert re.search(r"1000/1000 .*/step, [\d,]+ samples/s - accuracy: 0.9876 - loss: 0.1234 - val_acc", last), last
