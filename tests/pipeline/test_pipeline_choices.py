"""Stages, devices and micro-batches go together, or one line says why not."""

import pytest

from kerasdp.config import Config
from kerasdp.errors import UserError


def pipeline(**changes):
    return Config(strategy="pipeline", **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_stages": 0}, "--stages: expected a whole number of at least 1. Received: 0"),
        ({"micro_batches": 0}, "--micro_batches: expected a whole number of at least 1. Received: 0"),
        ({"micro_batches": 2.5}, "--micro_batches: expected a whole number of at least 1. Received: 2.5"),
        (
            {"pipeline_schedule": "zigzag"},
            "--pipeline_schedule: expected one of gpipe, 1f1b, interleaved1f1b. Received: 'zigzag'",
        ),
        ({"balance": "beauty"}, "--balance: expected one of time, flops, parameters. Received: 'beauty'"),
        ({"split_size": "4", "micro_batches": 2}, "--split_size and --micro_batches say the same in two ways"),
        ({"split_size": "0"}, "--split_size: expected auto, or a whole number of at least 1. Received: '0'"),
        ({"split_size": "-4"}, "--split_size: expected auto"),
        ({"split_size": "4.0"}, "--split_size: expected auto"),
        ({"split_size": "best"}, "--split_size: expected auto, or a whole number of at least 1. Received: 'best'"),
        ({"cut_at": "a,b", "num_stages": 2}, "--stages: --cut_at makes 3 of them. Received: 2; leave it out"),
        (
            {"pipeline_schedule": "interleaved1f1b", "backend": "jax"},
            "--pipeline_schedule=interleaved1f1b: there for --backend=torch only. Received: jax",
        ),
        (
            {"pipeline_schedule": "interleaved1f1b", "backend": "tensorflow"},
            "--backend=torch only. Received: tensorflow",
        ),
        (
            {"num_devices": 3, "num_stages": 2},
            "--gpus: expected a multiple of the 2 stages, a device each. Received: 3",
        ),
        ({"num_devices": 2, "cut_at": "a,b"}, "--gpus: expected a multiple of the 3 stages"),
        (
            {"num_devices": 4, "num_stages": 2, "backend": "tensorflow"},
            "--gpus: expected 2, one pipeline, with --backend=tensorflow",
        ),
        (
            {"num_devices": 2, "num_stages": 3, "pipeline_schedule": "interleaved1f1b"},
            "--stages: expected a multiple of the 2 devices with --pipeline_schedule=interleaved1f1b, several on each. "
            "Received: 3",
        ),
        ({"num_devices": 2, "num_stages": 2, "pipeline_schedule": "interleaved1f1b"}, "several on each. Received: 2"),
        ({"num_devices": 8, "num_stages": 2, "batch_size": 3}, "expected at least 4 for 4 devices. Received: 3"),
    ],
)
def test_a_wrong_choice_is_one_line(changes, words):
    with pytest.raises(UserError) as caught:
        pipeline(**changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "tensorflow", "pipeline_schedule": "1f1b"},
        {"backend": "jax", "pipeline_schedule": "1f1b"},
        {"backend": "torch", "pipeline_schedule": "interleaved1f1b"},
        {"pipeline_schedule": "interleaved1f1b"},  # which backend is to be is not known yet
        {"cut_at": "a,b", "num_stages": 3},
        {"split_size": "auto"},
        {"split_size": 4},
        {"num_devices": 2, "num_stages": 2, "backend": "tensorflow"},
        {"num_devices": 4, "num_stages": 2, "batch_size": 2},
    ],
)
def test_a_right_one_is_taken(changes):
    pipeline(**changes)


@pytest.mark.parametrize("strategy", ["data", "tensor"])
@pytest.mark.parametrize(
    "changes",
    [{"num_stages": 2}, {"cut_at": "a"}, {"balance": "flops"}, {"split_size": "auto"}, {"micro_batches": 4},
     {"pipeline_schedule": "1f1b"}],
)  # fmt: skip
def test_a_flag_without_effect_is_refused(strategy, changes):
    (flag,) = changes
    with pytest.raises(UserError, match="have an effect only with --strategy=pipeline") as caught:
        Config(strategy=strategy, **changes)
    assert f"--{flag.removeprefix('num_')}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "num_devices", "stages", "pipelines"),
    [
        ({}, 4, 4, 1),
        ({"num_stages": 2}, 4, 2, 2),
        ({"num_stages": 1}, 4, 1, 4),
        ({"cut_at": "a,b"}, 6, 3, 2),
        ({"pipeline_schedule": "interleaved1f1b"}, 3, 6, 1),
        ({"pipeline_schedule": "interleaved1f1b", "num_stages": 2}, 1, 2, 1),
        ({"pipeline_schedule": "interleaved1f1b", "cut_at": "a,b,c"}, 2, 4, 1),
    ],
)
def test_stages_and_devices(changes, num_devices, stages, pipelines):
    settings = pipeline(**changes)
    assert settings.stages_on(num_devices) == stages
    assert settings.num_pipelines(num_devices) == settings.num_replicas(num_devices) == pipelines


def test_replicas_of_other_strategies():
    assert Config().num_replicas(4) == 4
    assert Config(strategy="tensor").num_replicas(4) == 1


@pytest.mark.parametrize(
    ("changes", "num_devices"),
    [
        ({"num_stages": 3}, 3),
        ({"cut_at": "a,b,c"}, 4),
        ({"num_stages": 4, "pipeline_schedule": "interleaved1f1b"}, 2),
        ({"num_stages": 2, "num_devices": 4}, 4),
        ({}, None),
    ],
)
def test_as_many_devices_as_stages(changes, num_devices):
    """Whoever says how many stages has said how many devices."""
    settings = pipeline(**changes).with_devices_for_stages()
    assert settings.num_devices == num_devices
    assert settings.with_devices_for_stages() == settings
    assert Config().with_devices_for_stages() == Config()


@pytest.mark.parametrize(
    ("changes", "num_stages", "num_pipelines", "expected"),
    [
        ({}, 2, 1, 16),  # two a stage
        ({}, 4, 1, 8),
        ({}, 2, 2, 8),
        ({"batch_size": 61}, 2, 1, 16),  # 16, 16, 16, 13
        ({"batch_size": 3}, 4, 1, 1),  # there are no more
        ({"micro_batches": 1}, 4, 1, 64),
        ({"micro_batches": 4}, 2, 2, 8),
        ({"micro_batches": 100}, 2, 1, 1),
        ({"split_size": "5"}, 2, 1, 5),
        ({"split_size": "5"}, 2, 2, 5),  # of each pipeline
        ({"split_size": "100"}, 2, 1, 64),
        ({"split_size": 7}, 2, 1, 7),
    ],
)
def test_size_of_a_micro_batch(changes, num_stages, num_pipelines, expected):
    assert pipeline(**changes).micro_batch_size(num_stages, num_pipelines) == expected
