"""One object knows where a training is, without any framework; what is made for a model does not keep it alive."""

import gc
import types
import weakref

import pytest

from kerasdp.run_state import ModelCache, Position, RunState


def steps(state, count, rows=4):
    for _ in range(count):
        state.after_step(0.5, types.SimpleNamespace(shape=(rows,)), {}, 0.1)


@pytest.mark.parametrize(
    ("step", "position", "was_stopped", "expected"),
    [
        (20, (4, 0), False, True),
        (15, (3, 0), False, False),
        (15, (3, 0), True, True),
        (16, (3, 1), True, False),  # stopped within an epoch, whose validation is still to come
        (18, (3, 0), False, True),  # max_steps
    ],
)
def test_a_run_that_was_over(step, position, was_stopped, expected):
    state = RunState()
    state.begin_fit(num_batches=5, epochs=4, max_steps=18)
    state.resume(step, Position(*position), was_stopped=was_stopped)
    assert state.was_over == expected


def test_a_checkpoint_between_epochs_holds_nothing_of_the_one_that_is_over():
    state = RunState()
    state.begin_fit(num_batches=2)
    state.begin_epoch(0)
    steps(state, 2)
    within = state.measurements()
    assert within["images"] == 8 and within["seconds"] > 0 and within["epoch_seconds"] == []
    state.stop_clock()
    stopped = state.measurements()["seconds"]
    assert state.measurements()["seconds"] == stopped  # a validation is not measured
    state.end_epoch()
    after = state.measurements()
    assert (after["images"], after["seconds"]) == (0, 0.0) and after["epoch_seconds"] == [stopped]


class Model:
    pass


def test_a_value_that_refers_to_its_model_ends_with_it():
    cache, model = ModelCache(), Model()
    cache.put(model, [model])
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_a_value_ends_with_its_cache():
    cache, model, value = ModelCache(), Model(), Model()
    cache.put(model, value)
    seen = weakref.ref(value)
    del cache, value
    gc.collect()
    assert seen() is None
