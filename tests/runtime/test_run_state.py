"""One object knows where a training is, without any framework; what is made for a model does not keep it alive."""

import gc
import types
import weakref

import pytest

from kerasdp.runtime.run_state import Detail, ModelCache, Position, RunState


def steps(state, count, rows=4):
    for _ in range(count):
        state.after_step(0.5, types.SimpleNamespace(shape=(rows,)), {}, 0.1)


def test_steps_are_counted_through_epochs():
    state = RunState()
    state.begin_fit(batch_size=4, num_batches=3, epochs=2)
    assert state.num_steps == 6 and state.steps_left() is None
    for epoch in range(2):
        state.begin_epoch(epoch)
        steps(state, 3)
        assert state.position == (epoch, 3)
        state.end_epoch()
    assert state.step == 6 and state.epoch_images == 12
    assert len(state.epoch_seconds) == len(state.epoch_rates) == 2
    assert state.epoch_rates[1] == pytest.approx(12 / state.epoch_seconds[1])
    state.begin_fit(num_batches=3)
    assert state.step == 0 and state.epoch_seconds == []


@pytest.mark.parametrize(("max_steps", "expected"), [(4, 4), (6, 6), (9, 6), (None, 6)])
def test_num_steps(max_steps, expected):
    state = RunState()
    state.begin_fit(num_batches=3, epochs=2, max_steps=max_steps)
    assert state.num_steps == expected
    state.begin_fit(num_batches=None, epochs=2, max_steps=max_steps)
    assert state.num_steps == max_steps


def test_a_resumed_run_knows_where_it_began():
    state = RunState()
    state.begin_fit(num_batches=3, epochs=2)
    state.resume(4, Position(1, 1))
    state.begin_epoch(1)
    steps(state, 1)
    assert (state.first_step, state.step, state.num_steps) == (4, 5, 6)
    state.begin_fit(num_batches=3)
    assert state.first_step == 0


def test_max_steps_end_within_an_epoch():
    state = RunState()
    state.begin_fit(num_batches=3, epochs=2, max_steps=2)
    state.begin_epoch(0)
    steps(state, 1)
    assert state.steps_left() == 1 and not state.is_at_last_step
    steps(state, 1)
    assert state.steps_left() == 0 and state.is_at_last_step
    state.after_batch(is_stopping=True)
    assert state.is_epoch_cut
    steps(state, 1)
    assert state.steps_left() == 0
    state.after_batch(is_stopping=True)  # the last batch of the epoch
    assert not state.is_epoch_cut


def test_a_resumed_epoch_skips_its_first_batches_and_the_next_one_none():
    state = RunState()
    state.begin_fit(num_batches=5, epochs=4)
    state.resume(17, Position(3, 2), epoch_seconds=[1.0, 2.0, 3.0], epoch_rates=[20.0, 10.0, 7.0], images=8, seconds=50)
    state.begin_epoch(3)
    assert (state.num_skipped, state.position, state.epoch_images) == (2, (3, 2), 8)
    steps(state, 3)
    state.end_epoch()
    assert (state.step, state.batch, state.epoch_images) == (20, 5, 20)
    assert state.epoch_seconds[:3] == [1.0, 2.0, 3.0] and 50 < state.epoch_seconds[3] < 60
    state.begin_epoch(4)
    assert (state.num_skipped, state.batch, state.epoch_images) == (0, 0, 0)


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


def test_observer_and_listeners_hear_of_a_step_when_it_is_counted():
    heard = []
    state = RunState()

    class Observer:
        detail = Detail.SUMMARY

        def on_step(self, loss, samples, seen):
            heard.append(("observer", loss, seen))

    def listen(loss, learning_rate, num_rows):
        heard.append((state.step, loss, learning_rate, num_rows))

    assert state.detail == Detail.NOTHING
    state.observer = Observer()
    assert state.detail == Detail.SUMMARY
    state.add_listener(listen)
    steps(state, 1)
    assert heard == [("observer", 0.5, {}), (1, 0.5, 0.1, 4)]
    state.observer = None
    state.remove_listener(listen)
    state.remove_listener(listen)  # nothing to do
    steps(state, 1)
    assert len(heard) == 2


class Model:
    pass


def test_caches_do_not_see_one_anothers_values():
    first, second, model = ModelCache(), ModelCache(), Model()
    assert first.get(model) is None
    first.put(model, 1)
    second.put(model, 2)
    assert (first.get(model), second.get(model), first.get(Model())) == (1, 2, None)


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
